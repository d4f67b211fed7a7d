"""Reads and writes what ZeRO's ranks hold in parts, one full float32 tensor at a time: parameters and Adam's moments.

The one file that knows how ZeRO lays out its state. Every method is collective over the ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Torch's names of Adam's moments."""


class ZeroState:
    """The state of one engine.

    Args:
        engine: DeepSpeed's engine.
        optimizer: torch's optimizer, stepped by the engine.
        zero_stage: 0 to 3.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, zero_stage: int) -> None:
        self._zero = engine.optimizer if zero_stage else None
        self._optimizer = optimizer
        self._stage = zero_stage
        self.parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        """Parameters that train, by name."""

    def weight(self, name: str) -> Tensor:
        """Return a full parameter, float32."""
        from deepspeed.utils import safe_get_full_fp32_param

        parameter = self.parameters[name]
        full: Tensor = parameter.detach() if self._stage == 0 else safe_get_full_fp32_param(parameter)
        return full

    def moment(self, name: str, key: str) -> Tensor:
        """Return a parameter's moment ``key`` (one of ``MOMENTS``), full, float32; zeros before the first step."""
        from deepspeed.utils import safe_get_full_optimizer_state

        parameter = self.parameters[name]
        if not self._optimizer.state:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        if self._stage == 0:
            full: Tensor = self._optimizer.state[parameter][key]
        else:
            full = safe_get_full_optimizer_state(parameter, key)
        return full

    def num_steps(self, name: str) -> float:
        """Adam's steps on a parameter so far."""
        if not self._optimizer.state:
            return 0.0
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
        """Make the optimizer's state now rather than in its first step: moments of zero after ``num_steps`` steps."""
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
        if self._zero is None:
            return list(self.parameters.values())
        flat: list[Tensor] = (
            self._zero.fp32_partitioned_groups_flat if self._stage == 3 else self._zero.single_partition_of_fp32_groups
        )
        return flat

    def _set_partition(self, parameter: nn.Parameter, full: Tensor, key: str | None = None) -> None:
        """Set this rank's part. Zeros fill up the last rank's, which DeepSpeed's own function does not handle."""
        assert self._zero is not None
        size = parameter.partition_numel()
        padding = size * dist.get_world_size() - full.numel()
        part = nn.functional.pad(full.flatten(), (0, padding)).narrow(0, size * dist.get_rank(), size)
        self._zero.set_local_hp_param(part, parameter, key)
