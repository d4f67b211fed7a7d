"""When the next optimizer step may begin: the one place that answers.

    step n: gradients ──until_may_step──> optimizer step, copy ──handed_on──> sent ──> loaded, logged, saved: through
    step n+1:     └ until_may_begin(...)                          └ may change the weights from here on

No I/O, and no clock.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl_async.runtime.tasks import Changes

MAX_OPEN_STEPS = 2
"""Trained steps that are not through yet while the next one collects gradients: one at the engines, one in line for them."""


class StepGate:
    """Follows trained steps on their way to the engines."""

    def __init__(self) -> None:
        self._num_open = 0
        self._unsent_version: int | None = None
        self._is_stepping = False
        self._is_closed = False
        self._changes = Changes()

    @property
    def may_step(self) -> bool:
        """Whether the weights may change: the last copy of them is sent to the engines, and compared with theirs where that is due."""
        return self._unsent_version is None and not self._is_closed

    async def until_may_step(self) -> None:
        """Wait for ``may_step``. Unblocked by ``sent``; never after ``close``."""
        await self._changes.until(lambda: self.may_step)

    async def until_may_begin(self, *, all_are_through: bool) -> None:
        """Wait until the next step may collect gradients. Unblocked by ``through``.

        Args:
            all_are_through: wait for every trained step, since the last one is to be saved before anything is added to it.
        """
        most = 0 if all_are_through else MAX_OPEN_STEPS
        await self._changes.until(lambda: self._num_open <= most)

    @asynccontextmanager
    async def stepping(self) -> AsyncIterator[None]:
        """Wait for ``may_step``; in the block the policy is between two versions."""
        await self.until_may_step()
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            self._changes.notify()

    async def close(self) -> None:
        """Let no further step begin, and wait for the one in progress: cutting it off would leave nothing to save."""
        self._is_closed = True
        await self._changes.until(lambda: not self._is_stepping)

    def copied(self, version: int) -> None:
        """The weights of ``version`` are copied; the copy has to be sent before they change again."""
        self._unsent_version = version

    def sent(self, version: int) -> None:
        """The policy is not needed for ``version`` any more. No-op where a later version was copied, or on a second call."""
        if self._unsent_version == version:
            self._unsent_version = None
            self._changes.notify()

    def handed_on(self) -> None:
        """A trained step is on its way to the engines."""
        self._num_open += 1

    def through(self, version: int) -> None:
        """The step is served where it is published, logged, and saved where that is due."""
        self._num_open -= 1
        self.sent(version)
        self._changes.notify()
