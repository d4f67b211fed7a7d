"""The generator that runs any harness against the endpoint: one session and one run of the harness per sample.

    prompt ──> session (key) ──> harness ──HTTP──> endpoint ──> reward of what it did ──> finish(reward) ──> training rows

Flows in: group requests. Flows out: rows with exact token ids, log-probs and versions, captured at the endpoint. Does not know
tokenizers, engines, or what a harness does.
"""

import asyncio
import contextlib
import logging
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from skyrl_async.errors import GenerationError, OutageError, SessionError
from skyrl_async.generators.agent.harness import AgentResult, AgentTask, Harness, shown_extras
from skyrl_async.generators.agent.reward import AgentEpisode, EpisodeReward, RewardSource
from skyrl_async.generators.agent.sessions import AgentSession, SessionPool
from skyrl_async.rollout.generator import GroupRequest, keeps_samples, run_samples
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.runtime.progress import report
from skyrl_async.types import FinishReason, Prompt, Trajectory

logger = logging.getLogger(__name__)

_MIN_FINISHED = 2
"""Samples of a group that must finish: one alone has no advantage."""
_UNSAFE = re.compile(r"[^\w.-]")
"""Characters of a uid that do not go into a directory's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why a harness did not come to its end."""

    message: str
    is_timeout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """What became of one sample."""

    rows: tuple[Trajectory, ...]
    reward: float
    failure: _Failure | None


class AgentGenerator:
    """A ``Generator`` over any harness.

    A sample whose harness fails (an exception, an exit status, a timeout, no turn at all) is an abandoned member of its group:
    its rows are masked, the others are trained. At least two samples of a group must finish (one, where only one is asked),
    else ``GenerationError`` is raised with the first failure, and whoever asked may play those that failed again. Where the
    endpoint says that a cap ended the session, or that its last answer was cut at a length limit, the harness did not fail: it is
    truncated, and rewarded for what it did. Nor did it where it met an outage: ``OutageError`` is raised once the others are played,
    so that the sample is played again.

    In an evaluation a failed sample earns 0 and nothing is abandoned, so that a policy gains nothing by breaking its harness.

    Rows carry their ``sample_index``. A sample may have several (a rewritten history) or none (nothing was sampled); for an
    evaluation it has at least one, empty if need be.
    """

    def __init__(
        self,
        pool: SessionPool,
        harness: Harness,
        reward_source: RewardSource,
        *,
        agent_timeout_s: float,
        executor: ThreadPoolExecutor,
        deadlines: Deadlines | None = None,
        max_concurrent_agents: int | None = None,
        working_dir: Path | None = None,
    ) -> None:
        """
        Args:
            pool: creates sessions; closed by ``close``.
            harness: plays a sample.
            reward_source: rewards it.
            agent_timeout_s: of one run of the harness, not counting the wait for a place.
            executor: deletes working directories; shut down by ``close``, which waits for what it does.
            deadlines: stand still in outages; None: there is none.
            max_concurrent_agents: harnesses running at once over all groups; None sets no limit.
            working_dir: where working directories are made and kept; None makes temporary ones.
        """
        self._pool = pool
        self._harness = harness
        self._reward_source = reward_source
        self._agent_timeout_s = agent_timeout_s
        self._deadlines = deadlines or Deadlines()
        self._executor = executor
        self._slots = asyncio.Semaphore(max_concurrent_agents) if max_concurrent_agents else contextlib.nullcontext()
        self._working_dir = working_dir
        self._counts = {"running": 0, "finished": 0, "failed": 0, "timeouts": 0, "truncated": 0}

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Return the rows of the samples asked for, those of one sample next to each other.

        Raises ``GenerationError`` when too few samples finish or the endpoint fails, and whatever the judge raises; the others
        are played to their end first.
        """
        samples = await run_samples(
            request,
            "agent",
            lambda index: self._play(request, index),
            lambda sample: None if sample.failure and not request.is_evaluation else sample.rows,
            lambda rows: _Sample(rows=rows, reward=rows[0].reward if rows else 0.0, failure=None),
        )
        failures = [sample.failure for sample in samples if sample.failure]
        num_finished = request.num_samples - len(failures)  # those that were not asked for again among them
        if not request.is_evaluation and num_finished < min(_MIN_FINISHED, request.num_samples):
            raise GenerationError(
                f"{len(failures)} of {len(samples)} agents failed on {request.prompt.uid}, the first one: {failures[0].message}"
            )
        return tuple(row for sample in samples for row in sample.rows)

    def statistics(self) -> dict[str, float]:
        """Agents running now, and so far: finished, failed (timeouts among them), timeouts, truncated (finished among them)."""
        return {name: float(count) for name, count in self._counts.items()}

    async def close(self) -> None:
        """Close the connections, and wait for working directories to be deleted."""
        await self._pool.close()
        await asyncio.to_thread(self._executor.shutdown)

    async def _play(self, request: GroupRequest, index: int) -> _Sample:
        """One sample, once there is a place. A session that is gone by itself is a failure of the sample.

        Raises ``OutageError`` where the sample failed and there was an outage while it was played.
        """
        label, outages = f"{request.prompt.uid}-{index}", self._deadlines.outages
        report("waiting for a place")
        async with self._slots:
            num_over = outages.num_over
            report("opening its session")
            with self._counted_as_running(), self._workspace(label) as working_dir:
                try:
                    async with self._pool.session(
                        sampling=request.sampling, priority=request.priority, label=label
                    ) as session:
                        sample = await self._play_in(session, request, index, working_dir)
                except SessionError as error:
                    failure = _Failure(message=f"its session was lost: {error}")
                    sample = _Sample(rows=(), reward=0.0, failure=failure)
        self._count(label, sample)
        if sample.failure and outages.met_since(num_over):
            raise OutageError(f"agent {label} failed in an outage: {sample.failure.message}")
        if request.is_evaluation and not sample.rows:
            return replace(sample, rows=(_unsampled(index, sample.reward),))
        return sample

    def _count(self, label: str, sample: _Sample) -> None:
        if sample.failure is None:
            self._counts["finished"] += 1
            self._counts["truncated"] += any(row.is_truncated for row in sample.rows)
            return
        self._counts["failed"] += 1
        self._counts["timeouts"] += sample.failure.is_timeout
        logger.warning("agent %s failed: %s", label, sample.failure.message)

    async def _play_in(self, session: AgentSession, request: GroupRequest, index: int, working_dir: Path) -> _Sample:
        """Run the harness, then reward what it did or abandon it."""
        started = asyncio.get_running_loop().time()
        report("in its agent")
        task = _task(session, request, index, working_dir)
        outcome = await self._run_harness(task)
        metrics = {"timing/agent": asyncio.get_running_loop().time() - started}
        result, failure = (AgentResult(), outcome) if isinstance(outcome, _Failure) else (outcome, None)
        report("rewarding")
        status = await session.status()
        episode = _episode(status, result, working_dir, failure)
        failure = _settled(failure, status, episode)
        if episode.failure and not failure:
            logger.info(
                "agent %s-%d was cut short, and is rewarded for what it did: %s", task.uid, index, episode.failure
            )
        metrics |= {
            "agent/failed": float(failure is not None),
            "agent/timeouts": float(failure is not None and failure.is_timeout),
            "agent/interruptible": float(episode.failure is not None and failure is None),
            "agent/side_requests": float(status.get("num_side_requests", 0)),
            "agent/side_tokens": float(status.get("num_side_tokens", 0)),
            **result.metrics,
        }
        earned = EpisodeReward(reward=0.0) if failure else await self._reward_of(request.prompt, episode, result)
        if failure and not request.is_evaluation:
            rows = await session.abandon(metrics=metrics)
        else:
            rows = await session.finish(
                earned.reward, metrics=earned.metrics | metrics, is_truncated=episode.is_truncated
            )
        rows = tuple(replace(row, sample_index=index) for row in rows)
        return _Sample(rows=rows, reward=earned.reward, failure=failure)

    async def _run_harness(self, task: AgentTask) -> AgentResult | _Failure:
        try:
            async with self._deadlines.within(self._agent_timeout_s) as deadline:
                return await self._harness.run(task)
        except Exception as error:  # a harness is the user's, and may fail in any way: counted, not raised
            if deadline.expired():
                message = f"it took longer than generator.agent_timeout_s={self._agent_timeout_s:g}"
                return _Failure(message=message, is_timeout=True)
            message = str(error) if isinstance(error, GenerationError) else f"{type(error).__name__}: {error}"
            return _Failure(message=message)

    async def _reward_of(self, prompt: Prompt, episode: AgentEpisode, result: AgentResult) -> EpisodeReward:
        """The reward that the harness gives itself, where it may, else the judge's."""
        if result.reward is None:
            return await self._reward_source.reward_of(prompt, episode)
        if not math.isfinite(result.reward):
            raise GenerationError(f"generator.entrypoint must return a finite reward, got {result.reward}")
        return EpisodeReward(reward=result.reward)

    @contextlib.contextmanager
    def _counted_as_running(self) -> Iterator[None]:
        self._counts["running"] += 1
        try:
            yield
        finally:
            self._counts["running"] -= 1

    @contextlib.contextmanager
    def _workspace(self, label: str) -> Iterator[Path]:
        """A directory that no other run has or had. A temporary one is deleted behind the caller's back: it may be large."""
        prefix = f"{_UNSAFE.sub('_', label)[:80]}-"
        if self._working_dir is not None:
            yield Path(tempfile.mkdtemp(prefix=prefix, dir=self._working_dir))
            return
        directory = Path(tempfile.mkdtemp(prefix=f"skyrl_async-{prefix}"))
        try:
            yield directory
        finally:
            self._executor.submit(rmtree, directory, ignore_errors=True)


def _task(session: AgentSession, request: GroupRequest, index: int, working_dir: Path) -> AgentTask:
    return AgentTask(
        uid=request.prompt.uid,
        messages=deepcopy(request.prompt.messages),
        extras=shown_extras(request.prompt.extras),
        base_url=session.base_url,
        api_key=session.api_key,
        model=session.model,
        working_dir=working_dir,
        sample_index=index,
        is_evaluation=request.is_evaluation,
        sampling=request.sampling,
    )


def _episode(
    status: Mapping[str, Any], result: AgentResult, working_dir: Path, failure: _Failure | None
) -> AgentEpisode:
    """What the endpoint and the harness say of a run that has ended. Raises ``GenerationError`` when the status lacks a field."""
    try:
        return AgentEpisode(
            messages=tuple(status["messages"]),
            last_text=status["last_text"],
            output=result.output,
            working_dir=working_dir,
            num_turns=status["num_turns"],
            is_truncated=bool(status["was_cut_short"]) or (failure is not None and _was_cut(status)),
            failure=failure.message if failure else None,
        )
    except (KeyError, TypeError) as error:
        raise GenerationError(f"GET /sessions/{status.get('id')} lacks a field: {error}") from error


def _settled(failure: _Failure | None, status: Mapping[str, Any], episode: AgentEpisode) -> _Failure | None:
    """Whether the harness failed after all: not where the endpoint let it go no further, but where it never got going.

    What fails right after an answer that a length limit cut fails of that: the OpenAI Agents SDK, for one, raises on ``incomplete``.
    """
    if status.get("state") == "expired":
        return _Failure(message="its session expired; see server.session_idle_timeout_s and session_lifetime_s")
    if not episode.num_turns:
        return failure or _Failure(message="it ended without a turn of the model; does it use OPENAI_BASE_URL?")
    if failure and episode.is_truncated and not failure.is_timeout:
        return None
    return failure


def _was_cut(status: Mapping[str, Any]) -> bool:
    """Whether the last answer was."""
    return status.get("last_finish_reason") == FinishReason.LENGTH


def _unsampled(index: int, reward: float) -> Trajectory:
    """A row for the reward of a sample that left none."""
    return Trajectory(
        prompt_token_ids=(),
        response_token_ids=(),
        loss_mask=(),
        logprobs=(),
        versions=(),
        reward=reward,
        num_turns=0,
        sample_index=index,
    )
