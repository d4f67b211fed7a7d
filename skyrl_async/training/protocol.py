"""The seam of training: the policy, as the trainer and the publisher use it. Groups, staleness and engines are unknown here."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from skyrl_async.columns import Advantages, TokenIds, Values
from skyrl_async.types import LogprobModel, RowLogprobs, Trajectory, WeightUpdate

if TYPE_CHECKING:
    from skyrl_async.weights.transfer_group import GroupPlace


SharedWeights = dict[str, dict[str, Any]]
"""``shared_tensor.device_key`` -> Hugging Face name -> handle for ``shared_tensor.opened``."""
WAIT_SECONDS = "wait_seconds"
"""Key of the seconds that a call waited for earlier calls."""
POLICY_COLUMNS = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "teacher_top", "marks", "token_weights")
"""What ``Policy.forward_backward`` reads of the columns that rows may lack (``Trajectory.with_only``)."""
CRITIC_COLUMNS = ("values",)
"""The same of ``Critic.forward_backward``."""
LOGPROBS = "logprobs"
"""Key of the log-probs of ``forward_backward``'s rows under the policy, as in ``RowLogprobs.values``."""


class Policy(Protocol):
    """The policy being trained, over all its workers. Calls run one at a time, except ``send_weights``."""

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float | Advantages], version: int
    ) -> dict[str, Any]:
        """Accumulate the gradient of the *sum* of the policy loss over sampled tokens, each times its row's ``weight`` and its own of
        ``token_weights``.

        Args:
            trajectories: rows to train on; of the columns that a row may lack, ``POLICY_COLUMNS`` are read.
            advantages: for each trajectory a column, (T,) float32 with one advantage per response token, or one number for all of them.
            version: the version being trained, for the figures per token lag.

        Returns:
            Sums over tokens (keys end in ``_sum``), ``num_tokens``, maxima (keys end in ``_max``), ``WAIT_SECONDS`` if the call waited, and
            ``LOGPROBS`` if the policy was made to return them (``TrainingSettings.returns_logprobs``).
        """

    async def step(self, denominator: float, lr_scale: float = 1.0) -> dict[str, float]:
        """Divide the accumulated gradients by ``denominator`` (> 0, see ``algorithms.aggregation``), clip, step, and clear.

        ``lr_scale``, >= 0, multiplies the learning rate of this step. 0 refuses it: gradients are dropped, weights and moments stay.

        Returns ``grad_norm`` (before clipping; 0 of a refused step), ``lr``, and ``WAIT_SECONDS`` if the call waited. Raises
        ``TrainingError`` if the norm is not finite.
        """

    async def logprobs(self, token_ids: Sequence[int] | TokenIds) -> list[float]:
        """Log-prob in nats of each token after the first, at temperature 1: ``len(token_ids) - 1`` values."""

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        """Log-probs of the trajectories' sampled tokens as ``forward_backward`` takes them, under the policy or its reference.

        Accumulated gradients stay. Raises ``TrainingError`` if there is no reference.
        """

    async def gather_weights(self, version: int) -> int:
        """Copy the current weights (all of them, or adapters alone), to be sent as ``version``; returns their bytes.

        Replaces the previous copy. Waits for a running ``send_weights``.
        """

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """Write the copy under ``directory``, at most ``bucket_bytes`` at a time; other calls may run meanwhile.

        Raises:
            WeightsWriteError: there is no room. Nothing is left, and the call may be repeated.
            WeightsLostError: the copy is gone with the workers that held it.
        """

    async def save(self, directory: Path) -> None:
        """Write model, optimizer, scheduler and RNG state of every rank under ``directory``."""

    async def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote. Raises ``CheckpointError`` if it is incomplete or of another model."""

    async def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory (config, safetensors, tokenizer) that vLLM and transformers load."""

    async def close(self) -> None:
        """End every worker."""


class Critic(Protocol):
    """A model of what is earned from each token on, over all its workers. Calls run one at a time."""

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], returns: Sequence[float | Values], version: int, /
    ) -> dict[str, Any]:
        """Accumulate the gradient of the *sum* of the value loss over sampled tokens, each weighted by its row's ``weight``.

        Args:
            trajectories: rows to train on; ``values`` are those that the loss is clipped around.
            returns: for each trajectory a column, (T,) float32: what the value before each sampled token is trained towards.
            version: the policy version being trained, for messages.

        Returns:
            Sums over tokens, as ``value_loss.value_figures``, and ``WAIT_SECONDS`` if the call waited.
        """

    async def step(self, denominator: float, lr_scale: float = 1.0) -> dict[str, float]:
        """As ``Policy.step``."""

    async def values_of(self, trajectories: Sequence[Trajectory]) -> RowLogprobs:
        """Values of what is before each sampled token, a column per trajectory, (T,) float32. Accumulated gradients stay."""

    async def save(self, directory: Path) -> None:
        """As ``Policy.save``."""

    async def load(self, directory: Path) -> None:
        """As ``Policy.load``."""


class SendingPolicy(Policy, Protocol):
    """A ``Policy`` that sends or shares published weights with engines that do not map rank 0's file. These calls run beside all others."""

    async def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> "GroupPlace":
        """Leave the current group and return where receivers meet rank 0 for the next. ``backend`` is ``gloo`` or ``nccl``."""

    async def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        """Send a published file of any version in the group opened last, at most ``bucket_bytes`` at a time. Its receivers must take part.

        Raises:
            WeightsTransferError: a receiver is gone or late. Open another group.
        """

    async def share_weights(self, version: int) -> SharedWeights:
        """Let engines read the copies of ``version`` on the workers' devices until ``unshare_weights``.

        Empty if there are none, or none any more: engines then load the published file.
        """

    async def unshare_weights(self) -> None:
        """Free the shared copies, once nobody reads them. Idempotent."""
