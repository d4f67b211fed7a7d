"""The samples of one group, collected over several tries; groups with failed samples; the limit of failures.

    try ──> all rows, or the rows it kept ──> missing? ──> next try of the missing ones ──> ... ──> a group, or its failure

No I/O.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from skyrl_async.config.schema.generator import OnFailedSamples
from skyrl_async.errors import GenerationError, in_one_line
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.samples import live_samples_of
from skyrl_async.types import Trajectory

_MIN_SAMPLES = 2
"""A group of at least as many needs this many samples: one alone has no advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A group that can be trained."""

    trajectories: tuple[Trajectory, ...]
    num_failed: int = 0
    """Samples that the group lacks."""
    failure: Exception | None = None
    """Error of the last try that failed."""


class CollectedGroup:
    """The rows of one group so far.

    Args:
        request: for the whole group.
        policy: treatment of failed samples.
    """

    def __init__(self, request: GroupRequest, policy: OnFailedSamples) -> None:
        self._request = request
        self._policy = policy
        self._rows: dict[int, tuple[Trajectory, ...]] = {}
        self._complete: tuple[Trajectory, ...] | None = None
        self.failure: Exception | None = None
        """Error of the last try that failed."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The samples still to be generated; none once the group is complete."""
        if self._complete is not None:
            return ()
        return tuple(index for index in self._request.indices if index not in self._rows)

    @property
    def reason(self) -> str:
        """The failure in one line."""
        return "" if self.failure is None else in_one_line(self.failure)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled for the samples collected so far."""
        return sum(row.num_sampled_tokens for rows in self._rows.values() for row in rows)

    def __str__(self) -> str:
        request = self._request
        return f"rollout of {request.prompt.uid} lost {len(self.missing)} of its {request.num_samples} samples"

    def next_request(self) -> GroupRequest:
        """Request for the missing samples, with the seeds and the priority of the first one."""
        return replace(self._request, sample_indices=self.missing) if self._rows else self._request

    def add_returned(self, trajectories: Sequence[Trajectory]) -> None:
        """Add the rows that a try returned; none of them if they break the generator's contract."""
        asked = self.next_request()
        try:
            check_rows(trajectories, asked)
        except GenerationError as error:
            self.failure = error
            return
        by_sample = _by_sample(trajectories, asked)
        by_sample = {index: rows for index, rows in by_sample.items() if self._is_taken(rows)}
        if asked is self._request and len(by_sample) == len(asked.indices):
            self._complete = tuple(trajectories)
            return
        for index, rows in by_sample.items():
            self._rows[index] = tuple(replace(row, sample_index=index) for row in rows)
        if self.missing:
            self.failure = GenerationError(
                f"samples {', '.join(map(str, self.missing))} of {self._request.prompt.uid} were abandoned"
            )

    def add_failure(self, failure: Exception, kept: Mapping[int, Sequence[Trajectory]]) -> None:
        """Add the finished samples ``kept`` of a try that failed. A sample without a finite reward counts as failed, too."""
        self.failure = failure
        for index in self.missing:
            rows = kept.get(index)
            if rows is not None and self._is_taken(rows) and all(math.isfinite(row.reward) for row in rows):
                self._rows[index] = tuple(replace(row, sample_index=index) for row in rows)

    def finish(self) -> RolloutResult:
        """Return the group after the last try. Raises its failure if the policy does not allow missing samples."""
        if self._complete is not None:
            return RolloutResult(trajectories=self._complete)
        assert self.failure is not None
        rows = tuple(row for index in sorted(self._rows) for row in self._rows[index])
        is_rest_trained = self._policy is OnFailedSamples.train_rest and not self._request.is_evaluation
        if self.missing and not (is_rest_trained and self._has_enough(rows)):
            raise self.failure
        _require_tokens(rows, self._request)
        return RolloutResult(trajectories=rows, num_failed=len(self.missing), failure=self.failure)

    def _is_taken(self, rows: Sequence[Trajectory]) -> bool:
        """Whether the sample is not to be tried again, though it may have been abandoned."""
        return self._policy is OnFailedSamples.train_rest or (len(rows) > 0 and not rows[0].is_abandoned)

    def _has_enough(self, rows: Sequence[Trajectory]) -> bool:
        live = live_samples_of(rows)
        return len(live) >= min(_MIN_SAMPLES, self._request.num_samples) and any(s.num_sampled_tokens for s in live)


def check_rows(trajectories: Sequence[Trajectory], request: GroupRequest) -> None:
    """Raise ``GenerationError`` unless the rows are of the requested samples and can be trained.

    One row per sample is accepted, or rows with a ``sample_index``; a sample without a row was abandoned early.
    """
    uid, is_whole = request.prompt.uid, request.sample_indices is None
    indices = {row.sample_index for row in trajectories}
    if indices == {None} or (not indices and is_whole):
        num, expected = len(trajectories), len(request.indices)
        _require(num == expected, f"{num} trajectories for {uid}, expected {expected}")
    else:
        unknown = next((str(index) for index in indices if index not in request.indices), "")
        asked = f"in [0, {request.num_samples})" if is_whole else f"of {request.sample_indices}"
        found = f"a trajectory of sample_index {unknown} for {uid}, expected all of them {asked} or none set"
        _require(not unknown, found)
    if is_whole:
        _require_tokens(trajectories, request)
    for place, row in enumerate(trajectories):
        index = request.indices[place] if row.sample_index is None else row.sample_index
        found = f"the reward {row.reward} for sample {index} of {uid}, expected a finite number"
        _require(math.isfinite(row.reward), found)


def _require_tokens(trajectories: Sequence[Trajectory], request: GroupRequest) -> None:
    """Raise ``GenerationError`` for a group without a row, and unless it is an evaluation's for one of which nothing can be trained."""
    uid = request.prompt.uid
    _require(len(trajectories) > 0, f"no trajectory for {uid}")
    _require(
        request.is_evaluation or any(row.num_sampled_tokens for row in trajectories),
        f"no sampled token for {uid}: every loss mask is empty (as are those of turns sampled under a grammar, such as "
        "tool_choice=required, unless trainer.algorithm.policy_loss_type is decoupled_ppo or rollout_is)",
    )


def _require(is_so: bool, returned: str) -> None:
    if not is_so:
        raise GenerationError(f"the generator returned {returned}")


def _by_sample(trajectories: Sequence[Trajectory], request: GroupRequest) -> dict[int, tuple[Trajectory, ...]]:
    """The rows of each requested sample; empty for a sample that was abandoned before anything was sampled."""
    if trajectories and all(row.sample_index is None for row in trajectories):
        return {index: (row,) for index, row in zip(request.indices, trajectories, strict=True)}
    return {index: tuple(row for row in trajectories if row.sample_index == index) for index in request.indices}


_WINDOW = 100
_MIN_GROUPS_BEFORE_STOP = 10


class FailureWatch:
    """Stops the run if too many of the last 100 groups failed. A group with failed samples counts by their share."""

    def __init__(self, max_failed_fraction: float) -> None:
        self._limit = max_failed_fraction
        self._failed_shares: deque[float] = deque(maxlen=_WINDOW)
        self._last: tuple[str, Exception] | None = None
        self.reasons: deque[str] = deque(maxlen=_WINDOW)
        """Why the newest of the failed groups failed."""

    def restore(self, num_succeeded: int) -> None:
        """Count so many groups that did not fail before the run was resumed: those that are left may be few."""
        self._failed_shares.extend([0.0] * min(num_succeeded, _WINDOW))

    def count(self, uid: str, error: Exception | None, *, share: float = 1.0) -> None:
        """Count a group, of which this share failed if there is an error. Raises ``GenerationError`` if too many failed."""
        self._failed_shares.append(share if error else 0.0)
        if error is not None:
            self._last = uid, error
            self.reasons.append(f"{type(error).__name__}: {error}")
            self.raise_if_too_many()

    def raise_if_too_many(self, *, has_ended: bool = False) -> None:
        """Raise ``GenerationError`` with the last failure.

        Before 10 groups have ended, the missing ones count as successes, unless the run ``has_ended``. A run in which every group
        failed is an error whatever the limit.
        """
        num_failed, num_recent = math.fsum(self._failed_shares), len(self._failed_shares)
        num_counted = num_recent if has_ended else max(num_recent, _MIN_GROUPS_BEFORE_STOP)
        is_fine = num_failed <= self._limit * num_counted and not (has_ended and num_failed == num_recent)
        if self._last is None or is_fine:
            return
        uid, error = self._last
        what = f"all of the {num_recent} groups failed"
        if num_failed > self._limit * num_counted:
            limit = f"more than generator.max_failed_fraction={self._limit:g}"
            what = f"{num_failed:.4g} of the last {num_recent} groups failed, {limit}"
        raise GenerationError(f"{what}; the last one ({uid}): {type(error).__name__}: {error}") from error
