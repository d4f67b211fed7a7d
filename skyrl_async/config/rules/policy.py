"""Rules about the models of a run: whether their directories are complete, judged by file names, and what they go with."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from skyrl_async.config.rules.algorithm import local_teachers
from skyrl_async.config.rules.devices import engine_device
from skyrl_async.config.schema.engine import EngineBackend
from skyrl_async.config.schema.fields import Device, DType
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.task import BUILT_IN_TASKS
from skyrl_async.errors import PolicyError

_DIRECTORY = "a local Hugging Face directory (a model of the hub has to be downloaded first)"
_OR_ADDRESS = ", or an address that begins with http:// or https://"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def tiny_policy_rules(config: Config) -> Iterator[str]:
    """The tiny policy has something to learn from, and whole heads; no other policy is warm-started."""
    policy, task, files = config.policy, config.task.name, config.policy.warm_start.files
    is_tiny, is_built_in = policy.path is None, task in BUILT_IN_TASKS
    if is_tiny and not is_built_in and not files:
        yield (
            f"policy.path must be a Hugging Face directory when task.name={task}, got null: "
            "the tiny policy's tokenizer is made for the built-in tasks, or for the conversations of policy.warm_start.files"
        )
    if files and (is_built_in or not is_tiny):
        yield (
            f"policy.warm_start.files must be empty unless policy=tiny and task=dataset, harbor or reasoning_gym, got {files}: "
            "built-in tasks bring what is learned, and a policy of your own is not warm-started"
        )
    width, heads = policy.hidden_size, policy.num_heads
    if is_tiny and (heads % 2 or width % (2 * heads)):
        yield f"policy.num_heads must be even and divide half of policy.hidden_size ({width}), got {heads}"


def adapter_rules(config: Config) -> Iterator[str]:
    """Engines compute adapters of this rank; workers that recompute log-probs take whole weights."""
    rank, setting = config.policy.lora.served_rank, "policy.lora.publish=adapter"
    if not rank:
        return
    is_on_gpus = config.engine.backend is EngineBackend.vllm and engine_device(config.engine) is Device.cuda
    if is_on_gpus and config.policy.dtype is DType.float32:
        yield (
            f"policy.dtype must be bfloat16 with {setting} on GPUs, got float32: vLLM's kernels for adapters take 16 "
            "bits; set policy.dtype=bfloat16, or policy.lora.publish=merged"
        )
    if config.training.num_logp_workers:
        yield (
            "policy.lora.publish must be merged with training.num_logp_workers > 0, got adapter: those workers load whole weights; set "
            "training.num_logp_workers=0 to have the policy workers recompute log-probs"
        )
    arguments = config.engine.extra_args
    if not arguments.get("enable_lora", True):
        yield (
            f"engine.extra_args.enable_lora must not be false with {setting}; leave it out, or set policy.lora.publish=merged"
        )
    if (largest := arguments.get("max_lora_rank", rank)) < rank:
        yield (
            f"engine.extra_args.max_lora_rank must be >= policy.lora.rank ({rank}) with {setting}, got {largest}; "
            "leave it out: engines make room for the rank"
        )


def check_directories(config: Config) -> None:
    """Raise ``PolicyError`` where the directory of the policy is incomplete, or that of a model that has its tokens."""
    teachers = {f"trainer.algorithm.distillation.teachers.{name}": at for name, at in local_teachers(config).items()}
    names = {
        "policy.path": config.policy.path,
        "trainer.ref.path": config.trainer.ref.path,
        "trainer.critic.model.path": config.trainer.critic.model.path,
    }
    for key, name in (names | teachers).items():
        if name is None:
            continue
        path, found = Path(os.path.expanduser(name)), f"{key}={name}"
        _check_model(path, found, _DIRECTORY + (_OR_ADDRESS if key in teachers else ""))
        if key == "policy.path" and not any((path / file).is_file() for file in _TOKENIZER_FILES):
            raise PolicyError(f"{found} has no tokenizer (such as tokenizer.json); copy it beside its config.json")


def _check_model(path: Path, found: str, needed: str) -> None:
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "does not exist"
        raise PolicyError(f"{found} {what}; give {needed}")
    if not (path / "config.json").is_file():
        raise PolicyError(f"{found} has no config.json; give the directory of a Hugging Face model")
    if not any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
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
