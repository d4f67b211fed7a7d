"""What a rollout is doing, said by whoever plays it: for people who wonder why it takes so long.

Flows in: phases ("generating", "in environment step"), engines' names. Flows out: a status per rollout. Everything is optional: a
generator that says nothing is "generating".
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_PLAYING: ContextVar["SampleProgress | None"] = ContextVar("sample_being_played", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """What the slowest part of a rollout is doing."""

    uid: str
    phase: str
    seconds: float
    """In this phase."""
    total_seconds: float
    """Since the rollout began, its earlier tries included."""
    sample_index: int | None = None
    """None where the generator does not tell samples apart."""
    turn: int | None = None
    """1 for the first."""
    engine: str | None = None
    """Where it samples, where that is known: not over HTTP."""

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
        self.enter("generating")

    def enter(self, phase: str, *, turn: int | None = None) -> None:
        """A new phase begins now; the turn stays what it was unless it is given."""
        self.phase = phase
        self.since = asyncio.get_running_loop().time()
        self.turn = self.turn if turn is None else turn
        self.engine: str | None = None


class GroupProgress:
    """What one group's samples do while they are played. Not safe to use from other threads."""

    def __init__(self) -> None:
        self._phase = "generating"
        self._since: float | None = None
        self._samples: dict[int, SampleProgress] = {}

    @contextmanager
    def playing(self, sample_index: int) -> Iterator[SampleProgress]:
        """One sample is played inside, by this task and those it starts.

        What it was doing when it was cancelled stays known until the group does something else.
        """
        sample = SampleProgress(sample_index)
        self._samples[sample_index] = sample
        token = _PLAYING.set(sample)
        try:
            yield sample
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._samples.pop(sample_index, None)
            raise
        else:
            self._samples.pop(sample_index, None)
        finally:
            _PLAYING.reset(token)

    def enter(self, phase: str) -> None:
        """The group as a whole begins a phase now: what its samples did is over."""
        self._phase, self._since = phase, asyncio.get_running_loop().time()
        self._samples.clear()

    def statuses(self, uid: str, started: float) -> list[RolloutStatus]:
        """What is going on now, the longest first: a status per sample that is played, or one of the group.

        Args:
            uid: of the prompt.
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
    """The sample that is played here begins a phase; nothing happens where none is."""
    if (sample := _PLAYING.get()) is not None:
        sample.enter(phase, turn=turn)


def report_engine(name: str) -> None:
    """The sample that is played here is sampled on this engine from now on, while its phase lasts."""
    if (sample := _PLAYING.get()) is not None:
        sample.engine = name
