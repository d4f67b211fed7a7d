"""The ``shm`` weight-transfer backend of vLLM's workers: one safetensors file per chunk, in memory or on disk.

    receive (beside generation): broadcast ──> file in this process's memory, where the trainer's cannot be mapped
    stage (beside generation, CPU): file ──plan──> new tensors, packed layers ──┐
    shared (CUDA): the trainer's copies on this device ─────────────────────────┤
    start ──> update ──────────────────────────────────────────────────> swap, or load ──> finish

The model's weights are replaced in place. Each worker imports this module (``worker_extension_cls``), which registers the backend and asks
the kernel for the CPU's matrix tiles. Versions and pauses are unknown here: nothing may run in the engine between the start and the finish
of an update.
"""

import functools
import hashlib
import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from skyrl_async.inference.vllm.boot import TRANSFER_BACKEND
from skyrl_async.inference.vllm.load_plan import LoadPlan, Swap
from skyrl_async.inference.vllm.outcome_fifo import report, run_and_report
from skyrl_async.inference.vllm.weight_map import WeightMap
from skyrl_async.inference.vllm.weight_receiver import WeightReceiver
from skyrl_async.weights.shared_tensor import device_key, opened
from skyrl_async.weights.transfer_group import GroupPlace

logger = logging.getLogger(__name__)

DEFAULT_LOAD_BUCKET_BYTES = 512 << 20
_NUM_PROBE_ROWS = 64


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """A group in which files are broadcast (see ``transfer_group.GroupPlace``). Engines that map the trainer's files need none."""

    rank: int
    """This engine's rank, >= 1."""
    host: str
    port: int
    name: str
    num_members: int
    backend: str
    timeout_s: float


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One chunk of an update."""

    path: str
    """Safetensors file under Hugging Face names; it may be deleted once the update is finished."""
    load_bucket_bytes: int = DEFAULT_LOAD_BUCKET_BYTES
    """Most bytes of the file given to the model, or kept mapped, at a time; only a single larger tensor exceeds it."""
    shared: dict[str, dict[str, dict[str, Any]]] | None = None
    """``shared_tensor.device_key`` -> name -> handle of the file's tensors on devices, readable until the update is finished."""


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads chunks as the model's own ``load_weights`` does, so that fused and sharded layers are as at boot."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Prepare to receive in a group. One worker of an engine does, into memory that the others map."""
        if self.parallel_config.rank != 0:
            return
        if self._receiver is None:
            self._receiver = WeightReceiver(self.device)
        group = asdict(init_info)
        rank = group.pop("rank")
        self._receiver.connect(GroupPlace(**group), rank)

    def receive(self, source: str, keep: Sequence[str], fifo_path: str) -> str | None:
        """Receive the trainer's file ``source`` in a thread. Returns the path where it will be; None: another worker receives it.

        Files received before are dropped unless named in ``keep``. The outcome is reported to ``fifo_path``.
        """
        if self._receiver is None:
            return None
        path, fill = self._receiver.prepare(source, keep)
        threading.Thread(target=run_and_report, args=(fill, fifo_path), name="receiving", daemon=True).start()
        return path

    _receiver: WeightReceiver | None = None
    _plan: LoadPlan | None = None
    _planned_layout: bytes | None = None
    _staged: tuple[str, list[Swap]] | None = None
    _is_reloading = False

    def stage(self, update_info: ShmUpdateInfo, fifo_path: str) -> None:
        """Prepare the weights of a file in a thread, in memory of their own. The outcome is reported to ``fifo_path``.

        A model without a plan stages nothing.
        """
        self._staged = None
        try:
            with WeightMap(update_info.path, update_info.load_bucket_bytes) as weights:
                plan = self._plan_for(weights)
        except Exception as error:
            report(fifo_path, error)
            return
        stage = functools.partial(self._stage, plan, update_info)
        threading.Thread(target=run_and_report, args=(stage, fifo_path), name="staging", daemon=True).start()

    def _stage(self, plan: LoadPlan | None, update_info: ShmUpdateInfo) -> None:
        if plan is not None:
            with torch.inference_mode(), WeightMap(update_info.path, update_info.load_bucket_bytes) as weights:
                self._staged = update_info.path, list(plan.swaps(weights, in_place=False))

    def start_weight_update(self) -> None:
        """Nothing to do: only the first chunk says how its weights are loaded."""

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Load one chunk. The base class would synchronise an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Swap in the staged weights of the file, or load it: by the plan if there is one, else as at boot."""
        staged, self._staged = self._staged, None
        if staged is not None and staged[0] == update_info.path:
            old = [swap() for swap in staged[1]]
            threading.Thread(target=old.clear, name="freeing", daemon=True).start()
            return
        if (shared := self._opened(update_info)) is not None:
            self._load_as_at_boot([shared])
            return
        with WeightMap(update_info.path, update_info.load_bucket_bytes) as weights:
            plan = self._plan_for(weights)
            if plan is not None:
                with torch.inference_mode():
                    for swap in plan.swaps(weights, in_place=True):
                        swap()
                return
            self._load_as_at_boot(weights.buckets())

    def _opened(self, update_info: ShmUpdateInfo) -> list[tuple[str, torch.Tensor]] | None:
        """The tensors that the trainer shares on this device; None: read them from the file."""
        if update_info.shared is None:
            return None
        try:
            handles = update_info.shared.get(device_key(self.device))
            if handles is not None:
                return [(name, opened(handle, self.device)) for name, handle in handles.items()]
            reason = "no policy worker runs on this device"
        except (RuntimeError, OSError) as error:
            reason = f"what is shared on this device cannot be opened ({error})"
        logger.warning("%s: the weights are loaded from %s instead", reason, update_info.path)
        return None

    def _load_as_at_boot(self, buckets: Iterable[list[tuple[str, torch.Tensor]]]) -> None:
        if not self._is_reloading:
            self._is_reloading = True
            initialize_layerwise_reload(self.model)  # every layer gets back the parameters it had before it was packed
        for bucket in buckets:
            self.model.load_weights(bucket)

    def finish_weight_update(self) -> None:
        """Process and pack weights loaded as at boot. On return nothing reads the trainer's shared tensors any more."""
        if self._is_reloading:
            self._is_reloading = False
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                _repack_shared_weights(self.model)
            else:
                torch.accelerator.synchronize()

    def _plan_for(self, weights: WeightMap) -> LoadPlan | None:
        if self.device.type != "cpu" or self._is_reloading:
            return None
        if weights.layout != self._planned_layout:
            self._plan, self._planned_layout = LoadPlan.of(self.model, weights), weights.layout
            if self._plan is None:
                logger.info("this model's weights are loaded as at boot, while the engine is paused: it takes longer")
        return self._plan

    def shutdown(self) -> None:
        """Drop received files."""
        if self._receiver is not None:
            self._receiver.close()


def _repack_shared_weights(model: torch.nn.Module) -> None:
    """Pack the linear layers again that share a weight with another module, such as a tied head.

    On CPU a linear layer multiplies by a packed copy of its weight. A reload packs the layers that it loads; without this, a tied head
    would keep the old weights. Layers that were loaded have no unpacked weight any more.
    """
    for module in model.modules():
        quant_method = getattr(module, "quant_method", None)
        if quant_method is not None and hasattr(module, "cpu_linear") and module.weight.numel() > 0:
            quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Mixed into vLLM's worker: methods for ``collective_rpc``."""

    def load_update(self, chunks: list[dict[str, str]]) -> None:
        """Load a whole update in one call: vLLM's own methods would each cost a round trip inside the pause."""
        self.start_weight_update()  # type: ignore[attr-defined]
        for chunk in chunks:
            self.update_weights(chunk)  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]

    def receive_weights(self, source: str, keep: Sequence[str], fifo_path: str) -> str | None:
        """See ``ShmWeightTransferEngine.receive``."""
        path: str | None = self.weight_transfer_engine.receive(source, keep, fifo_path)  # type: ignore[attr-defined]
        return path

    def stage_weights(self, update_info: dict[str, str], fifo_path: str) -> None:
        """See ``ShmWeightTransferEngine.stage``."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            engine.stage(engine.parse_update_info(update_info), fifo_path)

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
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        for name, module in model.named_modules():
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


WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, ShmWeightTransferEngine)
if current_platform.is_cpu():
    from skyrl_async.inference.vllm.cpu_adapter import use_on_cpus

    use_on_cpus()
# Where the CPU has AMX, vLLM's attention in bfloat16 uses it unasked, and Linux ends a process that did not ask (SIGILL).
torch.cpu._init_amx()
