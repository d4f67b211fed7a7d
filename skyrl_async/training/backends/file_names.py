"""The names that a model's files give to its parameters, where transformers loads them under others.

transformers puts experts together into one parameter as it loads them, and leaves out prefixes. Engines, checkpoints' descriptions and
exports know the names of the files.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from skyrl_async.errors import PolicyError
from skyrl_async.training.backends.state_files import persistent_buffers
from skyrl_async.weights.formats import TIED_HEAD, weight_files

Shapes = dict[str, tuple[int, ...]]


class FileNames:
    """Translates parameters one at a time, so that no more than one is whole in memory.

    Args:
        model: as transformers loaded it: not yet sharded, and without adapters.

    Raises ``PolicyError`` for a model whose files join several of its parameters into one tensor.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        named = chain(model.named_parameters(), persistent_buffers(model))
        shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in named}
        self._in_files = {name: _shapes(revert_weight_conversion(model, {name: of})) for name, of in shapes.items()}
        """Parameter -> names and shapes in the files."""
        self._shapes = {name: tuple(tensor.shape) for name, tensor in shapes.items()}
        one_by_one = dict(chain.from_iterable(found.items() for found in self._in_files.values()))
        if one_by_one != (together := _shapes(revert_weight_conversion(model, shapes))):
            name = min(set(one_by_one.items()) ^ set(together.items()))[0]
            raise PolicyError(
                f"a {model.config.model_type} model cannot be trained: its files join parameters, such as into {name}, and weights are "
                "published one parameter at a time"
            )

    def check_all_are_in(self, directory: Path) -> None:
        """Raise ``PolicyError`` if the safetensors files in ``directory`` hold what the model has not: engines expect it of a publish."""
        known = {name for found in self._in_files.values() for name in found} | {TIED_HEAD}
        for file in weight_files(directory):
            with safe_open(file, "pt") as opened:
                if unknown := sorted(set(opened.keys()) - known):
                    raise PolicyError(
                        f"{directory} cannot be trained: {file.name} holds {len(unknown)} tensors, such as {unknown[0]}, that are not in "
                        f"transformers' {type(self._model).__name__}; give a directory of the language model alone"
                    )

    def shapes(self, of_parameters: Mapping[str, tuple[int, ...]]) -> Shapes:
        """Shapes by the files' names."""
        return {name: shape for parameter in of_parameters for name, shape in self._in_files[parameter].items()}

    def renamed(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Full parameters and buffers as the files' tensors, in order."""
        for name, tensor in parameters:
            if name not in self._in_files or self._in_files[name].keys() == {name}:  # a buffer may have come later
                yield name, tensor
            else:
                yield from revert_weight_conversion(self._model, {name: tensor}).items()

    def read(self, parameter: str, tensor_of: Callable[[str], Tensor]) -> Tensor:
        """One full parameter, put together from the files' tensors.

        Which value goes where is found by taking a tensor of places apart: conversions move values and change none.
        """
        found = self._in_files[parameter]
        if found.keys() == {parameter}:
            return tensor_of(parameter)
        shape = self._shapes[parameter]
        places = torch.arange(math.prod(shape)).reshape(shape)
        whole: Tensor | None = None
        for name, of in revert_weight_conversion(self._model, {parameter: places}).items():
            tensor = tensor_of(name)
            whole = torch.empty(math.prod(shape), dtype=tensor.dtype) if whole is None else whole
            whole[of.flatten()] = tensor.flatten()
        assert whole is not None
        return whole.reshape(shape)


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
