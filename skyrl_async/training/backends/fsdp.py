"""Training on FSDP2: sharded gradients, optimizer steps, and checkpoints that any number of ranks load.

Models that do not train are sharded here too, whatever backend trains: equal weights then give equal log-probs. Knows nothing of losses,
tokens or trajectories.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl_async.errors import TrainingError
from skyrl_async.training.backends.sharded import ShardedBackend
from skyrl_async.training.backends.state_files import persistent_buffers, read_state
from skyrl_async.types import WeightUpdate


class FSDPBackend(ShardedBackend):
    """FSDP2 over all ranks of the default process group.

    Gradients are reduced in float32 and summed, not averaged. Several ranks reduce them after every backward, so that each accumulates its
    shard only. A single rank, whose shard is the full gradient, saves those copies. One that neither offloads nor computes in bfloat16 has
    plain parameters, and saves the gathered ones.

    With ``trains=False`` there is no optimizer: the model computes forwards, of weights that ``load_weights`` replaces. Before that they
    are version 0.
    """

    def _build(self, model: nn.Module) -> nn.Module:
        """Shard the model per decoder layer."""
        settings = self._settings
        if not settings.trains:
            model.requires_grad_(False)
        is_offloaded = settings.trains and settings.cpu_offload
        _shard(model, self._device, mixed_precision=settings.mixed_precision, cpu_offload=is_offloaded)
        if dist.get_world_size() > 1:
            for module in _sharded_modules(model):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        self._take(model)
        if settings.trains:
            self._fill_optimizer_state()
        return model

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Accumulate the gradient of ``loss``, a sum over this rank's tokens; summed over the ranks."""
        if dist.get_world_size() == 1:
            for module in _sharded_modules(self._model):
                module.set_requires_gradient_sync(is_last, recurse=False)
        loss.backward()

    def step(self, denominator: float, lr_scale: float = 1.0) -> float:
        """Divide gradients by ``denominator``, clip, step and clear. As ``Policy.step``.

        Raises:
            TrainingError: the norm is not finite; nothing is applied, and the gradients are cleared.
        """
        self._reshard()
        self._fill_missing_gradients()
        gradients = self._local_gradients()
        norm = self._global_norm(gradients) / denominator
        if not math.isfinite(norm):
            culprits = self._non_finite_gradients()
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"the gradient norm is {norm} over {denominator:.0f} tokens at learning rate "
                f"{self.lr:.3g}; not finite on this rank: {culprits}. Nothing was applied"
            )
        limit = self._settings.max_grad_norm
        is_clipped = 0 < limit < norm
        if lr_scale:
            torch._foreach_mul_(gradients, (limit / norm if is_clipped else 1.0) / denominator)
            self._scale_lr(lr_scale)
            self._optimizer.step()
        self._continue_after(self.version + 1)
        self._optimizer.zero_grad(set_to_none=True)
        return norm if lr_scale else 0.0

    def _full(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        for name, parameter in parameters.items():
            own = parameter.detach().to(self._device)
            yield name, own.full_tensor() if isinstance(own, DTensor) else own

    @torch.no_grad()
    def load_weights(self, update: WeightUpdate) -> None:
        """Replace all weights by those of a published version.

        Raises:
            TrainingError: the file is gone, or the weights are not of this model; the previous version stays.
        """
        try:
            file: Any = safe_open(update.path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"the weights of version {update.version} cannot be read: {error}") from error
        with file:
            names = set(file.keys())
            for name, shape in self._file_names.shapes(self._shapes).items():
                _, found = update.manifest.get(name, ("", None))
                if found != shape or name not in names:
                    raise TrainingError(
                        f"version {update.version} is of another model: {name} has shape {found} there and {shape} here"
                    )
            self._reshard()
            for name, parameter in self._parameters.items():
                new = self._file_names.read(name, file.get_tensor).to(device=self._device, dtype=parameter.dtype)
                if isinstance(parameter, DTensor):
                    new = distribute_tensor(new, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(new)
        self.version = update.version

    def _load(self, directory: Path) -> None:
        state = self._state()
        groups = copy.deepcopy(state["optimizer"]["param_groups"])
        num_steps = read_state(directory, state)
        state["optimizer"]["param_groups"] = groups
        set_model_state_dict(self._model, state["model"], options=StateDictOptions(strict=False))
        set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"])
        self._continue_after(num_steps)
        self._optimizer.zero_grad(set_to_none=True)

    def _state(self) -> dict[str, Any]:
        """Each parameter once, under its name in ``named_parameters``: torch lists a tied head a second time, frozen or not."""
        self._reshard()
        kept = {*self._trained, *dict(persistent_buffers(self._model))}
        model_state = get_model_state_dict(self._model, options=StateDictOptions(ignore_frozen_params=True))
        return {
            "model": {name: tensor for name, tensor in model_state.items() if name in kept},
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer),
        }

    def _reshard(self) -> None:
        """Drop gathered parameters. After a forward without a backward they would stay, stale, past the next step."""
        for module in _sharded_modules(self._model):
            module.reshard()

    def _fill_missing_gradients(self) -> None:
        """Let a mini-batch without gradients still move the parameters by Adam's momentum, as gradients of zero do."""
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _fill_optimizer_state(self) -> None:
        """Make every parameter's state now. Otherwise torch's checkpointing makes it at the first save, by a step that counts."""
        self._fill_missing_gradients()
        self._optimizer.step()  # at learning rate 0
        self._optimizer.zero_grad(set_to_none=True)
        for state in self._optimizer.state.values():
            state["step"].zero_()

    def _local_gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self._trained.values()]
        return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]

    def _global_norm(self, gradients: list[Tensor]) -> float:
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        squares = norms.square().sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return math.sqrt(squares.item())

    def _non_finite_gradients(self) -> str:
        named = zip(self._trained, self._local_gradients(), strict=True)
        names = [name for name, gradient in named if not gradient.isfinite().all()]
        return f"{', '.join(names[:3])} ({len(names)} of {len(self._parameters)} parameters)" if names else "none"


def _shard(model: nn.Module, device: torch.device, *, mixed_precision: bool, cpu_offload: bool) -> None:
    """Shard a model per decoder layer over all ranks, in place, or move it to ``device`` where there is nothing to shard.

    With ``cpu_offload``, shards, gradients and optimizer state stay in the host's memory. A layer is on ``device`` only while it computes.
    """
    num_ranks = dist.get_world_size()
    if num_ranks == 1 and not mixed_precision and not cpu_offload:
        model.to(device)
        return
    mesh = init_device_mesh(device.type, (num_ranks,))
    dtype = torch.bfloat16 if mixed_precision else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    layer_classes = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_classes]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=num_ranks > 1)


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that were sharded. Each gathers its parameters together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
