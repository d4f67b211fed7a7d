"""A Hugging Face directory in, a float32 causal language model out.

Knows transformers; knows neither sharding nor losses.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from skyrl_async.errors import PolicyError


def load_model(path: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """Load the model in ``path`` in float32 on CPU, in train mode, without dropout and jitter.

    Either would make the policy differ from the one that sampled.

    Raises:
        PolicyError: the directory is missing, or lacks a config or some of the weights.
    """
    if not (path / "config.json").is_file():
        raise PolicyError(
            f"policy.path must be a local Hugging Face directory (config.json, *.safetensors, tokenizer files); "
            f"{path} has no config.json"
        )
    try:
        with _no_progress_bar():
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
        raise PolicyError(f"policy.path {path} cannot be loaded by transformers: {error}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise PolicyError(
            f"policy.path {path} lacks {len(missing)} parameters of a {config.model_type} model, such as {missing[0]}; "
            "complete its safetensors files"
        )
    assert isinstance(model, PreTrainedModel)
    model.train()
    _draw_nothing(model)
    return model


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Its fractions to drop are 0, whatever they are called, and those of its parts."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _without_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


def _draw_nothing(model: nn.Module) -> None:
    """For dropout that is not in the configuration, and for experts' jitter.

    Jitter is left as it is and its modules out of train mode: that of PhiMoE says too how near to each other experts share a token, also
    where nothing is drawn.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if any("jitter" in name for name in vars(module)):
            module.training = False


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
