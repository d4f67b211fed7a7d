"""Rules about ``training.backend=deepspeed``: whether it is installed, and whether its settings go with the others."""

import importlib.util
from dataclasses import fields

from skyrl_async.config.rules.devices import training_device
from skyrl_async.config.schema.deepspeed import DeepSpeedConfig, read_user_config
from skyrl_async.config.schema.run import Config, Device, TrainingBackendName
from skyrl_async.errors import ConfigError


def deepspeed_settings_are_of_deepspeed(config: Config) -> None:
    """Nothing is set that does nothing."""
    if config.training.backend is TrainingBackendName.deepspeed:
        return
    for field in fields(DeepSpeedConfig):
        if (value := getattr(config.training.deepspeed, field.name)) != field.default:
            raise ConfigError(
                f"training.backend must be deepspeed with training.deepspeed.{field.name}={value}, got "
                f"{config.training.backend.name}"
            )


def deepspeed_can_train(config: Config) -> None:
    """DeepSpeed is installed, there is something to offload from, and a user's JSON agrees with the other keys."""
    training = config.training
    if training.backend is not TrainingBackendName.deepspeed:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "training.backend must be fsdp where DeepSpeed is not installed (it is on Linux), got deepspeed"
        )
    if training.cpu_offload:
        raise ConfigError(
            "training.cpu_offload must be false with training.backend=deepspeed, got true: it is FSDP's; set "
            "training.deepspeed.offload_optimizer=true, and with zero_stage=3 training.deepspeed.offload_param=true"
        )
    user_config = read_user_config(training.deepspeed, max_grad_norm=training.max_grad_norm) or {}
    if training_device(training) is not Device.cpu:
        return
    zero = user_config.get("zero_optimization", {})
    for key in ("offload_optimizer", "offload_param"):
        reason = "with training.device=cpu: there is no device to offload from"
        if getattr(training.deepspeed, key):
            raise ConfigError(f"training.deepspeed.{key} must be false {reason}, got true")
        if key in zero:
            raise ConfigError(
                f'training.deepspeed.config must not set zero_optimization.{key}.device to "{zero[key]["device"]}" {reason}; take it out, '
                'or set it to "none"'
            )
