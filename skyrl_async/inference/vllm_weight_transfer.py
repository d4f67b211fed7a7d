"""The ``shm`` weight-transfer backend of vLLM's workers: one safetensors file per chunk, in shared memory or on disk.

Flows in: ``update_info`` dictionaries ``{"path": file}``. Flows out: the model's weights, replaced in place on CPU or
CUDA. vLLM imports this module in each worker (``worker_extension_cls``), which registers the backend there. It knows
neither versions nor pauses: nothing may run in the engine between the start and the finish of an update.
"""

import hashlib
from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "shm"
_NUM_PROBE_ROWS = 64


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing: a path is all there is to know, and it comes with each chunk."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One chunk of an update."""

    path: str
    """Safetensors file under Hugging Face names; it may be deleted once the update is finished."""


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads chunks through the model's own ``load_weights``, so fused and sharded layers come out as at boot."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Give every layer back the parameters it had before it was packed."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Load one chunk; the base class would synchronise an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load every tensor of the file; the layers copy them to their device."""
        with safe_open(update_info.path, framework="pt", device="cpu") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        """Process and pack what was loaded."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_shared_weights(self.model)

    def shutdown(self) -> None:
        """Nothing is held between chunks."""


def _repack_shared_weights(model: torch.nn.Module) -> None:
    """Pack again the linear layers that share a weight with another module, such as a tied head.

    On CPU a linear layer multiplies by a packed copy of its weight. A reload packs the layers that it loads; a tied
    head is not among them, and would go on with the old weights. Loaded ones have given their unpacked weight away.
    """
    for module in model.modules():
        quant_method = getattr(module, "quant_method", None)
        if quant_method is not None and hasattr(module, "cpu_linear") and module.weight.numel() > 0:
            quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Mixed into vLLM's worker: what ``collective_rpc`` can ask beside vLLM's own methods."""

    def weight_digest(self) -> str:
        """Digest of every parameter, and on CPU of what every packed linear layer multiplies by.

        vLLM's own checksums cover neither, because packing empties the parameters.
        """
        digest = hashlib.sha256()
        for name, value in sorted(self.compute_weight_checksums().items()):  # type: ignore[attr-defined]
            digest.update(f"{name}={value};".encode())
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        for name, module in model.named_modules():
            if hasattr(module, "cpu_linear"):
                digest.update(f"{name}={_effective_weight_digest(module)};".encode())
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
    """Columns of the weight that a linear layer has packed and given away."""
    width = getattr(module, "input_size_per_partition", None)
    return int(module.input_size if width is None else width)


WeightTransferEngineFactory.register_engine(BACKEND, ShmWeightTransferEngine)
