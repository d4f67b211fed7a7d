"""A cluster in a YAML file, in place of a run: what it has, and what its model takes.

Figures that nobody has measured come from data sheets or from what others have published; the examples name theirs.
"""

import math
import random
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from skyrl_async.config.load import changed
from skyrl_async.config.schema.fields import bounded, check_bounds
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.trainer import StalenessPolicy
from skyrl_async.errors import ConfigError, did_you_mean
from skyrl_async.plan.memory import Memory, check_devices
from skyrl_async.plan.model import Model
from skyrl_async.simulator.models import KnownGroup, Turn

_NUM_GROUPS = 512
"""Groups whose lengths are drawn."""
_NAMES = {
    "engine.num_engines": "num_engines",
    "engine.tensor_parallel_size": "tensor_parallel_size",
    "training.num_workers": "num_workers",
    "placement.groups": "shares_devices",
}
"""Key of the configuration -> that of a description."""
_finite = partial(bounded, lt=math.inf)


@dataclass
class Lengths:
    mean_tokens: float = _finite(4000.0, ge=1)
    """Tokens of a sample's replies, all turns together, before the longest are cut."""
    sigma: float = bounded(0.8, ge=0, le=5)
    """Standard deviation of their logarithm: 0.5 is a short tail, 1.2 a long one."""
    max_tokens: int = bounded(32_000, ge=1)
    """Where they are cut."""
    prompt_tokens: float = _finite(500.0, ge=0)
    """Tokens of a prompt."""
    turns: int = bounded(1, ge=1)
    """Replies per sample, each a part of its tokens."""
    environment_seconds: float = _finite(0.0, ge=0)
    """After each reply: tools, tests, judges."""


@dataclass
class EngineDescription:
    tokens_per_second: float = _finite(60.0, gt=0)
    """Speed of a request alone in an engine."""
    half_speed_requests: float = _finite(100.0, gt=0)
    """Requests in an engine at which each runs at half of that."""
    max_num_seqs: int = bounded(256, ge=1)
    """Most requests that run in an engine at a time."""
    prefill_seconds: float = _finite(0.0, ge=0)
    """By which a request holds up its engine when it begins, or continues after an update."""
    kv_bytes_per_token: float = _finite(0.0, ge=0)
    """Size of the KV cache, which bounds how many requests run: 2 x layers x key-value heads x their width x 2 bytes. Needs
    ``parameters``. 0: unknown."""


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
    """Parameters of the model; 0 checks no memory."""
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
        if read and not isinstance(read, DictConfig):
            raise ConfigError(f"{path} describes no cluster: it must have keys, such as num_engines: 4, not a list")
        for section in (one for one in fields(Description) if is_dataclass(one.type) and one.name in read):
            if not isinstance(value := read[section.name], DictConfig):
                raise ConfigError(f"{path} describes no cluster: {section.name} must have keys, got {value!r}")
        found: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Description), read))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} describes no cluster: {_reason(error)}") from error
    except RecursionError:
        raise ConfigError(f"{path} describes no cluster: an alias is part of what it stands for") from None
    if not read:
        raise ConfigError(f"{path} describes no cluster: it is empty")
    check_bounds(found)
    lengths = found.lengths
    if lengths.mean_tokens > lengths.max_tokens:
        raise ConfigError(
            f"lengths.mean_tokens must be <= lengths.max_tokens ({lengths.max_tokens}), got {lengths.mean_tokens:g}"
        )
    if lengths.turns > lengths.mean_tokens:
        raise ConfigError(
            f"lengths.turns must be <= lengths.mean_tokens ({lengths.mean_tokens:g}), got {lengths.turns}: a reply has at least a token"
        )
    if found.engine.kv_bytes_per_token and not found.parameters:
        raise ConfigError(
            f"parameters must be > 0 with engine.kv_bytes_per_token={found.engine.kv_bytes_per_token:g}, got 0: the KV cache has what "
            "the weights leave of a device"
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
        stages={},
        memory=Memory(
            parameters=found.parameters,
            device_gb=found.device_gb,
            kv_bytes_per_token=found.engine.kv_bytes_per_token,
            prompt_tokens=lengths.prompt_tokens,
            longest_tokens=lengths.max_tokens,
        ),
    )
    try:
        check_devices(model.memory, config)
    except ConfigError as error:
        text = str(error)
        for key, name in _NAMES.items():
            text = text.replace(key, name)
        raise ConfigError(text) from error
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
    if name in known:
        return f"{key}: {text}"
    names = ", ".join(one.name for one in fields(Description))
    return f"{key} is no key of a description{did_you_mean(name, known) or f'; there are {names}'}"


def _drawn(lengths: Lengths, group_size: int) -> tuple[KnownGroup, ...]:
    """Groups of lognormal lengths."""
    rng = random.Random(0)
    location = math.log(lengths.mean_tokens) - lengths.sigma**2 / 2

    def sample() -> tuple[Turn, ...]:
        tokens = min(rng.lognormvariate(location, lengths.sigma), lengths.max_tokens)
        turn = (max(1, round(tokens / lengths.turns)), lengths.environment_seconds)
        return (turn,) * lengths.turns

    return tuple(KnownGroup(samples=tuple(sample() for _ in range(group_size))) for _ in range(_NUM_GROUPS))
