"""Training on DeepSpeed's ZeRO (arXiv 1910.02054), stages 0 to 3.

DeepSpeed's engine reduces and shards, its optimizer divides and clips, and torch's AdamW steps. Gradients are reduced in float32: at the
step in stages 0 and 1, after every backward in 2 and 3. Knows nothing of losses, tokens or trajectories.
"""

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from skyrl_async.config.schema.training import DeepSpeedConfig
from skyrl_async.errors import TrainingError
from skyrl_async.training import rank_process
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.backends.sharded import ShardedBackend
from skyrl_async.training.backends.state_files import persistent_buffers, read_state

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Torch's names of Adam's moments."""


def _drop_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step: parameters without a gradient are not stepped."""
    optimizer.zero_grad(set_to_none=True)


_Hook = Callable[..., None]


class DeepSpeedBackend(ShardedBackend):
    """ZeRO over all ranks of the default process group."""

    def __init__(self, settings: TrainingSettings, deepspeed: DeepSpeedConfig, device: torch.device) -> None:
        super().__init__(settings, device)
        self._deepspeed = deepspeed
        self._engine: Any
        self._zero: ZeroState
        self._has_gradients = False

    def _build(self, model: nn.Module) -> nn.Module:
        """Make the engine. Forwards must call it, not the model: it prepares each backward."""
        if self._settings.mixed_precision:
            # Weights and gradients stay float32.
            model.forward = torch.autocast(self._device.type, dtype=torch.bfloat16)(model.forward)
        self._take(model.to(self._device))
        config = engine_config(self._deepspeed, self._settings.deepspeed_json, num_ranks=dist.get_world_size())
        self._engine = _initialize(model, self._optimizer, config, self._device)
        self._zero = ZeroState(self._engine, self._optimizer, self._trained, self._deepspeed.zero_stage)
        self._zero.make_moments(0.0)  # a first step that is refused makes none, and DeepSpeed looks for them once
        return self._engine

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Accumulate the gradient of ``loss``, a sum over this rank's tokens. Ranks are summed: the factor undoes DeepSpeed's mean."""
        self._engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)
        self._has_gradients = True

    def step(self, denominator: float, lr_scale: float = 1.0) -> float:
        """Divide gradients by ``denominator``, clip, step and clear. As ``Policy.step``.

        Raises:
            TrainingError: the norm is not finite; nothing is applied, and the gradients are cleared.
        """
        if not self._has_gradients:
            self._make_zero_gradients()
        self._has_gradients = False
        step = self._step_zero if self._deepspeed.zero_stage else self._step_replicated
        self._scale_lr(lr_scale)
        norm = step(denominator, () if lr_scale else (_drop_gradients,))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient norm is not finite over {denominator:.0f} tokens at learning rate {self.lr:.3g}. Nothing was applied"
            )
        self._continue_after(self.version + 1)
        return norm if lr_scale else 0.0

    def _step_zero(self, denominator: float, hooks: Sequence[_Hook]) -> float:
        """Have DeepSpeed divide by ``denominator`` as its loss scale, which is 1 in every backward. It skips a step of infinite norm."""
        optimizer = self._engine.optimizer
        optimizer.loss_scale, optimizer.clip_grad = denominator, self._settings.max_grad_norm
        try:
            self._take_step(hooks)
        finally:
            optimizer.loss_scale = 1.0
        return math.inf if optimizer.overflow else float(self._engine.get_global_grad_norm())

    def _step_replicated(self, denominator: float, hooks: Sequence[_Hook]) -> float:
        """Divide and clip between DeepSpeed's reduction and torch's step."""
        norms = []
        limit = self._settings.max_grad_norm

        def divide_and_clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in parameters]
            norm = math.sqrt(torch.stack(torch._foreach_norm(gradients)).double().square().sum().item()) / denominator
            norms.append(norm)
            if not math.isfinite(norm):
                _drop_gradients(optimizer)
                return
            is_clipped = 0 < limit < norm
            torch._foreach_mul_(gradients, (limit / norm if is_clipped else 1.0) / denominator)

        self._take_step((divide_and_clip, *hooks))
        return norms[0]

    def _take_step(self, hooks: Sequence[_Hook]) -> None:
        """Have DeepSpeed take its step, with ``hooks`` before torch's."""
        handles = [self._optimizer.register_step_pre_hook(hook) for hook in hooks]
        try:
            self._engine.step()
        finally:
            for handle in handles:
                handle.remove()

    def _make_zero_gradients(self) -> None:
        """Let a mini-batch without gradients still move the parameters by Adam's momentum, as gradients of zero do."""
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self._device)
        self.backward(self._engine(input_ids=ids, use_cache=False).logits.sum() * 0.0, is_last=True)

    def _full(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            with self._gathered(parameter):
                full = parameter.detach().clone()
            yield name, full

    def _gathered(self, parameter: nn.Parameter) -> contextlib.AbstractContextManager[None]:
        if self._deepspeed.zero_stage < 3:
            return contextlib.nullcontext()
        import deepspeed

        gathered: contextlib.AbstractContextManager[None] = deepspeed.zero.GatheredParameters([parameter])
        return gathered

    def _load(self, directory: Path) -> None:
        if self._has_gradients:
            with contextlib.suppress(TrainingError):  # they are not finite, and dropped too
                self.step(1.0, 0.0)
        state = self._state()
        num_steps = read_state(directory, state)
        zero, optimizer_state = self._zero, state["optimizer"]["state"]
        zero.make_moments(max(float(each["step"]) for each in optimizer_state.values()))
        for name in zero.parameters:
            zero.set_weight(name, state["model"][name].full_tensor())
            for key in MOMENTS:
                zero.set_moment(name, key, optimizer_state[name][key].full_tensor())
        for name, buffer in persistent_buffers(self._model):
            buffer.copy_(state["model"][name])
        self._continue_after(num_steps)

    def _state(self) -> dict[str, Any]:
        """Tensors are sharded along their first dimension: each rank writes a copy of its shard, made on the device of the parameters."""
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        zero = self._zero
        optimizer_state = {
            name: {
                "step": torch.tensor(zero.num_steps(name), dtype=torch.float32),
                **{key: _shard(zero.moment(name, key), mesh) for key in MOMENTS},
            }
            for name in zero.parameters
        }
        group = {key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"}
        return {
            "model": {
                **{name: _shard(zero.weight(name), mesh) for name in zero.parameters},
                **dict(persistent_buffers(self._model)),
            },
            "optimizer": {"state": optimizer_state, "param_groups": [{"params": list(zero.parameters), **group}]},
        }

    def close(self) -> None:
        """Leave the process group."""
        self._engine.destroy()
        super().close()


def _shard(full: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of a tensor that every rank has."""
    chunks = full.chunk(mesh.size())
    own = chunks[rank].clone() if (rank := mesh.get_local_rank()) < len(chunks) else full[:0].clone()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def _initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: torch.device
) -> Any:
    """Make an engine in the default process group. Nothing is compiled: we use neither DeepSpeed's optimizers nor its CPU reductions."""
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # what DeepSpeed's launcher would set
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed.ops

        vars(deepspeed.ops)["__compatible_ops__"] = {}
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed calls it
    rank_process.destroy_by(deepspeed.comm.destroy_process_group)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


class ZeroState:
    """Reads and writes what ZeRO's ranks hold in parts, one full float32 tensor at a time: parameters and Adam's moments.

    The one class that knows how ZeRO lays out its state. Every method is collective over the ranks.

    Args:
        engine: DeepSpeed's engine.
        optimizer: torch's optimizer, stepped by the engine.
        parameters: those that train, by name.
        zero_stage: 0 to 3.
    """

    def __init__(
        self, engine: Any, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], zero_stage: int
    ) -> None:
        self._zero = engine.optimizer if zero_stage else None
        self._optimizer = optimizer
        self._stage = zero_stage
        self.parameters = parameters

    def weight(self, name: str) -> Tensor:
        """Return a full parameter, float32."""
        from deepspeed.utils import safe_get_full_fp32_param

        parameter = self.parameters[name]
        full: Tensor = parameter.detach() if self._stage == 0 else safe_get_full_fp32_param(parameter)
        return full

    def moment(self, name: str, key: str) -> Tensor:
        """Return a parameter's moment ``key`` (one of ``MOMENTS``), full, float32. Call ``make_moments`` first."""
        from deepspeed.utils import safe_get_full_optimizer_state

        parameter = self.parameters[name]
        if self._stage == 0:
            full: Tensor = self._optimizer.state[parameter][key]
        else:
            full = safe_get_full_optimizer_state(parameter, key)
        return full

    def num_steps(self, name: str) -> float:
        """Adam's steps on a parameter so far."""
        holder = self.parameters[name] if self._stage == 0 else next(iter(self._optimizer.state))
        return float(self._optimizer.state[holder]["step"])

    def set_weight(self, name: str, full: Tensor) -> None:
        """Replace a parameter: the copy for forwards and the one that the optimizer steps."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        parameter = self.parameters[name]
        with torch.no_grad():
            if self._stage == 3:
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    parameter.copy_(full)
                self._set_partition(parameter, full)
                return
            parameter.copy_(full)
            if self._stage:
                safe_set_full_fp32_param(parameter, full)

    def set_moment(self, name: str, key: str, full: Tensor) -> None:
        """Replace a parameter's moment ``key``. Call ``make_moments`` first."""
        from deepspeed.utils import safe_set_full_optimizer_state

        parameter = self.parameters[name]
        if self._stage == 0:
            self._optimizer.state[parameter][key].copy_(full)
        elif self._stage == 3:
            self._set_partition(parameter, full, key)
        else:
            safe_set_full_optimizer_state(parameter, full, key)

    def make_moments(self, num_steps: float) -> None:
        """Make the optimizer's state anew, which torch makes in its first step: moments of zero after ``num_steps`` steps."""
        for holder in self._holders():
            state = self._optimizer.state[holder]
            state["step"] = torch.tensor(num_steps, dtype=torch.float32, device=holder.device)
            for key in MOMENTS:
                state[key] = torch.zeros_like(holder, memory_format=torch.preserve_format)
        if self._stage in (1, 2):
            assert self._zero is not None
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _holders(self) -> list[Tensor]:
        """The tensors that torch's optimizer steps: the parameters, or ZeRO's flat parts of them."""
        zero = self._zero
        if zero is None:
            return list(self.parameters.values())
        return list(zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups)

    def _set_partition(self, parameter: nn.Parameter, full: Tensor, key: str | None = None) -> None:
        """Set this rank's part. Zeros fill up the last rank's, which DeepSpeed's own function does not handle."""
        assert self._zero is not None
        size = parameter.partition_numel()
        padding = size * dist.get_world_size() - full.numel()
        part = nn.functional.pad(full.flatten(), (0, padding)).narrow(0, size * dist.get_rank(), size)
        self._zero.set_local_hp_param(part, parameter, key)


def engine_config(settings: DeepSpeedConfig, json_keys: Mapping[str, Any] | None, *, num_ranks: int) -> dict[str, Any]:
    """The configuration for ``deepspeed.initialize``. Its batch sizes have no effect: only ``step`` ends an accumulation."""
    config = dict(json_keys or {})
    zero: dict[str, Any] = {"overlap_comm": False} | config.get("zero_optimization", {})
    zero["stage"] = settings.zero_stage
    for part in ("offload_optimizer", "offload_param"):
        if getattr(settings, part):
            zero.setdefault(part, {"device": "cpu", "pin_memory": True})
    ours = {
        "zero_optimization": zero,
        "train_batch_size": num_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,  # each step clips by its own argument
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW steps offloaded state too, without a compiler
    }
    return {"steps_per_print": 2**31 - 1} | config | ours
