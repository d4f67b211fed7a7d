"""The one mechanism of everything that runs by itself: a stage that says where it is, and the bounded channels between stages.

    Channel ──get──> waiting for input ──> processing an item ──> waiting for output ──put──> Channel
                            │ closed                 │ raises
                            v                        v
                          done ──closes──>         error, with its cause

Flows in: items, and what a stage does with one. Flows out: items, and for each stage its state, its item and since when. Knows nothing
of what items are. A stage that works on several items at once has a lane for each; it is where its busiest lane is.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from skyrl_async.errors import ChannelClosedError, StageError
from skyrl_async.runtime.changes import Changes

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


class StageState(Enum):
    """Where a stage, or one lane of it, is."""

    IDLE = "idle"
    WAITING_FOR_INPUT = "waiting for input"
    PROCESSING = "processing"
    WAITING_FOR_OUTPUT = "waiting for output"
    DONE = "done"
    ERROR = "error"


_S = StageState
_BY_PRECEDENCE = (_S.PROCESSING, _S.WAITING_FOR_OUTPUT, _S.WAITING_FOR_INPUT)
_NEXT = {
    _S.IDLE: {_S.WAITING_FOR_INPUT},
    _S.WAITING_FOR_INPUT: {_S.PROCESSING, _S.DONE},
    _S.PROCESSING: {_S.WAITING_FOR_OUTPUT, _S.WAITING_FOR_INPUT},
    _S.WAITING_FOR_OUTPUT: {_S.WAITING_FOR_INPUT, _S.PROCESSING},
    _S.DONE: set(),
    _S.ERROR: set(),
}
"""Besides, a lane that is not done can fail, and is done when it is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """Where a stage is now."""

    name: str
    state: StageState
    item: str
    """Of the lane that has been in this state for the longest; empty where there is none."""
    seconds: float
    """In this state with this item."""
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
        name: of the stage.
        clock: seconds.
        on_left: told of each span of time that a stage spent in one state with one item.
    """

    def __init__(self, name: str, clock: Callable[[], float], on_left: OnLeft = lambda *_: None) -> None:
        self.name = name
        self._clock = clock
        self._on_left = on_left
        self._lanes: dict[StageState, dict[Lane, None]] = {state: {} for state in StageState}
        self._shown = (StageState.IDLE, "")
        self._since = clock()
        self._end: StageState | None = None
        self._num_processed = 0
        self._seconds = dict.fromkeys(StageState, 0.0)
        self.cause: BaseException | None = None
        """Of the error."""

    @property
    def state(self) -> StageState:
        """Where it is: where its busiest lane is; between items it waits for input."""
        return self._shown[0]

    @contextmanager
    def lane(self) -> Iterator["Lane"]:
        """Work on items one after another inside; an error that leaves the block is the stage's.

        Raises ``StageError`` when the stage is done or failed.
        """
        self._raise_if(StageState.DONE, StageState.ERROR)
        lane = Lane(self)
        try:
            yield lane
        except Exception as error:
            self.fail(error, lane)
            raise
        finally:
            lane.leave()

    def finish(self) -> None:
        """No item will follow. Raises ``StageError`` while one is in it; nothing to do after an error."""
        if self._end is not None:
            return
        is_busy = self._lanes[StageState.PROCESSING] or self._lanes[StageState.WAITING_FOR_OUTPUT]
        if is_busy or any(lane.item for lane in self._lanes[StageState.WAITING_FOR_INPUT]):
            raise StageError(f"stage {self.name} cannot be done: it is {self.status()}")
        self._end = StageState.DONE
        self._show()

    def fail(self, cause: BaseException, lane: "Lane | None" = None) -> None:
        """It ends with an error; the first cause counts. Its other lanes may go on until they are cut off."""
        if self._end is None:
            self.cause, self._end = cause, StageState.ERROR
            self._show(item="" if lane is None else lane.item)

    def status(self) -> StageStatus:
        """Where it is now."""
        state, item = self._shown
        return StageStatus(
            name=self.name,
            state=state,
            item=item,
            seconds=self._clock() - self._since,
            num_items=len(self._lanes[state]),
        )

    def statistics(self) -> dict[str, float]:
        """Items that are through, each counted once, and seconds spent in each state, the present one included."""
        seconds = dict(self._seconds)
        seconds[self.state] += self._clock() - self._since
        return {"items": float(self._num_processed)} | {
            f"{state.name.lower()}_seconds": seconds[state] for state in StageState
        }

    def _raise_if(self, *ends: StageState) -> None:
        if self._end in ends:
            raise StageError(f"stage {self.name} is {self._end.value}: it takes no further item")

    def _moved(self, lane: "Lane", before: StageState, after: StageState) -> None:
        self._lanes[before].pop(lane, None)
        if after is not StageState.DONE:
            self._lanes[after][lane] = None
        if self._end is None:
            self._show()

    def _show(self, item: str = "") -> None:
        """Account for the time in the state and with the item shown so far, where they change."""
        state = self._end
        if state is None:
            state = next((s for s in _BY_PRECEDENCE if self._lanes[s]), StageState.WAITING_FOR_INPUT)
            lane = next(iter(self._lanes[state]), None)
            item = "" if lane is None else lane.item
        if (state, item) == self._shown:
            return
        now = self._clock()
        self._seconds[self._shown[0]] += now - self._since
        self._on_left(self.name, *self._shown, self._since, now)
        self._shown, self._since = (state, item), now


class Lane:
    """One item after another through a stage; made by ``Stage.lane``. Illegal moves, and all once it is done, raise ``StageError``."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._state = StageState.IDLE
        self._is_counted = False
        self.item = ""
        """What is being worked on."""

    @property
    def state(self) -> StageState:
        """Where it is."""
        return self._state

    def wait_for_input(self, item: str = "") -> None:
        """The item is through, and the next one is waited for; or ``item`` is there, and waits for devices that others use."""
        self._move(StageState.WAITING_FOR_INPUT, item)
        self._stage._num_processed += self._is_counted
        self._is_counted = False

    def process(self, item: str, *, is_counted: bool = True) -> None:
        """An item is being worked on, or the same one under another name; ``is_counted``: among those that are through, once it is."""
        self._move(StageState.PROCESSING, item)
        self._is_counted = is_counted

    @contextmanager
    def processing(self, item: str) -> Iterator[None]:
        """Work on an item inside, and wait for the next one after that; an error leaves the lane at the item."""
        if self._state is _S.IDLE:
            self.wait_for_input()
        self.process(item)
        yield
        self.wait_for_input()

    def wait_for_output(self) -> None:
        """What came of the item waits to be taken."""
        self._move(StageState.WAITING_FOR_OUTPUT, self.item)

    def leave(self) -> None:
        """The lane ends, wherever it is. Idempotent."""
        before, self._state = self._state, StageState.DONE
        if before is not StageState.DONE:
            self._stage._moved(self, before, StageState.DONE)

    def _move(self, state: StageState, item: str) -> None:
        stays = state is self._state and (state is _S.PROCESSING or (state is _S.WAITING_FOR_INPUT and item != ""))
        if state not in _NEXT[self._state] and not stays:
            raise StageError(f"stage {self._stage.name} cannot go from {self._state.value!r} to {state.value!r}")
        self._stage._raise_if(StageState.DONE)
        before, self._state, self.item = self._state, state, item
        self._stage._moved(self, before, state)


class Channel(Generic[T]):
    """A bounded queue between stages: who puts into a full one waits; end of data is closing.

    Args:
        max_items: held at once, >= 1.
    """

    def __init__(self, max_items: int) -> None:
        if max_items < 1:
            raise ValueError(f"a channel must hold at least 1 item, got {max_items}")
        self._max_items = max_items
        self._items: deque[T] = deque()
        self._is_closed = False
        self._num_open = 0
        self._getters: deque[asyncio.Future[None]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()
        self._changes = Changes()

    async def put(self, item: T) -> None:
        """Add an item, first come first served. Waits for room. Raises ``ChannelClosedError``; cancelled, nothing was added."""
        await self._turn(self._putters, self._has_room)
        self.put_nowait(item)

    def put_nowait(self, item: T) -> None:
        """Add an item. Raises ``ChannelClosedError``, and ``StageError`` where there is no room."""
        if self._is_closed:
            raise ChannelClosedError("an item came after the channel was closed")
        if len(self._items) >= self._max_items:
            raise StageError(f"the channel holds {len(self._items)} items, which is all that it may")
        self._items.append(item)
        self._num_open += 1
        self._wake()

    async def get(self) -> T:
        """Take the item put first. Waits for one; raises ``ChannelClosedError`` when closed and empty."""
        await self._turn(self._getters, self._has_item)
        if not self._items:
            raise ChannelClosedError("the channel is closed and empty")
        item = self._items.popleft()
        self._wake()
        return item

    def item_done(self) -> None:
        """An item that was taken is through."""
        self._num_open -= 1
        self._changes.notify()

    async def join(self) -> None:
        """Wait until every item that was put is through."""
        await self._changes.until(lambda: not self._num_open)

    def close(self) -> None:
        """No item will follow; those held can still be taken. Idempotent."""
        self._is_closed = True
        self._wake()

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            try:
                item = await self.get()
            except ChannelClosedError:
                return
            yield item

    def __len__(self) -> int:
        return len(self._items)

    def statistics(self) -> dict[str, float]:
        """Items held, producers and consumers waiting."""
        return {
            "items": float(len(self._items)),
            "putters": float(len(self._putters)),
            "getters": float(len(self._getters)),
        }

    def _has_room(self) -> bool:
        return self._is_closed or len(self._items) < self._max_items

    def _has_item(self) -> bool:
        return self._is_closed or bool(self._items)

    async def _turn(self, line: "deque[asyncio.Future[None]]", is_ready: Callable[[], bool]) -> None:
        """Wait, first come first served, until ``is_ready``; cancelled, the next in line has its chance."""
        if not line and is_ready():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(waiter)
        try:
            await waiter
            while not is_ready():
                line[line.index(waiter)] = waiter = asyncio.get_running_loop().create_future()
                await waiter
        finally:
            line.remove(waiter)
            self._wake()

    def _wake(self) -> None:
        """Let the first in each line look, if there is what it waits for. It stays there until it runs: nobody overtakes it."""
        if self._getters and self._has_item():
            _release(self._getters[0])
        if self._putters and self._has_room():
            _release(self._putters[0])


def _release(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


async def run_stage(
    stage: Stage,
    inputs: Channel[A],
    work: Callable[[A], Awaitable[B]],
    output: Callable[[B], Awaitable[None]],
    *,
    name_of: Callable[[A], str] = str,
    finishes: bool = True,
    lease_devices: Callable[[], AbstractAsyncContextManager[None]] | None = None,
) -> None:
    """Work on one item after another until the inputs end; then the stage is done, if it ``finishes`` with them.

    Consumes ``inputs``; produces to ``output``, which waits where there is no room; unblocked by both. What ``work`` raises is the stage's
    error, and is raised.

    With ``lease_devices``, an item is worked on in its block, and with it the items that wait by the time it is through; until the block is
    entered it is shown as waiting. There must then be no other consumer, and room for all of them in the output: nobody is waited for in a
    turn.
    """
    with stage.lane() as lane:

        async def put_through(item: A) -> None:
            lane.process(name_of(item))
            result = await work(item)
            lane.wait_for_output()
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
