"""A cluster in a YAML file, in place of a run: what it has, and what its model takes.

Figures that nobody has measured come from data sheets or from what others have published; the examples name theirs.
"""

import math
import random
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from skyrl_async.config.load import changed
from skyrl_async.config.rules.placement import sharing_stages
from skyrl_async.config.schema.fields import bounded, check_bounds
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.trainer import StalenessPolicy
from skyrl_async.errors import ConfigError, did_you_mean
from skyrl_async.plan.model import Model
from skyrl_async.simulator.models import KnownGroup, Turn

_NUM_GROUPS = 512
"""Groups whose lengths are drawn."""
_TRAINING_BYTES = 16
"""Per parameter: weights and gradients in bfloat16, Adam's state and a copy of the weights in float32 (ZeRO, arXiv 1910.02054, 3.1)."""
_ENGINE_BYTES = 2
_ENGINE_MEMORY_SHARE = 0.9
"""vLLM's ``gpu_memory_utilization``."""
_finite = partial(bounded, lt=math.inf)


@dataclass
class Lengths:
    mean_tokens: float = _finite(4000.0, ge=1)
    """Of a sample's replies, all turns together."""
    sigma: float = _finite(0.8, ge=0)
    """Of their logarithm: 0.5 is a short tail, 1.2 a long one."""
    max_tokens: int = bounded(32_000, ge=1)
    """Where they are cut."""
    prompt_tokens: float = _finite(500.0, ge=0)
    """Of a prompt."""
    turns: int = bounded(1, ge=1)
    """Replies per sample, each a part of its tokens."""
    environment_seconds: float = _finite(0.0, ge=0)
    """After each reply: tools, tests, judges."""


@dataclass
class EngineDescription:
    tokens_per_second: float = _finite(60.0, gt=0)
    """Of a request alone in an engine."""
    half_speed_requests: float = _finite(100.0, gt=0)
    """Requests in an engine at which each runs at half of that."""
    max_num_seqs: int = bounded(256, ge=1)
    """Most requests that run in an engine at a time."""
    prefill_seconds: float = _finite(0.0, ge=0)
    """By which a request holds up its engine when it begins, or continues after an update."""


@dataclass
class TrainingDescription:
    tokens_per_second: float = _finite(10_000.0, gt=0)
    """Forward and backward, of one device."""
    step_seconds: float = _finite(1.0, ge=0)
    """The optimizer step."""


@dataclass
class PublishDescription:
    gather_seconds: float = _finite(0.0, ge=0)
    """A copy of the weights, for which training waits."""
    send_seconds: float = _finite(1.0, ge=0)
    """To the engines, beside training."""
    pause_seconds: float = _finite(0.5, ge=0)
    """For which engines stand still."""


@dataclass
class Description:
    num_engines: int = bounded(4, ge=1)
    tensor_parallel_size: int = bounded(1, ge=1)
    """Devices of an engine."""
    num_workers: int = bounded(4, ge=1)
    """Devices that train."""
    shares_devices: bool = False
    """Engines and training are on the same devices, one at a time (``placement.groups=[[policy,generate]]``)."""
    max_staleness_steps: int = bounded(4, ge=0)
    staleness_policy: StalenessPolicy = StalenessPolicy.wait
    policy_mini_batch_size: int = bounded(64, ge=1)
    n_samples_per_prompt: int = bounded(8, ge=1)
    parameters: float = _finite(0.0, ge=0)
    """Of the model; 0 checks no memory."""
    device_gb: float = _finite(80.0, gt=0)
    """Memory of a device."""
    lengths: Lengths = field(default_factory=Lengths)
    engine: EngineDescription = field(default_factory=EngineDescription)
    training: TrainingDescription = field(default_factory=TrainingDescription)
    publish: PublishDescription = field(default_factory=PublishDescription)


def described(path: Path) -> Model:
    """The model of a cluster. Raises ``ConfigError`` for a file that is no description, or a cluster that cannot hold its model."""
    try:
        read = OmegaConf.load(path)
        found: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Description), read))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} describes no cluster: {_reason(error)}") from error
    if not read:
        raise ConfigError(f"{path} describes no cluster: it is empty")
    check_bounds(found)
    lengths = found.lengths
    if lengths.mean_tokens > lengths.max_tokens:
        raise ConfigError(
            f"lengths.mean_tokens must be <= lengths.max_tokens ({lengths.max_tokens}), got {lengths.mean_tokens:g}"
        )
    config = changed(
        Config(),
        {
            "engine.num_engines": found.num_engines,
            "engine.tensor_parallel_size": found.tensor_parallel_size,
            "engine.max_num_seqs": found.engine.max_num_seqs,
            "training.num_workers": found.num_workers,
            "trainer.max_staleness_steps": found.max_staleness_steps,
            "trainer.staleness_policy": found.staleness_policy,
            "trainer.policy_mini_batch_size": found.policy_mini_batch_size,
            "generator.n_samples_per_prompt": found.n_samples_per_prompt,
            **(
                {"placement.groups": [["policy", "generate"]], "placement.ratios": [1.0]}
                if found.shares_devices
                else {}
            ),
        },
    )
    model = Model(
        config=config,
        groups=_drawn(found.lengths, found.n_samples_per_prompt),
        token_seconds=1 / found.engine.tokens_per_second,
        token_seconds_per_request=1 / found.engine.tokens_per_second / found.engine.half_speed_requests,
        prefill_seconds=found.engine.prefill_seconds,
        gradient_seconds=1 / found.training.tokens_per_second / found.num_workers,
        unsampled_tokens=found.lengths.prompt_tokens,
        step_seconds=found.training.step_seconds,
        gather_seconds=found.publish.gather_seconds,
        send_seconds=found.publish.send_seconds,
        pause_seconds=found.publish.pause_seconds,
        parameters=found.parameters,
        device_gb=found.device_gb,
        stages={},
    )
    check_memory(model, config)
    return model


def _reason(error: Exception) -> str:
    """What is wrong with a file, and where."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    key, text = getattr(error, "full_key", None), str(error).splitlines()[0]
    if not key:
        return text
    sections = (Description, Lengths, EngineDescription, TrainingDescription, PublishDescription)
    known, name = {one.name for section in sections for one in fields(section)}, str(key).rpartition(".")[2]
    return f"{key}: {text}{'' if name in known else did_you_mean(name, known)}"


def check_memory(model: Model, config: Config) -> None:
    """Raise ``ConfigError`` if the devices of ``config`` cannot hold the model; nothing is known of a run's."""
    engine, training = config.engine.tensor_parallel_size, config.training.num_workers
    if sharing_stages(config):
        needed = model.parameters * (_TRAINING_BYTES / training + _ENGINE_BYTES / engine) / 1e9
        if engine > 1 or config.engine.num_engines != training or needed > model.device_gb:
            raise ConfigError(
                "shares_devices must be false, or num_engines = num_workers, tensor_parallel_size = 1 and room for both on each device, "
                f"got {config.engine.num_engines}, {training}, {engine}, and {needed:.0f} GB on a device of {model.device_gb:.0f} GB"
            )
    if not model.parameters:
        return
    for what, num_bytes, share, key, number in (
        ("the weights in an engine", _ENGINE_BYTES, _ENGINE_MEMORY_SHARE, "tensor_parallel_size", engine),
        ("weights, gradients and Adam's state", _TRAINING_BYTES, 1.0, "num_workers", training),
    ):
        needed, most = model.parameters * num_bytes / 1e9, share * model.device_gb
        if needed > most * number:
            raise ConfigError(
                f"{key} must be >= {-(-needed // most):.0f}, got {number}: {what} take {needed:.0f} GB, "
                f"and a device has {most:.3g} GB for them"
            )


def _drawn(lengths: Lengths, group_size: int) -> tuple[KnownGroup, ...]:
    """Groups of lognormal lengths."""
    rng = random.Random(0)
    location = math.log(lengths.mean_tokens) - lengths.sigma**2 / 2

    def sample() -> tuple[Turn, ...]:
        tokens = min(rng.lognormvariate(location, lengths.sigma), lengths.max_tokens)
        turn = (max(1, round(tokens / lengths.turns)), lengths.environment_seconds)
        return (turn,) * lengths.turns

    return tuple(KnownGroup(samples=tuple(sample() for _ in range(group_size))) for _ in range(_NUM_GROUPS))
