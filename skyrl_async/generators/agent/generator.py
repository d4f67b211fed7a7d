"""The generator that runs any harness against the endpoint: one session and one run of the harness per sample.

    prompt ──> session (key) ──> harness ──HTTP──> endpoint ──> reward ──> finish(reward) ──> training rows

The endpoint captures exact token ids, log-probs and versions. Does not know tokenizers, engines, or a harness's work.
"""

import asyncio
import contextlib
import functools
import logging
import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from skyrl_async.columns import VersionSpans
from skyrl_async.errors import (
    EnvironmentFailedError,
    GenerationError,
    InvalidResultError,
    OutageError,
    SessionError,
    SkyRLAsyncError,
    first_and_last_line,
    in_one_line,
    printable,
)
from skyrl_async.generators.agent.failures import Failure, FirstSamples, Reasons, final_failure, is_power_of_ten
from skyrl_async.generators.agent.harness import AgentResult, AgentTask, Harness, shown_extras
from skyrl_async.generators.agent.processes import end_guard, start_guard
from skyrl_async.generators.agent.reward import AgentEpisode, EpisodeReward, RewardSource, earned
from skyrl_async.generators.agent.sessions import AgentSession, SessionPool
from skyrl_async.rollout.generator import GroupRequest, keeps_samples, run_samples
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.runtime.progress import OnCall, report, report_engine
from skyrl_async.types import FinishReason, Prompt, Trajectory

logger = logging.getLogger(__name__)

_MIN_FINISHED = 2
"""Samples of a group that must finish, because one alone has no advantage."""
_MAX_LOG_CHARS = 4096
"""Characters of the end of each log, which goes with every row of the sample."""
DIRECTORY_MARK = "SKYRL_AGENTS"
"""Variable with the directory of temporary directories, of processes that must end before it is deleted."""
_SESSION_MARGIN_S = 7200.0
"""Time for rewards, and for outages, in which an agent's time stands still. A session lasts as long as its agent may run: environments and
tools take minutes in which nothing is asked. Only a session that its generator has forgotten expires.
"""
_UNSAMPLED = Trajectory(
    prompt_token_ids=(),
    response_token_ids=(),
    loss_mask=(),
    logprobs=(),
    versions=VersionSpans(),
    reward=0.0,
    num_turns=0,
)
"""The row of a failed sample for which nothing was sampled."""
_UNSAFE = re.compile(r"[^\w.-]")
"""Characters of a uid that are replaced in a directory's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    rows: tuple[Trajectory, ...]
    failure: Failure | None


@dataclass(eq=False)
class AgentGenerator:
    """A ``Generator`` over any harness.

    A sample whose harness fails (an exception, an exit status, a timeout, no turn at all) is abandoned: its rows are masked, the
    group's other samples are trained. At least two samples of a group must finish (one, if only one is requested). Otherwise
    ``GenerationError`` is raised with the first failure, and the caller may retry the failed samples.

    Two failures are not the harness's fault. If the endpoint reports that a cap ended the session, or that its last answer was cut at
    a length limit, the sample is truncated, and rewarded for its work so far. If there was an outage, ``OutageError`` is raised after
    the other samples have ended, so that the sample is retried.

    In an evaluation a failed sample gets reward 0 and nothing is abandoned, so that a policy gains nothing by breaking its harness.

    If no sample works from the start on, for a reason that is not the policy's, ``AgentsFailedError`` ends the run.

    Rows carry their ``sample_index``. A sample may have several rows (a rewritten history), or one without tokens (nothing was sampled).
    """

    pool: SessionPool
    """Creates sessions; closed by ``close``."""
    harness: Harness
    """Runs a sample."""
    reward_source: RewardSource
    """Rewards it."""
    _: KW_ONLY
    agent_timeout_s: float
    """Longest run of the harness, without the wait for its start."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Stand still in outages."""
    max_concurrent_agents: int | None = None
    """Harnesses running concurrently, over all groups; None: no limit."""
    working_dir: Path | None = None
    """Parent of the working directories, which are kept; None makes temporary ones."""
    on_call: OnCall = lambda *_: None
    """Told of the endpoint's engine calls, once a sample has ended."""

    def __post_init__(self) -> None:
        limit = self.max_concurrent_agents
        self._slots = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        self._deleting = ThreadPoolExecutor(thread_name_prefix="agent")
        self._counts = {"running": 0, "finished": 0, "failed": 0, "timeouts": 0, "truncated": 0}
        self._reasons, self._first_samples = Reasons(), FirstSamples()

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Return the rows of the requested samples, ordered by sample.

        Raises ``GenerationError`` if too few samples finish or the endpoint fails, and any error of the reward source; the other
        samples run to their end first.
        """
        samples = await run_samples(
            request,
            "agent",
            lambda index: self._run_sample(request, index),
            lambda sample: None if sample.failure and not request.is_evaluation else sample.rows,
            lambda rows: _Sample(rows=rows, failure=None),
        )
        failures = [sample.failure for sample in samples if sample.failure]
        num_finished = request.num_samples - len(failures)  # with the samples that were not requested again
        if not request.is_evaluation and num_finished < min(_MIN_FINISHED, request.num_samples):
            raise GenerationError(
                f"{len(failures)} of {len(samples)} agents failed on {request.prompt.uid}, the first one: {failures[0].message}"
            )
        return tuple(row for sample in samples for row in sample.rows)

    def statistics(self) -> dict[str, float]:
        """Agents running now, and totals: finished (with truncated), failed (with timeouts), timeouts, truncated."""
        return {name: float(count) for name, count in self._counts.items()}

    async def close(self) -> None:
        """End the harness, close the connections, and wait until the working directories are deleted."""
        await self.harness.close()
        await self.pool.close()
        await asyncio.to_thread(self._deleting.shutdown)
        if "_temporary" in self.__dict__:
            await asyncio.to_thread(rmtree, self._temporary, ignore_errors=True)

    async def _run_sample(self, request: GroupRequest, index: int) -> _Sample:
        """Run one sample after waiting for a slot. A lost session is a failure of the sample.

        Raises ``OutageError`` if the sample failed and there was an outage during its run.
        """
        label, outages = f"{request.prompt.uid}-{index}", self.deadlines.outages
        report("waiting for a place")
        async with self._slots:
            num_over = outages.num_over
            report("opening its session")
            with self._workspace(label) as working_dir:
                try:
                    async with self.pool.session(
                        sampling=request.sampling,
                        priority=request.priority,
                        label=label,
                        lifetime_s=self.agent_timeout_s + _SESSION_MARGIN_S,
                    ) as session:
                        sample = await self._run_in(session, request, index, working_dir)
                except SessionError as error:
                    failure = Failure(message=f"its session was lost: {error}")
                    sample = _failed(request, index, (), failure, _of_failure(failure), {})
        self._count(label, sample)
        if sample.failure and outages.met_since(num_over):
            raise OutageError(f"agent {label} failed in an outage: {sample.failure.message}")
        self._first_samples.count(
            label, sample.failure.message if sample.failure and sample.failure.is_mistake else None
        )
        return sample

    def _count(self, label: str, sample: _Sample) -> None:
        if sample.failure is None:
            self._counts["finished"] += 1
            self._counts["truncated"] += any(row.is_truncated for row in sample.rows)
            return
        self._counts["failed"] += 1
        self._counts["timeouts"] += sample.failure.is_timeout
        number = self._reasons.count(sample.failure)
        if number == 1:
            logger.warning("agent %s failed: %s", label, printable(sample.failure.message))
        else:
            level = logging.WARNING if is_power_of_ten(number) else logging.INFO
            brief = printable(first_and_last_line(sample.failure.message))
            logger.log(level, "agent %s failed, like %d before it: %s", label, number - 1, brief)

    async def _run_in(self, session: AgentSession, request: GroupRequest, index: int, working_dir: Path) -> _Sample:
        """Run the harness, then reward or abandon the sample."""
        started = asyncio.get_running_loop().time()
        report("in its agent")
        task = _task(session, request, index, working_dir)
        outcome = await self._run_harness(task)
        metrics = {"timing/agent": asyncio.get_running_loop().time() - started}
        result, failure = (AgentResult(), outcome) if isinstance(outcome, Failure) else (outcome, None)
        report("rewarding")
        status = await session.status()
        episode = _episode(status, result, working_dir, failure)
        failure = final_failure(failure, status, episode)
        if episode.failure and not failure:
            logger.info(
                "agent %s-%d was cut short, and is rewarded for what it did: %s", task.uid, index, episode.failure
            )
        metrics |= {
            **_of_failure(failure),
            "agent/cut_short": float(episode.failure is not None and failure is None),
            "agent/side_requests": float(status.get("num_side_requests", 0)),
            "agent/side_tokens": float(status.get("num_side_tokens", 0)),
            **result.metrics,
        }
        logs = {name: text[-_MAX_LOG_CHARS:] for name, text in result.logs.items()}
        reward = EpisodeReward(reward=0.0)
        if not failure:
            try:
                reward = await self._reward_of(request.prompt, episode, result)
            except Exception as error:  # not the agent's fault, nor the policy's
                error.add_note(f"which rewards sample {index} of prompt {task.uid!r}")
                self._first_samples.count(f"{task.uid}-{index}", in_one_line(error))
                with contextlib.suppress(SkyRLAsyncError):  # the error of the reward is the one to know
                    rows = await session.abandon(metrics=metrics)
                    request.sample_states.fail(
                        index, [replace(row, logs=logs) for row in rows], f"{type(error).__name__}: {error}"
                    )
                raise
        if failure and not request.is_evaluation:
            rows = await session.abandon(metrics=metrics)
        else:
            rows = await session.finish(
                reward.reward,
                turn_rewards=reward.turn_rewards,
                metrics=reward.metrics | metrics,
                is_truncated=episode.is_truncated,
            )
        for engines, num_tokens, seconds in _engine_calls(rows):
            for engine in engines:
                report_engine(engine)
            if len(engines) == 1:
                self.on_call(engines[0], num_tokens, seconds)
        if failure:
            return _failed(request, index, rows, failure, metrics, logs)
        return _Sample(rows=tuple(replace(row, sample_index=index, logs=logs) for row in rows), failure=None)

    async def _run_harness(self, task: AgentTask) -> AgentResult | Failure:
        try:
            async with self.deadlines.within(self.agent_timeout_s) as deadline:
                return await self.harness.run(task)
        except EnvironmentFailedError:
            raise
        except Exception as error:  # a harness is the user's and may fail in any way: counted, not raised
            if deadline.expired():
                message = f"it took longer than generator.agent_timeout_s={self.agent_timeout_s:g}"
                return Failure(message=message, is_timeout=True)
            message = str(error) if isinstance(error, GenerationError) else f"{type(error).__name__}: {error}"
            return Failure(message=message, is_mistake=isinstance(error, InvalidResultError))

    async def _reward_of(self, prompt: Prompt, episode: AgentEpisode, result: AgentResult) -> EpisodeReward:
        """The harness's own reward if it returned one, else the reward source's."""
        if result.reward is None:
            return await self.reward_source.reward_of(prompt, episode)
        return earned(result.reward, "generator.entrypoint", episode)

    @functools.cached_property
    def _temporary(self) -> str:
        """Directory of the temporary directories; a guard deletes it if this process is killed."""
        directory = tempfile.mkdtemp(prefix="skyrl_async-agents-")
        if (guard := start_guard(f"{DIRECTORY_MARK}={directory}", directory)) is not None:
            weakref.finalize(self, end_guard, guard)
        return directory

    @contextlib.contextmanager
    def _workspace(self, label: str) -> Iterator[Path]:
        """A new directory of a running agent. A temporary one is deleted in the background, because it may be large."""
        prefix = f"{_UNSAFE.sub('_', label)[:80]}-"
        is_kept = self.working_dir is not None
        directory = tempfile.mkdtemp(prefix=prefix, dir=self.working_dir or self._temporary)
        self._counts["running"] += 1
        self._first_samples.most_running = max(self._first_samples.most_running, self._counts["running"])
        try:
            yield Path(directory)
        finally:
            self._counts["running"] -= 1
            if not is_kept:
                self._deleting.submit(rmtree, directory, ignore_errors=True)


def _of_failure(failure: Failure | None) -> dict[str, float]:
    return {
        "agent/failed": float(failure is not None),
        "agent/timeouts": float(failure is not None and failure.is_timeout),
    }


def _failed(
    request: GroupRequest,
    index: int,
    rows: Sequence[Trajectory],
    failure: Failure,
    metrics: dict[str, float],
    logs: dict[str, str],
) -> _Sample:
    """A failed sample. It has a row without tokens if nothing was sampled, so that it is counted and recorded like any other."""
    rows = rows or (replace(_UNSAMPLED, is_abandoned=not request.is_evaluation, metrics=metrics),)
    logs = {**logs, "failure": failure.message}
    rows = tuple(replace(row, sample_index=index, logs=logs) for row in rows)
    request.sample_states.fail(index, rows, failure.message)
    return _Sample(rows=rows, failure=failure)


def _engine_calls(rows: Sequence[Trajectory]) -> Iterator[tuple[tuple[str, ...], int, float]]:
    """Engines, sampled tokens and engine seconds of each reply, once: branches share their first ones."""
    seen: set[tuple[int, float]] = set()
    for row in rows:
        ends = [message.start for message in row.messages[1:]]
        ends.append(len(row.prompt_token_ids) + len(row.response_token_ids))
        for message, end in zip(row.messages, ends, strict=False):
            seconds = message.engine_seconds
            if message.is_reply and seconds is not None and (message.start, seconds) not in seen:
                seen.add((message.start, seconds))
                yield message.engines, end - message.start, seconds


def _task(session: AgentSession, request: GroupRequest, index: int, working_dir: Path) -> AgentTask:
    return AgentTask(
        uid=request.prompt.uid,
        messages=deepcopy(request.prompt.messages),
        extras=shown_extras(request.prompt.extras),
        base_url=session.base_url,
        api_key=session.api_key,
        model=session.model,
        max_model_len=session.max_model_len,
        working_dir=working_dir,
        sample_index=index,
        is_evaluation=request.is_evaluation,
        sampling=request.sampling,
    )


def _episode(
    status: Mapping[str, Any], result: AgentResult, working_dir: Path, failure: Failure | None
) -> AgentEpisode:
    """Combine the endpoint's and the harness's reports."""
    is_cut = status.get("last_finish_reason") == FinishReason.LENGTH
    return AgentEpisode(
        messages=tuple(status["messages"]),
        message_turns=tuple(status["message_turns"]),
        last_text=status["last_text"],
        output=result.output,
        working_dir=working_dir,
        num_turns=status["num_turns"],
        num_turn_tokens=tuple(status.get("num_turn_tokens", ())),
        is_truncated=bool(status["was_cut_short"]) or (failure is not None and is_cut),
        failure=failure.message if failure else None,
    )
