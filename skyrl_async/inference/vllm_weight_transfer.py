"""The ``shm`` weight-transfer backend of vLLM's workers: one safetensors file per chunk, in shared memory or on disk.

    stage (beside generation, CPU): file ──plan──> new tensors, packed layers ──┐
    start ──> update ──────────────────────────────────────────────────> swap, or load ──> finish

Flows in: ``update_info`` dictionaries ``{"path": file}``. Flows out: the model's weights, replaced in place on CPU or
CUDA. vLLM imports this module in each worker (``worker_extension_cls``), which registers the backend there, and asks the kernel for the
CPU's matrix tiles. It knows neither versions nor pauses: nothing may run in the engine between the start and the finish of an update.
"""

import contextlib
import hashlib
import logging
import os
import threading
from dataclasses import dataclass

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from skyrl_async.inference.outcome_fifo import DONE
from skyrl_async.inference.vllm_load_plan import LoadPlan, Swap
from skyrl_async.inference.weight_map import WeightMap

logger = logging.getLogger(__name__)

BACKEND = "shm"
DEFAULT_LOAD_BUCKET_BYTES = 512 << 20
_NUM_PROBE_ROWS = 64


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing: a path is all there is to know, and it comes with each chunk."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One chunk of an update."""

    path: str
    """Safetensors file under Hugging Face names; it may be deleted once the update is finished."""
    load_bucket_bytes: int = DEFAULT_LOAD_BUCKET_BYTES
    """Most bytes of the file that are handed to the model, or kept mapped, at a time; a larger tensor apart."""


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads chunks through the model's own ``load_weights``, so fused and sharded layers come out as at boot."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to connect."""

    _plan: LoadPlan | None = None
    _planned_layout: bytes | None = None
    _staged: tuple[str, list[Swap]] | None = None
    _is_reloading = False

    def stage(self, update_info: ShmUpdateInfo, tell: str) -> None:
        """Begin to prepare the weights of a file in a thread, in memory of their own, and return; the model goes on with its own.

        ``tell`` is a FIFO: a line is written to it in the end. A model without a plan stages nothing.
        """
        self._staged = None
        try:
            with WeightMap(update_info.path, update_info.load_bucket_bytes) as weights:
                plan = self._plan_for(weights)
        except Exception as error:
            _tell(tell, error)
            return
        threading.Thread(target=self._stage, args=(plan, update_info, tell), name="staging", daemon=True).start()

    def _stage(self, plan: LoadPlan | None, update_info: ShmUpdateInfo, tell: str) -> None:
        failure: Exception | None = None
        try:
            if plan is not None:
                with torch.inference_mode(), WeightMap(update_info.path, update_info.load_bucket_bytes) as weights:
                    self._staged = update_info.path, list(plan.swaps(weights, in_place=False))
        except Exception as error:
            failure = error
        _tell(tell, failure)

    def start_weight_update(self) -> None:
        """Which way the weights come is known with the first chunk."""

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Load one chunk; the base class would synchronise an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Take what was staged of the file, or load it: by the plan, or else as at boot."""
        staged, self._staged = self._staged, None
        if staged is not None and staged[0] == update_info.path:
            old = [swap() for swap in staged[1]]
            threading.Thread(target=old.clear, name="freeing", daemon=True).start()
            return
        with WeightMap(update_info.path, update_info.load_bucket_bytes) as weights:
            plan = self._plan_for(weights)
            if plan is not None:
                with torch.inference_mode():
                    for swap in plan.swaps(weights, in_place=True):
                        swap()
                return
            if not self._is_reloading:
                self._is_reloading = True
                initialize_layerwise_reload(
                    self.model
                )  # every layer gets back the parameters it had before it was packed
            for bucket in weights.buckets():
                self.model.load_weights(bucket)

    def finish_weight_update(self) -> None:
        """Process and pack what was loaded as at boot."""
        if self._is_reloading:
            self._is_reloading = False
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                _repack_shared_weights(self.model)

    def _plan_for(self, weights: WeightMap) -> LoadPlan | None:
        if self.device.type != "cpu" or self._is_reloading:
            return None
        if weights.layout != self._planned_layout:
            self._plan, self._planned_layout = LoadPlan.of(self.model, weights), weights.layout
            if self._plan is None:
                logger.info("this model's weights are loaded as at boot, while the engine is paused: it takes longer")
        return self._plan

    def shutdown(self) -> None:
        """Nothing is held between chunks."""


def _tell(fifo_path: str, failure: Exception | None) -> None:
    """Say how it ended to whoever waits at the FIFO, if anybody still does."""
    outcome = DONE if failure is None else f"{type(failure).__name__}: {failure}".replace("\n", " ")[:1000]
    with contextlib.suppress(OSError):
        fifo = os.open(fifo_path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fifo, f"{outcome}\n".encode())
        os.close(fifo)


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

    def load_update(self, chunks: list[dict[str, str]]) -> None:
        """A whole update by vLLM's own methods, of any transfer, in one call: each would be a round trip inside the pause."""
        self.start_weight_update()  # type: ignore[attr-defined]
        for chunk in chunks:
            self.update_weights(chunk)  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]

    def stage_weights(self, update_info: dict[str, str], tell: str) -> None:
        """See ``ShmWeightTransferEngine.stage``."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            engine.stage(engine.parse_update_info(update_info), tell)

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
# Where the CPU has AMX, vLLM's attention in bfloat16 uses it unasked, and Linux ends a process that did not ask (SIGILL).
torch.cpu._init_amx()
