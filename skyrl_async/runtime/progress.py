"""What each rollout is doing, reported by its generator, for people who wonder why it takes so long.

Everything is optional: a generator that reports nothing is "generating".
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from skyrl_async.types import SampleWork

OnCall = Callable[[str, int, float], None]
"""Told of an engine call elsewhere: the engine, the tokens that it sampled, and its seconds."""
_CURRENT_SAMPLE: ContextVar["SampleProgress | None"] = ContextVar("current_sample", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """What a rollout, or one sample of it, is doing."""

    uid: str
    phase: str
    seconds: float
    """Seconds in this phase."""
    total_seconds: float
    """Seconds since the rollout began, earlier attempts included."""
    sample_index: int | None = None
    """None where the generator does not distinguish samples."""
    turn: int | None = None
    """1 for the first turn."""
    engine: str | None = None
    """Engine that samples it; None where unknown, such as over HTTP."""

    def __str__(self) -> str:
        return f"{self.uid}{self.where} ({self.doing})"

    @property
    def where(self) -> str:
        """Such as `` sample 1 turn 2``."""
        parts = {"sample": self.sample_index, "turn": self.turn}
        return "".join(f" {name} {number}" for name, number in parts.items() if number is not None)

    @property
    def doing(self) -> str:
        """Such as ``generating on engine-0 for 75 s``."""
        engine = f" on {self.engine}" if self.engine else ""
        return f"{self.phase}{engine} for {self.seconds:.0f} s"


class SampleProgress:
    """What one sample is doing."""

    def __init__(self, sample_index: int) -> None:
        self.sample_index = sample_index
        self.turn: int | None = None
        self.engines: dict[str, None] = {}
        """All that have sampled it, in order of their first call."""
        self.enter("generating")
        self.began = self.since

    def enter(self, phase: str, *, turn: int | None = None) -> None:
        """Begin a phase; the turn stays the same unless it is given."""
        self.phase = phase
        self.since = asyncio.get_running_loop().time()
        self.turn = self.turn if turn is None else turn
        self.engine: str | None = None


class GroupProgress:
    """What the samples of one group are doing. Not thread-safe."""

    def __init__(self) -> None:
        self._phase = "generating"
        self._since: float | None = None
        self._samples: dict[int, SampleProgress] = {}
        self.work: dict[int, SampleWork] = {}
        """Work of the samples that have ended, by index."""

    @contextmanager
    def playing(self, sample_index: int) -> Iterator[SampleProgress]:
        """Report one sample from inside, by this task and tasks that it starts.

        A cancelled sample keeps its last phase until the group begins another one.
        """
        sample = SampleProgress(sample_index)
        self._samples[sample_index] = sample
        token = _CURRENT_SAMPLE.set(sample)
        keeps_phase = False
        try:
            yield sample
        except asyncio.CancelledError:
            keeps_phase = True
            raise
        finally:
            _CURRENT_SAMPLE.reset(token)
            if not keeps_phase:
                self._samples.pop(sample_index, None)
                seconds = asyncio.get_running_loop().time() - sample.began
                self.work[sample_index] = SampleWork(seconds=seconds, engines=tuple(sample.engines))

    def enter(self, phase: str) -> None:
        """Begin a phase of the whole group, and forget its samples."""
        self._phase, self._since = phase, asyncio.get_running_loop().time()
        self._samples.clear()

    def statuses(self, uid: str, started: float) -> list[RolloutStatus]:
        """Return a status per sample, the longest phase first, or one status of the group.

        Args:
            uid: uid of the prompt.
            started: when the rollout began, in seconds on the loop's clock.
        """
        now = asyncio.get_running_loop().time()
        total = now - started
        if not self._samples:
            since = started if self._since is None else self._since
            return [RolloutStatus(uid=uid, phase=self._phase, seconds=now - since, total_seconds=total)]
        return [
            RolloutStatus(
                uid=uid,
                phase=sample.phase,
                seconds=now - sample.since,
                total_seconds=total,
                sample_index=sample.sample_index,
                turn=sample.turn,
                engine=sample.engine,
            )
            for sample in sorted(self._samples.values(), key=lambda sample: sample.since)
        ]


def report(phase: str, *, turn: int | None = None) -> None:
    """Begin a phase of the current sample; no-op outside of one."""
    if (sample := _CURRENT_SAMPLE.get()) is not None:
        sample.enter(phase, turn=turn)


def report_engine(name: str) -> None:
    """Note the engine of the current sample, until its phase ends; no-op outside of one."""
    if (sample := _CURRENT_SAMPLE.get()) is not None:
        sample.engine = name
        sample.engines[name] = None
