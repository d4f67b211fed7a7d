"""A critic: a causal language model with a value head in place of its output projection, and its values of chosen positions.

Knows neither losses nor how the model is sharded.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_async.errors import PolicyError
from skyrl_async.training.backends.packing import packed_arguments

_HEAD = "score.weight"
"""transformers' name of the head of a model with one label per sequence, as reward and value models have it."""


def replace_head(model: PreTrainedModel, path: Path, *, seed: int) -> None:
    """Give a causal language model one output per token. A tied output projection leaves the embeddings alone.

    The head is the value model's in ``path``. Without one it is drawn normally with a deviation of 1 / (width + 1), as SkyRL's: values
    begin near 0.

    Raises ``PolicyError`` for a model without an output projection.
    """
    projection = model.get_output_embeddings()
    if projection is None:
        raise PolicyError(f"the critic must be a causal language model with an output projection, got {type(model)}")
    model.config.tie_word_embeddings = False
    width = projection.weight.shape[1]
    head = nn.Linear(width, 1, bias=False)
    nn.init.normal_(head.weight, std=1 / (width + 1), generator=torch.Generator().manual_seed(seed))
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights, torch.no_grad():
            if _HEAD in weights.keys() and weights.get_slice(_HEAD).get_shape() == [1, width]:  # noqa: SIM118
                head.weight.copy_(weights.get_tensor(_HEAD))
    model.set_output_embeddings(head)


class TokenValues:
    """Replaces the forward of a critic's value head, inside the model's own forward: only chosen positions reach it.

    A model that scales or caps its logits does the same to its values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._positions: Tensor | None = None
        head = model.get_output_embeddings()
        self._project = head.forward
        head.forward = self._replace_head

    def __call__(self, input_ids: Tensor, positions: Tensor, *, row_lengths: tuple[int, ...] | None = None) -> Tensor:
        """Values of what is up to each position.

        Args:
            input_ids: (B, T) int64, right-padded; or (1, T), rows laid end to end.
            positions: (N,) int64 into the B * T positions.
            row_lengths: lengths of the rows laid end to end; None if each has a row of ``input_ids``.

        Returns:
            (N,) float32 with gradients.
        """
        packed = {} if row_lengths is None else packed_arguments(self._model, row_lengths, input_ids.device)
        self._positions = positions
        try:
            values: Tensor = self._model(input_ids=input_ids, use_cache=False, **packed).logits  # (1, N, 1)
        finally:
            self._positions = None
        return values.flatten().float()

    def _replace_head(self, hidden: Tensor) -> Tensor:
        """Turn (B, T, H) hidden states into (1, N, 1) values; all of them if none are chosen."""
        chosen = hidden if self._positions is None else hidden.flatten(0, 1)[self._positions].unsqueeze(0)
        values: Tensor = self._project(chosen)
        return values
