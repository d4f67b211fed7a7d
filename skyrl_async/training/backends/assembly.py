"""The parts of a rank, made from its settings: model, backend, reference and objective.

Knows every kind of them, and nothing of what a rank does with them.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from skyrl_async.algorithms.divergences import DIVERGENCES
from skyrl_async.algorithms.kl import KL_ESTIMATORS
from skyrl_async.algorithms.losses import make_policy_loss
from skyrl_async.algorithms.objective import Objective
from skyrl_async.algorithms.off_policy import OffPolicyCorrection, anchor_of
from skyrl_async.errors import PolicyError
from skyrl_async.training.backends.fsdp import FSDPBackend
from skyrl_async.training.backends.packing import check_rows_are_apart, read_packed_rows
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.backends.sharded import ShardedBackend
from skyrl_async.training.backends.token_logprobs import TokenLogprobs
from skyrl_async.training.backends.token_values import TokenValues

Reference = Callable[[], contextlib.AbstractContextManager[TokenLogprobs]]
"""Opens the reference: its log-probs are the reference's inside the context only."""


def make_backend(settings: TrainingSettings, device: torch.device) -> ShardedBackend:
    """Make the policy's backend. Nothing is loaded yet."""
    if settings.deepspeed is None or not settings.trains:
        return FSDPBackend(settings, device)
    from skyrl_async.training.backends.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(settings, settings.deepspeed, device)


def load_reference(
    settings: TrainingSettings, device: torch.device, backend: ShardedBackend, policy: TokenLogprobs
) -> Reference | None:
    """Load the frozen model beside the policy; None if the settings ask for none.

    If adapters train, the reference is the policy without them, unless it has its own path.
    """
    if not settings.has_reference:
        return None
    if backend.adapters is not None and settings.reference_path is None:
        return partial(backend.adapters.left_out, policy)
    path = Path(settings.policy_path if settings.reference_path is None else settings.reference_path)
    model = load_model(path, trust_remote_code=settings.trust_remote_code)
    frozen = FSDPBackend(replace(settings, trains=False, lora=None), device)
    reference = make_token_logprobs(frozen.build(model), settings)
    return lambda: contextlib.nullcontext(reference)


def make_token_logprobs(model: nn.Module, settings: TrainingSettings) -> TokenLogprobs:
    """Wrap a model that a backend has built. Collective. Raises ``ConfigError`` if the model cannot read packed rows."""
    _prepare_packing(model, settings)
    return TokenLogprobs(model, chunk_size=settings.logprobs_chunk_size)


def make_token_values(model: nn.Module, settings: TrainingSettings) -> TokenValues:
    """Wrap a critic that a backend has built. As ``make_token_logprobs``."""
    _prepare_packing(model, settings)
    return TokenValues(model)


def _prepare_packing(model: nn.Module, settings: TrainingSettings) -> None:
    if settings.use_sample_packing:
        read_packed_rows(model)
        check_rows_are_apart(model)


def make_objective(settings: TrainingSettings) -> Objective:
    """Make what training minimises. Raises ``ConfigError`` for unknown names, and for corrections that the loss makes already."""
    correction = OffPolicyCorrection(settings=settings.correction, anchor=anchor_of(settings.policy_loss))
    constants = settings.loss_constants
    if settings.correction.weighs:
        constants = replace(constants, tis_cap=math.inf)
    return Objective(
        policy_loss=make_policy_loss(settings.policy_loss, constants),
        kl_estimator=None if settings.kl_estimator is None else KL_ESTIMATORS[settings.kl_estimator],
        kl_coef=settings.kl_coef,
        entropy_coef=settings.entropy_coef,
        correction=None if settings.correction.is_empty else correction,
        teacher_divergence=DIVERGENCES[settings.teacher_divergence],
        teacher_coef=settings.teacher_coef,
    )


def load_model(path: Path, *, trust_remote_code: bool, needs_projection: bool = True) -> PreTrainedModel:
    """Load the Hugging Face model in ``path`` in float32 on CPU, in train mode, without dropout and jitter.

    Either would make the policy differ from the one that sampled.

    Args:
        path: its directory.
        trust_remote_code: passed to transformers.
        needs_projection: whether the weights must have the output projection, which a value model lacks.

    Raises:
        PolicyError: the directory is missing, or lacks a config or some of the weights.
    """
    if not (path / "config.json").is_file():
        raise PolicyError(
            f"{path} has no config.json; give a local Hugging Face directory (config.json, *.safetensors, tokenizer files)"
        )
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            config=_without_dropout(config),
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise PolicyError(f"{path} cannot be loaded by transformers: {error}") from error
    projection = None if needs_projection else model.get_output_embeddings()
    replaced = {name for name, module in model.named_modules() if module is projection}
    missing = sorted(name for name in loading["missing_keys"] if name.rpartition(".")[0] not in replaced)
    if missing:
        raise PolicyError(
            f"{path} lacks {len(missing)} parameters of a {config.model_type} model, such as {missing[0]}; "
            "complete its safetensors files"
        )
    assert isinstance(model, PreTrainedModel)
    model.train()
    _draw_nothing(model)
    return model


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Set every dropout fraction to 0, in nested configurations too."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _without_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


def _draw_nothing(model: nn.Module) -> None:
    """Turn off dropout that is not in the configuration, and experts' jitter.

    Modules with jitter leave train mode and keep their value: PhiMoE also reads it as the margin within which experts share a token.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if any("jitter" in name for name in vars(module)):
            module.training = False
