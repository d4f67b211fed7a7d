"""What each decoder layer of a model computes, read by hooks: in transformers and inside an engine alike.

Knows neither tokens nor what the outputs are compared with.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers of a model: of its lists of modules, the one with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))


class LayerOutputs:
    """Keeps what enters the first layer and what each layer returns, from its making until ``close``."""

    def __init__(self, model: nn.Module) -> None:
        layers = decoder_layers(model)
        self._kept: dict[str, list[Tensor]] = {}
        self._hooks = [layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)]
        self._hooks += [
            layer.register_forward_hook(partial(self._leave, f"layer {i}")) for i, layer in enumerate(layers)
        ]

    def close(self) -> dict[str, Tensor]:
        """(T, H) float32 each, for T tokens that were read one after the other, in the order of the layers.

        Empty where the model runs compiled, which calls no hooks.
        """
        for hook in self._hooks:
            hook.remove()
        return {name: torch.cat(parts) for name, parts in self._kept.items()}

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self._keep("the input embeddings", next(value for value in entering if value.is_floating_point()))

    def _leave(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """vLLM's layers return what is still to be added to the residual, and the residual."""
        parts = output if isinstance(output, tuple) else (output,)
        self._keep(name, *(part for part in parts if isinstance(part, Tensor) and part.shape == parts[0].shape))

    def _keep(self, name: str, *summands: Tensor) -> None:
        """A copy: vLLM's next layer writes into its input."""
        total = torch.stack([part.detach().float() for part in summands]).sum(0)
        self._kept.setdefault(name, []).append(total.reshape(-1, total.shape[-1]).cpu())
