"""Lets engines load a version from where policy workers hold it, on devices that both use, instead of its file.

Flows in: an update about to be loaded. Flows out: the same with handles of the workers' copies, good for this load alone: whoever comes
later, or goes back, loads the file. Knows neither engines nor devices.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from skyrl_async.training.protocol import SendingPolicy
from skyrl_async.types import WeightUpdate

ShareWeights = Callable[[WeightUpdate], AbstractAsyncContextManager[WeightUpdate]]
"""Takes an update; in its block the one that comes out can be loaded."""


@asynccontextmanager
async def files_alone(update: WeightUpdate) -> AsyncIterator[WeightUpdate]:
    """Nothing is shared."""
    yield update


def sharing(policy: SendingPolicy) -> ShareWeights:
    """Engines that find none of the handles to be of their device load the file."""

    @asynccontextmanager
    async def share(update: WeightUpdate) -> AsyncIterator[WeightUpdate]:
        try:
            shared = await policy.share_weights(update.version)
            (chunk,) = update.chunks
            yield replace(update, chunks=(chunk | {"shared": shared},)) if shared else update
        finally:
            await policy.unshare_weights()

    return share
