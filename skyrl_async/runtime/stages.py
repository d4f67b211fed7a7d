"""Stages that show what they are doing, and bounded channels between them.

    Channel ──get──> waiting for input ──> processing an item ──> waiting for output ──put──> Channel
                            │ closed                 │ raises
                            v                        v
                          done ──closes──>         error, with its cause

A stage that works on several items at once has a lane for each, and shows the state of its busiest lane. Knows nothing about the items.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Self, TypeVar

from skyrl_async.errors import ChannelClosedError, StageError
from skyrl_async.runtime.tasks import Changes

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


class StageState(Enum):
    """State of a stage, or of one lane of it."""

    IDLE = "idle"
    WAITING_FOR_INPUT = "waiting for input"
    PROCESSING = "processing"
    WAITING_FOR_OUTPUT = "waiting for output"
    DONE = "done"
    ERROR = "error"

    __hash__ = object.__hash__
    """In C: states are looked up some ninety times per sample."""


_S = StageState
_BY_PRECEDENCE = (_S.PROCESSING, _S.WAITING_FOR_OUTPUT, _S.WAITING_FOR_INPUT)
_RANKS = dict.fromkeys(StageState, len(_BY_PRECEDENCE)) | {state: rank for rank, state in enumerate(_BY_PRECEDENCE)}
_NEXT = {
    _S.IDLE: {_S.WAITING_FOR_INPUT},
    _S.WAITING_FOR_INPUT: {_S.PROCESSING, _S.DONE},
    _S.PROCESSING: {_S.WAITING_FOR_OUTPUT, _S.WAITING_FOR_INPUT},
    _S.WAITING_FOR_OUTPUT: {_S.WAITING_FOR_INPUT, _S.PROCESSING},
    _S.DONE: set(),
    _S.ERROR: set(),
}
"""State -> legal next states. Besides, a lane that is not done can fail, and is done when it is cancelled."""


STAGES = (
    "dataloader",
    "generate",
    "rollout",
    "reward",
    "ref_logp",
    "logp",
    "teacher_logp",
    "values",
    "train",
    "param_update",
    "validation",
)
"""In the order of the data's flow; a run has those that it needs."""
_CODES = {state: float(code) for code, state in enumerate(StageState)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """What a stage is doing now."""

    name: str
    state: StageState
    item: str
    """Item of the lane that has been in this state for the longest; empty where there is none."""
    seconds: float
    """Seconds in this state with this item."""
    num_items: int
    """Lanes in this state."""

    @property
    def where(self) -> str:
        """In words, such as "processing p7 and 3 more (1.2 s)"."""
        item = f" {self.item}" if self.item else ""
        more = f" and {self.num_items - 1} more" if self.item and self.num_items > 1 else ""
        return f"{self.state.value}{item}{more} ({self.seconds:.1f} s)"

    def __str__(self) -> str:
        return f"{self.name}: {self.where}"


OnLeft = Callable[[str, StageState, str, float, float], None]
"""Takes (stage, state, item, from, to) when a stage has left a state or an item; seconds on the stage's clock."""


class Stage:
    """One stage of a run.

    Args:
        name: name of the stage.
        clock: returns seconds.
        on_left: called after each span of time in one state with one item.
    """

    def __init__(self, name: str, clock: Callable[[], float], on_left: OnLeft = lambda *_: None) -> None:
        self.name = name
        self._clock = clock
        self._on_left = on_left
        self._lanes: dict[StageState, dict[Lane, None]] = {state: {} for state in StageState}
        self._shown = (StageState.IDLE, "")
        self._shown_lane: Lane | None = None
        self._since = clock()
        self._end: StageState | None = None
        self._num_processed = 0
        self._seconds = dict.fromkeys(StageState, 0.0)
        self.cause: BaseException | None = None
        """What the stage failed of."""

    @property
    def state(self) -> StageState:
        """State of the busiest lane; waiting for input between items."""
        return self._shown[0]

    def lane(self) -> "Lane":
        """For work on items one after another in a ``with`` block; an error that leaves the block fails the stage.

        Raises ``StageError`` when the stage is done or failed.
        """
        self._raise_if(StageState.DONE, StageState.ERROR)
        return Lane(self)

    def finish(self) -> None:
        """Note that no item will follow. Raises ``StageError`` while an item is in the stage; no-op after an error."""
        if self._end is not None:
            return
        is_busy = self._lanes[StageState.PROCESSING] or self._lanes[StageState.WAITING_FOR_OUTPUT]
        if is_busy or any(lane.item for lane in self._lanes[StageState.WAITING_FOR_INPUT]):
            raise StageError(f"stage {self.name} cannot be done: it is {self.status()}")
        self._end = StageState.DONE
        self._show()

    def fail(self, cause: BaseException, lane: "Lane | None" = None) -> None:
        """End the stage with an error; the first cause counts. Other lanes may continue until they are cancelled."""
        if self._end is None:
            self.cause, self._end = cause, StageState.ERROR
            self._show(item="" if lane is None else lane.item)

    def status(self) -> StageStatus:
        """Return what the stage is doing now."""
        state, item = self._shown
        return StageStatus(
            name=self.name,
            state=state,
            item=item,
            seconds=self._clock() - self._since,
            num_items=len(self._lanes[state]),
        )

    def statistics(self) -> dict[str, float]:
        """Return the number of finished items, and the seconds spent in each state, including the current one."""
        spent = {f"{state.name.lower()}_seconds": self.seconds_in(state) for state in StageState}
        return {"items": float(self._num_processed)} | spent

    def seconds_in(self, state: StageState) -> float:
        """Seconds spent in a state so far."""
        return self._seconds[state] + (self._clock() - self._since if state is self.state else 0.0)

    def _raise_if(self, *ends: StageState) -> None:
        if self._end in ends:
            raise StageError(f"stage {self.name} is {self._end.value}: it takes no further item")

    def _moved(self, lane: "Lane", before: StageState, after: StageState) -> None:
        """A lane has moved. Of thousands of lanes, few are busier than the one that is shown."""
        self._lanes[before].pop(lane, None)
        if after is not StageState.DONE:
            self._lanes[after][lane] = None
        is_shown = lane is self._shown_lane or self._shown_lane is None
        if self._end is None and (is_shown or _RANKS[after] < _RANKS[self._shown[0]]):
            self._show()

    def _show(self, item: str = "") -> None:
        """Show the busiest lane; when state or item change, count the time spent with the ones before."""
        if self._end is None:
            state, self._shown_lane = self._busiest()
            shown = state, "" if self._shown_lane is None else self._shown_lane.item
        else:
            shown = self._end, item
        if shown == self._shown:
            return
        now = self._clock()
        self._seconds[self._shown[0]] += now - self._since
        self._on_left(self.name, *self._shown, self._since, now)
        self._shown, self._since = shown, now

    def _busiest(self) -> tuple[StageState, "Lane | None"]:
        """The busiest lane and its state."""
        for state in _BY_PRECEDENCE:
            if lanes := self._lanes[state]:
                return state, next(iter(lanes))
        return StageState.WAITING_FOR_INPUT, None


class StageBoard:
    """Makes stages, and shows them.

    Args:
        on_left: called when a stage leaves a state or an item.
    """

    def __init__(self, on_left: OnLeft = lambda *_: None) -> None:
        self._on_left = on_left
        self._stages: dict[str, Stage] = {}
        self._seen: dict[str, Mapping[str, float]] = {}

    def stage(self, name: str) -> Stage:
        """Return the stage of this name (one of ``STAGES``); makes it on the first call."""
        assert name in STAGES, name
        if name not in self._stages:
            self._stages[name] = Stage(name, asyncio.get_running_loop().time, self._on_left)
            self._seen[name] = self._stages[name].statistics()
        return self._stages[name]

    def statuses(self) -> list[StageStatus]:
        """Return the status of each stage, in the order of the data's flow; from any thread."""
        return [self._stages[name].status() for name in STAGES if name in self._stages]

    def values(self) -> dict[str, float]:
        """Return by metric name the state of each stage, for how long, and how it spent the time since the last call."""
        values: dict[str, float] = {}
        for status in self.statuses():
            name = status.name
            before, now = self._seen[name], self._stages[name].statistics()
            self._seen[name] = now
            spent = {state: now[key] - before[key] for state in StageState if (key := f"{state.name.lower()}_seconds")}
            total = sum(spent.values())
            values |= {
                f"stage/{name}/state": _CODES[status.state],
                f"stage/{name}/seconds": status.seconds,
                f"stage/{name}/items": now["items"] - before["items"],
            }
            values |= {
                f"stage/{name}/{state.name.lower()}_frac": spent[state] / total if total else 0.0
                for state in _BY_PRECEDENCE
            }
        return values


class Lane:
    """Passes items through a stage one by one; made by ``Stage.lane``. An illegal move, or one after the end, raises ``StageError``."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.state = StageState.IDLE
        self._is_counted = False
        self.item = ""
        """Item in the lane."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._stage.fail(error, self)
        self.leave()

    def wait_for_input(self, item: str = "") -> None:
        """Wait for the next item; or, with ``item``, let that item wait for devices that others use."""
        self._move(StageState.WAITING_FOR_INPUT, item)
        self._stage._num_processed += self._is_counted
        self._is_counted = False

    def process(self, item: str, *, is_counted: bool = True) -> None:
        """Work on an item, or on the same item under another name; ``is_counted``: it counts as a finished item afterwards."""
        self._move(StageState.PROCESSING, item)
        self._is_counted = is_counted

    @contextmanager
    def processing(self, item: str, *, is_counted: bool = True) -> Iterator[None]:
        """Work on an item inside, and wait for the next one after that; an error leaves the lane at the item."""
        if self.state is _S.IDLE:
            self.wait_for_input()
        self.process(item, is_counted=is_counted)
        yield
        self.wait_for_input()

    def wait_for_output(self) -> None:
        """Wait until the result of the item is taken."""
        self._move(StageState.WAITING_FOR_OUTPUT, self.item)

    def leave(self) -> None:
        """End the lane in any state. Idempotent."""
        before, self.state = self.state, StageState.DONE
        if before is not StageState.DONE:
            self._stage._moved(self, before, StageState.DONE)

    def _move(self, state: StageState, item: str) -> None:
        stays = state is self.state and (state is _S.PROCESSING or (state is _S.WAITING_FOR_INPUT and item != ""))
        if state not in _NEXT[self.state] and not stays:
            raise StageError(f"stage {self._stage.name} cannot go from {self.state.value!r} to {state.value!r}")
        self._stage._raise_if(StageState.DONE)
        before, self.state, self.item = self.state, state, item
        self._stage._moved(self, before, state)


class Channel(Generic[T]):
    """A bounded queue between two stages: putting into a full channel waits; the end of the data is closing it.

    Items leave in the order in which they came. Of several tasks that wait, any may be the next.

    Args:
        max_items: most items held at once, >= 1.
    """

    def __init__(self, max_items: int) -> None:
        if max_items < 1:
            raise ValueError(f"a channel must hold at least 1 item, got {max_items}")
        self._max_items = max_items
        self._items: deque[T] = deque()
        self._is_closed = False
        self._num_open = 0
        self._changes = Changes()

    async def put(self, item: T) -> None:
        """Add an item. Waits for space. Raises ``ChannelClosedError``; adds nothing when cancelled."""
        await self._changes.until(lambda: self._is_closed or len(self._items) < self._max_items)
        self.put_nowait(item)

    def put_nowait(self, item: T) -> None:
        """Add an item. Raises ``ChannelClosedError``, and ``StageError`` when the channel is full."""
        if self._is_closed:
            raise ChannelClosedError("an item came after the channel was closed")
        if len(self._items) >= self._max_items:
            raise StageError(f"the channel holds {len(self._items)} items, which is all that it may")
        self._items.append(item)
        self._num_open += 1
        self._changes.notify()

    async def get(self) -> T:
        """Take the oldest item. Waits for one; raises ``ChannelClosedError`` when closed and empty."""
        await self._changes.until(lambda: self._is_closed or bool(self._items))
        if not self._items:
            raise ChannelClosedError("the channel is closed and empty")
        item = self._items.popleft()
        self._changes.notify()
        return item

    def item_done(self) -> None:
        """Note that an item that was taken is finished."""
        self._num_open -= 1
        self._changes.notify()

    async def join(self) -> None:
        """Wait until every item that was put is finished."""
        await self._changes.until(lambda: not self._num_open)

    def close(self) -> None:
        """Note that no item will follow; held items can still be taken. Idempotent."""
        self._is_closed = True
        self._changes.notify()

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            try:
                item = await self.get()
            except ChannelClosedError:
                return
            yield item

    def __len__(self) -> int:
        return len(self._items)


async def run_stage(
    stage: Stage,
    inputs: Channel[A],
    work: Callable[[A], Awaitable[B]],
    output: Callable[[B], Awaitable[None]] | None = None,
    *,
    name_of: Callable[[A], str] = str,
    finishes: bool = True,
    lease_devices: Callable[[], AbstractAsyncContextManager[None]] | None = None,
) -> None:
    """Work on one item after another until the inputs end; the stage is done then, if it ``finishes``.

    Consumes ``inputs``; produces to ``output``, if any, which waits while it is full; unblocked by both. What ``work`` raises fails the
    stage and is raised.

    With ``lease_devices``, an item and those that arrive meanwhile are processed under one lease; until it begins, the item is shown as
    waiting. The stage must then be the only consumer, and the output must have space for all of them: nothing may be waited for under a
    lease.
    """
    with stage.lane() as lane:

        async def put_through(item: A) -> None:
            lane.process(name_of(item))
            result = await work(item)
            lane.wait_for_output()
            if output is not None:
                await output(result)
            inputs.item_done()
            lane.wait_for_input()

        lane.wait_for_input()
        async for item in inputs:
            if lease_devices is None:
                await put_through(item)
                continue
            lane.wait_for_input(name_of(item))
            async with lease_devices():
                await put_through(item)
                for _ in range(len(inputs)):
                    await put_through(await inputs.get())
    if finishes:
        stage.finish()
