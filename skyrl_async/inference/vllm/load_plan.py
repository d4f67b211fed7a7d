"""Which bytes of a weight update go where in a model on CPU: recorded once, repeated at every update.

    model.load_weights on stand-ins ──recorded copies──> LoadPlan ──file──> new tensors and packed layers ──swap──> the model

vLLM's own reload copies each weight three times and packs it, all while the engine is paused. A plan copies and packs beside generation, if
there is memory for it, and leaves only swaps for the pause. A model that a plan cannot describe gets none.
"""

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from skyrl_async.inference.vllm.weight_map import WeightMap

Swap = Callable[[], object]
"""Sets new weights of one parameter and its layers; returns the old ones, since freeing them takes longer than the swap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A copy from one region of the file to one region of a parameter."""

    into: tuple[tuple[int, ...], tuple[int, ...], int]
    """The parameter's region: size, stride and storage offset, in elements."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Offset in the file, in bytes."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.size).numel()


@dataclass(slots=True, kw_only=True)
class _Target:
    """A parameter or buffer and the copies into it."""

    layer: nn.Module
    name: str
    shape: torch.Size
    dtype: torch.dtype
    copies: list[_Copy] = field(default_factory=list)

    @property
    def current(self) -> Tensor:
        """The model's tensor; empty if a packed copy has replaced it."""
        found = getattr(self.layer, self.name)
        assert isinstance(found, Tensor)
        return found

    @property
    def is_whole(self) -> bool:
        """Whether the copies fill all of it."""
        return sum(torch.Size(copy.size).numel() for copy in self.copies) >= self.shape.numel()

    def read(self, weights: WeightMap, before: Tensor | None) -> Tensor:
        """The new value: a view into the file if its bytes lie there in order, otherwise new memory.

        ``before`` is the current value, for elements that are not in the file. None allows a view.
        """
        first = self.copies[0]
        if before is None and self._is_contiguous_in_file():
            return weights.region(first.offset, self.dtype, tuple(self.shape), _contiguous_stride(self.shape))
        new = torch.empty(self.shape, dtype=self.dtype) if before is None else torch.empty_like(before)
        if before is not None and not self.is_whole:
            new.copy_(before)
        self.copy(weights, new)
        return new

    def copy(self, weights: WeightMap, new: Tensor) -> None:
        """Copy the new value into ``new``."""
        for copy in self.copies:
            source = weights.region(copy.offset, copy.dtype, copy.size, copy.stride)
            new.as_strided(*copy.into).copy_(source)

    def _is_contiguous_in_file(self) -> bool:
        """Whether the file has the value's bytes in order, as for fused layers whose parts were sent in order."""
        at, begin = 0, self.copies[0].offset
        for copy in sorted(self.copies, key=lambda copy: copy.into[2]):
            is_flat = copy.stride == _contiguous_stride(copy.size) and copy.into[1] == copy.stride
            if (
                not is_flat
                or copy.dtype != self.dtype
                or copy.into[2] != at
                or copy.offset != begin + at * self.dtype.itemsize
            ):
                return False
            at += torch.Size(copy.size).numel()
        return at == self.shape.numel()


class LoadPlan:
    """The copies of one model. Made by ``of``."""

    def __init__(self, model: nn.Module, targets: list[_Target]) -> None:
        self._model = model
        self._targets = targets

    @classmethod
    def of(cls, model: nn.Module, weights: WeightMap) -> "LoadPlan | None":
        """The plan for files laid out like this one; None if loading the model is more than copies and packing.

        Nothing may run in the model meanwhile. The model is unchanged afterwards.
        """
        if not all(_is_plain(layer) for layer in model.modules()):
            return None
        recorder = _record(model, weights)
        targets = [target for target in recorder.targets.values() if target.copies]
        if not _are_all_read(weights, sorted(copy.offset for target in targets for copy in target.copies)):
            return None
        if recorder.is_unplannable or not all(target.is_whole or target.current.numel() for target in targets):
            return None
        return cls(model, targets)

    def swaps(self, weights: WeightMap, *, in_place: bool) -> Iterator[Swap]:
        """Yield swaps one after another; each may be called only while nothing runs in the model.

        Args:
            weights: a file with the layout that the plan was made for.
            in_place: write into the current memory where possible, so that only one layer's packed weights are held twice. Then nothing
                may run in the model from here on. Otherwise current weights stay unchanged until the swaps.
        """
        for target in self._targets:
            yield self._swap(target, weights, in_place=in_place)
            weights.note_copied(sum(copy.num_bytes for copy in target.copies))

    def _swap(self, target: _Target, weights: WeightMap, *, in_place: bool) -> Swap:
        parameter = target.current
        if parameter.numel() == 0:  # packed, without its own memory
            return functools.partial(_set_packed, target.layer, _packed(target.read(weights, None)))
        if in_place:
            target.copy(weights, parameter.data)
            new = parameter.data
        else:
            new = target.read(weights, parameter.data)
        users = [layer for layer in self._model.modules() if _multiplies_packed(layer, parameter)]
        packed = _packed(new) if users else None

        def swap() -> object:
            old, parameter.data = parameter.data, new
            return old, [_set_packed(user, packed) for user in users]

        return swap


class _Recorder(TorchDispatchMode):
    """Records copies from the file into parameters, and whether anything else is done to these."""

    def __init__(self, weights: WeightMap, targets: dict[int, _Target]) -> None:
        super().__init__()
        self._weights = weights
        self.targets = targets
        """Targets by the identity of the parameter's storage."""
        self.is_unplannable = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func._schema.is_mutable or not args or not isinstance(args[0], Tensor):
            return func(*args, **(kwargs or {}))
        target = self.targets.get(args[0].untyped_storage()._cdata)
        if target is None:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.fill_.Scalar:  # padding, which keeps its value from boot
            return args[0]
        offset = self._weights.offset_of(args[1]) if func is torch.ops.aten.copy_.default else None
        if offset is None or args[0].shape != args[1].shape:
            self.is_unplannable = True
            return args[0]
        into, source = args[0], args[1]
        target.copies.append(
            _Copy(
                into=(tuple(into.shape), into.stride(), into.storage_offset()),
                size=tuple(source.shape),
                stride=source.stride(),
                dtype=source.dtype,
                offset=offset,
            )
        )
        return into


def _record(model: nn.Module, weights: WeightMap) -> _Recorder:
    """Let the model load the file into stand-ins of its unpacked parameters, and record the copies."""
    infos = [(layer, get_layerwise_info(layer)) for layer in model.modules()]
    for layer, info in infos:
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    try:
        targets: dict[int, _Target] = {}
        for layer, info in infos:
            restore_layer_on_meta(layer, info)
            for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = _get_original_loader(tensor)  # an earlier reload has wrapped it
                target = _Target(layer=layer, name=name, shape=tensor.shape, dtype=tensor.dtype)
                targets.setdefault(tensor.untyped_storage()._cdata, target)
        with _Recorder(weights, targets) as recorder:
            for bucket in weights.buckets():
                model.load_weights(bucket)
        return recorder
    finally:
        for layer, info in infos:
            _place_kernel_tensors(layer, info)
            info.reset()


def _are_all_read(weights: WeightMap, offsets: list[int]) -> bool:
    """Whether each tensor of the file is copied at least in part: each of several workers copies its part."""
    for _, tensor in itertools.chain.from_iterable(weights.buckets()):
        start = weights.offset_of(tensor)
        if start is None:
            return False
        index = bisect_left(offsets, start)
        if index == len(offsets) or offsets[index] >= start + tensor.nbytes:
            return False
    return True


def _is_plain(layer: nn.Module) -> bool:
    """Whether loading the layer is only copying, and perhaps packing for ``cpu_linear``."""
    if is_deferred_attention_layer(layer):
        return type(layer) is Attention
    method = getattr(layer, "quant_method", None)
    return method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def _multiplies_packed(layer: nn.Module, parameter: Tensor) -> bool:
    """Whether the layer has a packed copy of this parameter, as an output layer, also one tied to the embedding."""
    return hasattr(layer, "cpu_linear") and layer._parameters.get("weight") is parameter


def _set_packed(layer: Any, packed: Any) -> object:
    old, layer.cpu_linear = layer.cpu_linear, packed
    return old


def _packed(weight: Tensor) -> Callable[..., Tensor]:
    """``cpu_linear`` for this weight."""
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    multiply: Callable[..., Tensor] = layer.cpu_linear
    return multiply


def _contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for length in reversed(size):
        stride.insert(0, step)
        step *= length
    return tuple(stride)
