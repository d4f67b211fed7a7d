"""What is mixed into vLLM's workers: weights are received and prepared beside generation, and loaded while the engine is paused.

    receive (beside generation): broadcast ──> file in this process's memory, where the trainer's cannot be mapped
    stage (beside generation, CPU): file ──as at boot──> a twin of the model ─────┐
    shared (CUDA): the trainer's copies on this device ───────────────────────────┤
    load_update ──────────────────────────────────────────────────────────────> swap, or vLLM's reload

An update is one safetensors file, in memory or on disk. Each worker imports this module (``worker_extension_cls``), which asks
the kernel for the CPU's matrix tiles. Versions and pauses are unknown here: nothing may run in the engine during ``load_update``.
"""

import copy
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, restore_layer_on_meta, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import sanitize_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform

from skyrl_async.inference.layer_outputs import LayerOutputs
from skyrl_async.inference.vllm.outcomes import report_from_thread
from skyrl_async.inference.vllm.weight_receiver import Bucket, WeightReceiver, mapped_buckets
from skyrl_async.weights.shared_tensor import device_key, opened
from skyrl_async.weights.transfer_group import GroupPlace

logger = logging.getLogger(__name__)

Handles = dict[str, dict[str, Any]]
"""Name -> handle for ``shared_tensor.opened``."""
_NUM_PROBE_ROWS = 64


class WorkerExtension:
    """Mixed into vLLM's worker: methods for ``collective_rpc``. ``types.WeightUpdate`` describes the values of an update."""

    _receiver: WeightReceiver | None = None
    _staged: "tuple[str, _Twin] | None" = None
    _layer_outputs: LayerOutputs

    def connect_transfer(self, init_info: dict[str, Any]) -> None:
        """Prepare to receive in a group: the values of its ``GroupPlace``, and this engine's ``rank`` >= 1.

        One worker of an engine does, into memory that the others map.
        """
        if self.rank != 0:  # type: ignore[attr-defined]
            return
        if self._receiver is None:
            self._receiver = WeightReceiver(self.device)  # type: ignore[attr-defined]
        rank = init_info.pop("rank")
        self._receiver.connect(GroupPlace(**init_info), rank)

    def receive_weights(self, source: str, keep: Sequence[str], report_to: str) -> str | None:
        """Receive the trainer's file ``source`` in a thread. Returns the path where it will be; None: another worker receives it.

        Files received before are dropped unless named in ``keep``. The outcome is reported to ``report_to``.
        """
        if self._receiver is None:
            return None
        path, fill = self._receiver.prepare(source, keep)
        report_from_thread("receiving", fill, report_to)
        return path

    def stage_weights(self, path: str, load_bucket_bytes: int, report_to: str) -> str:
        """Load a file into a twin of the model in a thread; returns its path. The outcome is reported to ``report_to``.

        A model with more than plain layers stages nothing.
        """
        self._staged = None
        model = self._model()

        def stage() -> None:
            if not all(_is_plain(layer) for layer in model.modules()):
                return
            twin = _Twin(model)
            with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
                twin.load(mapped_buckets(path, load_bucket_bytes))
            self._staged = path, twin

        report_from_thread("staging", stage, report_to)
        return path

    def load_update(self, path: str, load_bucket_bytes: int, shared: Mapping[str, Handles]) -> None:
        """Load an update: staged weights, or as at boot through the model's own loader, so that fused and sharded layers are as then."""
        staged, self._staged = self._staged, None
        if staged is not None and staged[0] == path:
            threading.Thread(target=_free, args=(staged[1].swap(),), name="freeing", daemon=True).start()
            return
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            initialize_layerwise_reload(self._model())  # gives every layer the parameters it had before it was packed
            on_device = self._opened(shared, path) if shared else None
            for bucket in mapped_buckets(path, load_bucket_bytes) if on_device is None else [on_device]:
                self._model().load_weights(bucket)
            finalize_layerwise_reload(self._model(), self.model_config)  # type: ignore[attr-defined]
            if current_platform.is_cpu():
                _pack_again(self._model())
            else:
                torch.accelerator.synchronize()  # from here on nothing reads the trainer's shared tensors

    def _opened(self, shared: Mapping[str, Handles], path: str) -> Bucket | None:
        """The tensors that the trainer shares on this device; None: read them from the file."""
        device = self.device  # type: ignore[attr-defined]
        try:
            handles = shared.get(device_key(device))
            if handles is not None:
                return [(name, opened(handle, device)) for name, handle in handles.items()]
            reason = "no policy worker runs on this device"
        except (RuntimeError, OSError) as error:
            reason = f"what is shared on this device cannot be opened ({error})"
        logger.warning("%s: the weights are loaded from %s instead", reason, path)
        return None

    def _model(self) -> Any:
        return self.model_runner.get_model()  # type: ignore[attr-defined]

    def record_layers(self) -> None:
        """Keep what each decoder layer computes from now on."""
        self._layer_outputs = LayerOutputs(self._model())

    def write_layers(self, path: str) -> None:
        """Write what was kept to a safetensors file, and keep no more; one worker does, all have the same."""
        outputs = self._layer_outputs.close()
        if self.rank == 0:  # type: ignore[attr-defined]
            save_file(outputs, path)

    def put_blank_adapter(self, name: str, adapter_id: int, rank: int) -> None:
        """Add an adapter of zeros: the one that vLLM warms up with."""
        lora_manager = self.model_runner.lora_manager  # type: ignore[attr-defined]
        lora_manager.add_dummy_lora(LoRARequest(name, adapter_id, "zeros"), rank)

    def layers_without_adapters(self, names: list[str]) -> list[str]:
        """Those layers of an adapter's tensors for which vLLM has no adapters."""
        manager: LoRAModelManager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        known = {*manager.modules, *itertools.chain.from_iterable(manager.packed_modules.values())}
        return sorted({parse_fine_tuned_lora_name(name, mapper)[0] for name in names} - known)

    def weight_digest(self) -> str:
        """Digest of every parameter, of adapters, and on CPU of every packed linear layer.

        vLLM's own checksums leave the latter two out: packing empties parameters, and adapters are no parameters.
        """
        digest = hashlib.sha256()
        for name, value in sorted(self.compute_weight_checksums().items()):  # type: ignore[attr-defined]
            digest.update(f"{name}={value};".encode())
        for name, module in self._model().named_modules():
            if hasattr(module, "cpu_linear"):
                digest.update(f"{name}={_effective_weight_digest(module)};".encode())
            for tensor in (*getattr(module, "lora_a_stacked", ()), *getattr(module, "lora_b_stacked", ())):
                digest.update(name.encode())
                digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy())
        return digest.hexdigest()


@torch.inference_mode()
def _effective_weight_digest(module: torch.nn.Module) -> str:
    """Digest of the layer applied to fixed random rows; equal weights, equally packed, give equal digests."""
    weight = module.weight
    width = weight.shape[1] if weight.ndim == 2 else _input_width(module)
    rows = torch.randn(_NUM_PROBE_ROWS, width, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    product = module.cpu_linear(rows, weight, None)
    return hashlib.sha256(product.contiguous().view(torch.uint8).numpy()).hexdigest()


def _input_width(module: torch.nn.Module) -> int:
    """Columns of the weight of a linear layer whose unpacked weight is gone."""
    width = getattr(module, "input_size_per_partition", None)
    return int(module.input_size if width is None else width)


class _Twin:
    """The layers of a model on CPU once more, with tensors of their own, which are filled beside generation.

    vLLM itself reloads a model in place, while the engine is paused.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = dict(model.named_modules())
        self._twins = {layer: copy.copy(layer) for layer in self._layers.values()}
        self._model: Any = self._twins[model]
        for layer, twin in self._twins.items():
            twin._modules = {name: child and self._twins[child] for name, child in layer._modules.items()}
            twin._parameters, twin._buffers = layer._parameters.copy(), layer._buffers.copy()
            twin._non_persistent_buffers_set = layer._non_persistent_buffers_set.copy()
            info = get_layerwise_info(layer)
            unpacked = tuple(_unbound(tensors, layer) for tensors in info.restore_metadata)
            restore_layer_on_meta(twin, replace(info, restore_metadata=unpacked))
            for name, tensor in get_layer_tensors(twin).items():
                own = materialize_meta_tensor(to_meta_tensor(tensor))
                setattr(twin, name, own if tensor.is_meta else own.copy_(tensor))  # biases are never on meta
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The model's, and new ones."""

    @torch.no_grad()
    def load(self, buckets: Iterable[Bucket]) -> None:
        """Load and pack all weights, as at boot."""
        loaded: set[str] = set()
        for bucket in buckets:
            loaded |= self._model.load_weights(bucket)
        new: dict[torch.Tensor, torch.Tensor] = {}
        for prefix, layer in self._layers.items():
            for name, tensor in get_layer_tensors(layer).items():
                if f"{prefix}.{name}".removeprefix(".") in loaded:
                    new[tensor] = getattr(self._twins[layer], name)
        if missing := [name for name, tensor in self._layers[""].named_parameters() if tensor not in new]:
            raise ValueError(f"the model loads {missing[0]} (and {len(missing) - 1} more) in a way of its own")
        for layer, twin in self._twins.items():
            names = [name for name, tensor in get_layer_tensors(layer).items() if tensor in new]
            for name in names:
                setattr(twin, name, new[getattr(layer, name)])  # that of another layer if this one is tied to it
            if names and hasattr(twin, "quant_method"):
                twin.quant_method.process_weights_after_loading(twin)
            self._tensors += [(getattr(layer, name), getattr(twin, name)) for name in names]
        for _, tensor in self._tensors:
            # Drops vLLM's loaders, which hold their layer: an old version would stay until garbage is collected.
            vars(tensor).clear()

    def swap(self) -> list[Any]:
        """Give the model the loaded weights, and return the old ones. Nothing may run in the model meanwhile."""
        old: list[Any] = [tensor.data for tensor, _ in self._tensors]
        for tensor, new in self._tensors:
            tensor.data = new.data
        for layer, twin in self._twins.items():
            if hasattr(layer, "cpu_linear"):
                old.append(layer.cpu_linear)
                layer.cpu_linear = twin.cpu_linear
        return old


def _free(tensors: list[Any]) -> None:
    """Free one after another: each takes milliseconds in which no other thread runs, and the engine has to answer and to resume."""
    while tensors:
        time.sleep(0.01)
        tensors.pop()


def _unbound(tensors: dict[str, torch.Tensor], layer: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's tensors on the meta device, with loaders that another layer can bind to itself."""
    copies = {name: to_meta_tensor(tensor) for name, tensor in tensors.items()}
    for tensor in copies.values():
        if hasattr(tensor, "weight_loader"):
            tensor.weight_loader = _get_original_loader(tensor)  # an earlier reload has wrapped it
        sanitize_layer_refs(tensor, layer)
    return copies


def _is_plain(layer: nn.Module) -> bool:
    """Whether loading the layer is only copying, and perhaps packing for ``cpu_linear``."""
    if is_deferred_attention_layer(layer):
        return type(layer) is Attention
    method = getattr(layer, "quant_method", None)
    return method is None or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def _pack_again(model: torch.nn.Module) -> None:
    """Pack what a reload on CPU leaves unpacked: linear layers that share a weight with another module, such as a tied head, and experts.

    There a linear layer multiplies by a packed copy of its weight. A reload packs the layers that it loads; without this, a tied head
    would keep the old weights. Layers that were loaded have no unpacked weight any more. Experts are packed at boot only (vLLM 0.32).
    """
    for module in model.modules():
        quant_method = getattr(module, "quant_method", None)
        if quant_method is not None and hasattr(module, "cpu_linear") and module.weight.numel() > 0:
            quant_method.process_weights_after_loading(module)
        if (kernel := getattr(quant_method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)


if current_platform.is_cpu():
    from skyrl_async.inference.vllm.cpu_adapter import use_on_cpus

    use_on_cpus()
# Where the CPU has AMX, vLLM's attention in bfloat16 uses it unasked, and Linux ends a process that did not ask (SIGILL).
torch.cpu._init_amx()
