"""Failures of samples: which one counts, how often its reason is shown, and whether any sample can work.

harness's failure ─┐
session's status  ─┴─> final_failure ──> Failure ──> Reasons (what is shown), FirstSamples (whether the run goes on)
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_async.errors import AgentsFailedError
from skyrl_async.generators.agent.reward import AgentEpisode

_MIN_SAMPLES = 8
_MAX_REASONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of a sample."""

    message: str
    is_timeout: bool = False
    is_mistake: bool = False
    """It is not the policy's: no request came with the sample's key, all were refused, or the result has the wrong form."""


def final_failure(failure: Failure | None, status: Mapping[str, Any], episode: AgentEpisode) -> Failure | None:
    """The failure that counts: none if the endpoint stopped the harness, one if the model never answered.

    A failure right after an answer cut by a length limit is caused by the cut: the OpenAI Agents SDK raises on ``incomplete``.
    """
    if status.get("state") == "expired":
        return Failure(message="its session expired; see server.session_idle_timeout_s and session_lifetime_s")
    if not episode.num_turns:
        return _without_a_turn(failure, status)
    if failure and episode.is_truncated and not failure.is_timeout:
        return None
    return failure


def _without_a_turn(failure: Failure | None, status: Mapping[str, Any]) -> Failure:
    """What came with the sample's key, and the harness's own failure, if there is one."""
    num_requests = status.get("num_requests", 0)
    is_timeout = failure is not None and failure.is_timeout
    is_perhaps_fine = num_requests and (is_timeout or status.get("num_overflows", 0))  # slow, or a prompt too long
    fact = "no request came with its key (does it use OPENAI_BASE_URL and OPENAI_API_KEY?)"
    if num_requests:
        fact = f"none of its requests became a turn ({num_requests} came with its key)"
    return Failure(
        message=f"{fact}: {failure.message if failure else 'it ended without a turn of the model'}",
        is_timeout=is_timeout,
        is_mistake=not is_perhaps_fine,
    )


@dataclass(slots=True)
class Reasons:
    """Counts failures by their reason, the last line of the message."""

    _counts: Counter[str] = field(default_factory=Counter)

    def count(self, failure: Failure) -> int:
        """Count a failure; returns how many there are with its reason."""
        if len(self._counts) > _MAX_REASONS:
            self._counts.clear()
        reason = failure.message.strip().rpartition("\n")[2]
        self._counts[reason] += 1
        return self._counts[reason]


def is_power_of_ten(number: int) -> bool:
    """For a positive ``number``."""
    return str(number).strip("0") == "1"


@dataclass(slots=True)
class FirstSamples:
    """Counts samples until one has worked, or none can.

    None can once as many as ran side by side, and at least eight, have failed for a reason that is not the policy's: a ``Failure``
    that is a mistake, or a reward that raised. Else a command that cannot work is tried for every held-out prompt, and several times for
    every group.
    """

    most_running: int = 0
    """Most samples that have run at once."""
    _num_failed: int = 0
    _has_worked: bool = False

    def count(self, label: str, mistake: str | None) -> None:
        """Count a sample that ended. ``mistake``: why perhaps none can work; None if this one worked, or failed in its work.

        Raises ``AgentsFailedError`` if none can.
        """
        self._has_worked |= mistake is None
        self._num_failed += 1
        if not self._has_worked and self._num_failed >= max(_MIN_SAMPLES, self.most_running):
            raise AgentsFailedError(
                f"none of the first {self._num_failed} samples worked; the last of them ({label}): {mistake}"
            )
