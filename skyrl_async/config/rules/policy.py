"""Rules about the policy and the reference: whether their directories are complete, judged by file names, and what they go with."""

import json
import os
from pathlib import Path

from skyrl_async.config.rules.devices import engine_device
from skyrl_async.config.schema.run import Config, Device, DType, EngineBackend
from skyrl_async.config.schema.task import BUILT_IN_TASKS
from skyrl_async.errors import ConfigError, PolicyError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def tiny_policy_has_something_to_learn(config: Config) -> None:
    warm_start = config.policy.warm_start
    is_tiny, is_built_in = config.policy.path is None, config.task.name in BUILT_IN_TASKS
    if is_tiny and not is_built_in and not warm_start.files:
        raise ConfigError(
            f"policy.path must be a Hugging Face directory when task.name={config.task.name}, got null: "
            "the tiny policy's tokenizer is made for the built-in tasks, or for the conversations of policy.warm_start.files"
        )
    if warm_start.files and (is_built_in or not is_tiny):
        raise ConfigError(
            f"policy.warm_start.files must be empty unless policy=tiny and task=dataset or reasoning_gym, got {warm_start.files}: "
            "built-in tasks bring what is learned, and a policy of your own is not warm-started"
        )


def tiny_policy_has_whole_heads(config: Config) -> None:
    policy = config.policy
    if policy.path is None and (policy.num_heads < 2 or policy.num_heads % 2 or policy.hidden_size % policy.num_heads):
        raise ConfigError(
            f"policy.num_heads must be even and divide policy.hidden_size ({policy.hidden_size}), "
            f"got {policy.num_heads}"
        )


def adapters_can_be_served(config: Config) -> None:
    """Engines compute adapters of this rank; workers that recompute log-probs take whole weights."""
    rank = config.policy.lora.served_rank
    if not rank:
        return
    is_on_gpus = config.engine.backend is EngineBackend.vllm and engine_device(config.engine) is Device.cuda
    if is_on_gpus and config.policy.dtype is DType.float32:
        raise ConfigError(
            "policy.dtype must be bfloat16 with policy.lora.publish=adapter on GPUs, got float32: vLLM's kernels for adapters take 16 "
            "bits; set policy.dtype=bfloat16, or policy.lora.publish=merged"
        )
    if config.training.num_logp_workers:
        raise ConfigError(
            "policy.lora.publish must be merged with training.num_logp_workers > 0, got adapter: those workers load whole weights; set "
            "training.num_logp_workers=0 to have the policy workers recompute log-probs"
        )
    engine_arguments = config.engine.extra_args
    if not engine_arguments.get("enable_lora", True):
        raise ConfigError(
            "engine.extra_args.enable_lora must not be false with policy.lora.publish=adapter; leave it out, or set "
            "policy.lora.publish=merged"
        )
    largest = engine_arguments.get("max_lora_rank", rank)
    if largest < rank:
        raise ConfigError(
            f"engine.extra_args.max_lora_rank must be >= policy.lora.rank ({rank}) with policy.lora.publish=adapter, got {largest}; "
            "leave it out: engines make room for the rank"
        )


def policy_directory_is_complete(config: Config) -> None:
    """Model and tokenizer."""
    if config.policy.path is None:
        return
    path, found = Path(os.path.expanduser(config.policy.path)), f"policy.path={config.policy.path}"
    _check_model(path, found)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise PolicyError(f"{found} has no tokenizer (such as tokenizer.json); copy it beside its config.json")


def reference_directory_is_complete(config: Config) -> None:
    """The model; its tokens are the policy's."""
    if config.trainer.ref.path is not None:
        _check_model(Path(os.path.expanduser(config.trainer.ref.path)), f"trainer.ref.path={config.trainer.ref.path}")


def _check_model(path: Path, found: str) -> None:
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "does not exist"
        raise PolicyError(
            f"{found} {what}; give a local Hugging Face directory (a model of the hub has to be downloaded first)"
        )
    if not (path / "config.json").is_file():
        raise PolicyError(f"{found} has no config.json; give the directory of a Hugging Face model")
    weights = [file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern)]
    if not weights:
        raise PolicyError(f"{found} has no weights (*.safetensors or *.bin); copy them beside its config.json")
    for index in path.glob("*.index.json"):
        _check_shards(index, found)


def _check_shards(index: Path, found: str) -> None:
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise PolicyError(f"{found} has a broken {index.name}; copy the directory again") from error
    missing = sorted(name for name in shards if not (index.parent / name).is_file())
    if missing:
        raise PolicyError(
            f"{found} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}; copy them"
        )
