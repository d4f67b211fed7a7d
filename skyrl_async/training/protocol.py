"""What training looks like from the outside (``Policy``) and from inside a rank's process (``TrainingBackend``).

Neither knows groups, staleness or engines: padded rows in, sums of gradients and numbers out.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory, WeightUpdate

if TYPE_CHECKING:
    import torch

    from skyrl_async.weights.transfer_group import GroupPlace


SharedWeights = dict[str, dict[str, Any]]
"""``shared_tensor.device_key`` -> Hugging Face name -> handle for ``shared_tensor.opened``."""
WAIT_SECONDS = "wait_seconds"
"""Key of seconds that a call waited for its turn, before anything was computed."""


class Policy(Protocol):
    """The policy being trained, over all its workers. Calls are made one at a time, but for ``send_weights``."""

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
    ) -> dict[str, float]:
        """Add the gradients of the *sum* over sampled tokens of the policy loss, each by its row's weight, to what is accumulated.

        ``advantages`` holds one value per trajectory; ``version`` is the version being trained, for the figures per
        token lag. Returns sums over tokens (keys end in ``_sum``), ``num_tokens``, and maxima (keys end in ``_max``); and
        ``WAIT_SECONDS`` where it waited for the workers' other calls.
        """
        ...

    async def step(self, denominator: float) -> dict[str, float]:
        """Divide the accumulated gradients by ``denominator`` (> 0, see ``algorithms.aggregation``), clip, step, and clear.

        Returns ``grad_norm`` (before clipping) and ``lr``, and ``WAIT_SECONDS`` as above. Raises ``TrainingError`` when the norm is not
        finite.
        """
        ...

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob in nats of each token after the first given those before it, at temperature 1.

        ``len(token_ids) - 1`` values.
        """
        ...

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """Log-probs of the trajectories' sampled tokens as ``forward_backward`` takes them, under the policy or its reference.

        Gradients accumulated so far stay. Raises ``TrainingError`` where there is no reference.
        """
        ...

    async def gather_weights(self, version: int) -> int:
        """Copy what is published (the full weights, or adapters alone) as it is now, to be sent as ``version``; returns its bytes.

        The copy before is forgotten.
        Waits for a ``send_weights`` under way.
        """
        ...

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """Write the copy under ``directory``, at most ``bucket_bytes`` at a time; other calls may be made meanwhile.

        Raises ``WeightsWriteError`` where there is no room: nothing is left then, and it may be called again. Raises
        ``WeightsLostError`` where the copy is gone with the workers that held it.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Write model, optimizer, scheduler and RNG state of every rank under ``directory``."""
        ...

    async def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote. Raises ``CheckpointError`` when it is incomplete or of another model."""
        ...

    async def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory (config, safetensors, tokenizer) that vLLM and transformers load."""
        ...

    async def close(self) -> None:
        """End every worker."""
        ...


class SendingPolicy(Policy, Protocol):
    """A ``Policy`` that brings what is published to engines that are not to map rank 0's file, beside every other call."""

    async def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> "GroupPlace":
        """Where the receivers meet rank 0, which leaves the group before. ``backend`` is ``gloo`` or ``nccl``."""
        ...

    async def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        """Send a published file (any version, whoever wrote it) in the group opened last, at most ``bucket_bytes`` at a time; its receivers
        take part meanwhile.

        Raises ``WeightsTransferError``: then another group is to be opened.
        """
        ...

    async def share_weights(self, version: int) -> SharedWeights:
        """Let engines read what was gathered as ``version`` where it lies, on the workers' devices, until ``unshare_weights``.

        Empty where it is not there (any more): then the published file is all there is.
        """
        ...

    async def unshare_weights(self) -> None:
        """Nobody reads what was shared any more. Idempotent."""
        ...


async def export_weights(policy: Policy, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
    """Gather the weights as they are now and write them under ``directory``."""
    await policy.gather_weights(version)
    return await policy.send_weights(version, directory, bucket_bytes)


class TrainingBackend(Protocol):
    """A model and its optimizer in one rank's process; every method is collective over the ranks."""

    def build(
        self,
        model_fn: "Callable[[], torch.nn.Module]",
        optimizer_fn: "Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]",
        scheduler_fn: "Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]",
    ) -> "torch.nn.Module":
        """Make the (sharded) model, optimizer and scheduler; return the module to call for a forward."""
        ...

    def backward(self, loss: "torch.Tensor", *, is_last: bool) -> None:
        """Accumulate the gradient of ``loss``, a sum over this rank's tokens; summed, not averaged, over the ranks."""
        ...

    def step(self, *, denominator: float, max_grad_norm: float) -> float:
        """Divide gradients by ``denominator``, clip, step, clear; return the norm before clipping.

        Raises ``TrainingError`` when the norm is not finite; then nothing is applied.
        """
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        ...

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen, those before a checkpoint included."""
        ...

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name to full shape, of every parameter."""
        ...

    def iter_full_params(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield every full parameter and persistent buffer under its Hugging Face name, in a fixed order. Collective."""
        ...

    def iter_trained_params(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """The same of the parameters that train, alone: of adapters under peft's names (``skyrl_async.weights.adapters``)."""
        ...

    def save(self, directory: Path) -> None:
        """Write model, optimizer, scheduler and this rank's RNG state."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote."""
        ...

    def close(self) -> None:
        """Leave the process group."""
        ...
