"""A critic: a causal language model with a value head in place of its output projection, and its values of chosen positions.

Knows neither losses nor how the model is sharded.
"""

import logging
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_async.errors import PolicyError
from skyrl_async.training.backends.packing import packed_arguments

_HEAD = "score.weight"
"""transformers' name of the head of a model with one label, as reward and value models have it."""
_BIAS = "score.bias"

logger = logging.getLogger(__name__)


def replace_head(model: PreTrainedModel, path: Path, *, seed: int) -> None:
    """Give a causal language model one output per token. A tied output projection leaves the embeddings alone.

    The head is the value model's in ``path``. Without one it is drawn normally with a deviation of 1 / (width + 1), as SkyRL's: values
    begin near 0. The log says which it was.

    Raises ``PolicyError`` for a model without an output projection, and for a head of another shape or with a bias.
    """
    projection = model.get_output_embeddings()
    if projection is None:
        raise PolicyError(f"the critic must be a causal language model with an output projection, got {type(model)}")
    model.config.tie_word_embeddings = False
    width = projection.weight.shape[1]
    head = nn.Linear(width, 1, bias=False)
    if (own := _own_head(path, width)) is None:
        nn.init.normal_(head.weight, std=1 / (width + 1), generator=torch.Generator().manual_seed(seed))
        logger.info("the critic begins with a random value head: no *.safetensors of %s has %s", path, _HEAD)
    else:
        with torch.no_grad():
            head.weight.copy_(own)
        logger.info("the critic begins with the value head of %s", path)
    model.set_output_embeddings(head)


def _own_head(path: Path, width: int) -> Tensor | None:
    """(1, ``width``) the value head of the model in ``path``; None without one."""
    found: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            found |= {name: weights.get_tensor(name) for name in {_HEAD, _BIAS}.intersection(weights.keys())}
    head, bias = found.get(_HEAD), found.get(_BIAS)
    if head is not None and head.shape != (1, width):
        raise PolicyError(
            f"{path} must have one label for a critic: {_HEAD} of shape [1, {width}], got {list(head.shape)}; give a model with one label, "
            "or one without a head"
        )
    if head is not None and bias is not None and bias.any():
        raise PolicyError(
            f"{path} must have no {_BIAS} but 0 for a critic, whose head has no bias, got {bias.tolist()}; give a model without it"
        )
    return head


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
