"""What a rank is put together from: settings in; a backend, a reference and an objective out.

Knows every kind of them, and none of what a rank does with them.
"""

from pathlib import Path

import torch

from skyrl_async.algorithms.kl import get_kl_estimator
from skyrl_async.algorithms.losses import make_policy_loss
from skyrl_async.algorithms.objective import Objective
from skyrl_async.training.frozen import FrozenBackend
from skyrl_async.training.fsdp import FSDPBackend
from skyrl_async.training.model import TokenLogprobs, load_model
from skyrl_async.training.protocol import TrainingBackend
from skyrl_async.training.settings import TrainingSettings


def make_backend(settings: TrainingSettings, device: torch.device) -> TrainingBackend:
    """Of the policy; nothing is loaded yet."""
    if not settings.trains:
        return FrozenBackend(device=device, mixed_precision=settings.mixed_precision)
    return FSDPBackend(
        device=device,
        mixed_precision=settings.mixed_precision,
        activation_checkpointing=settings.activation_checkpointing,
    )


def load_reference(settings: TrainingSettings, device: torch.device) -> TokenLogprobs | None:
    """The frozen model beside the policy, loaded once for as long as the process lives; None where none is asked for."""
    if not settings.has_reference:
        return None
    path = Path(settings.policy_path if settings.reference_path is None else settings.reference_path)
    backend = FrozenBackend(device=device, mixed_precision=settings.mixed_precision)
    return TokenLogprobs(backend.build(lambda: load_model(path, trust_remote_code=settings.trust_remote_code)))


def make_objective(settings: TrainingSettings) -> Objective:
    """What training minimises. Raises ``ConfigError`` for unknown names."""
    return Objective(
        policy_loss=make_policy_loss(
            settings.policy_loss,
            eps_clip_low=settings.eps_clip_low,
            eps_clip_high=settings.eps_clip_high,
            tis_cap=settings.tis_cap,
        ),
        kl_estimator=None if settings.kl_estimator is None else get_kl_estimator(settings.kl_estimator),
        kl_coef=settings.kl_coef,
    )
