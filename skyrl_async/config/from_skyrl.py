"""Our command for a launch script of SkyRL's, for ``--from-skyrl script.sh``: the script is read, not run.

The printed bash script sets our keys, and SkyRL's defaults where ours differ; a comment names each key that has no counterpart. Single keys
are in ``coming_from.txt``; here is what several of SkyRL's keys mean together.
"""

import copy
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from skyrl_async.config.bash_words import Command, commands_of
from skyrl_async.config.coming_from import Foreign, find, foreign_keys, yaml_value
from skyrl_async.config.help import all_keys
from skyrl_async.config.load import built, load, merged, quoted, set_value
from skyrl_async.config.rules.notices import idle_settings
from skyrl_async.config.schema.fields import value_text
from skyrl_async.config.schema.groups import GROUPS
from skyrl_async.config.schema.trainer import Schedule
from skyrl_async.errors import ConfigError, SkyRLAsyncError, did_you_mean

_SYSTEM = "SkyRL"
_CHOICES = {"task": "dataset", "policy": "hf"}
_ARGUMENT = re.compile(r"[+~]*([A-Za-z_]\w*(?:\.[\w@/-]+)+)=(.*)", re.DOTALL)
_BARE = re.compile(r"[A-Za-z_./][\w./@+-]*")
_WORDS_OF_YAML = frozenset({"true", "false", "null", "none", "yes", "no", "on", "off", "nan", "inf"})
_OTHERS = {"verl": "verl", "areal": "AReaL"}


def _starting_point() -> DictConfig:
    return merged(*(GROUPS[group][option].values for group, option in _CHOICES.items()))


@dataclass(slots=True)
class Translation:
    """What became of the keys of a script; values are as yaml reads them."""

    tree: DictConfig = field(default_factory=_starting_point)
    """Our configuration with them."""
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Our key -> value, and what it is of."""
    defaults: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """The same of what the script leaves at a default that is not ours."""
    num_set: int = 0
    """How many of their keys are set."""
    needless: list[str] = field(default_factory=list)
    """A line for each of their keys that needs no setting here."""
    missing: list[str] = field(default_factory=list)
    """For each without a counterpart."""
    unresolved: list[str] = field(default_factory=list)
    """For each argument whose value only a run of the script would tell."""
    unknown: list[str] = field(default_factory=list)
    """For each that neither SkyRL nor we have."""

    def set(self, key: str, value: Any, about: str) -> bool:
        """Set one of our keys, unless it cannot hold the value."""
        known = all_keys().get(key)
        if known is not None and known.type_text.startswith("list of ") and not isinstance(value, list):
            value = [] if value is None else [value]
        try:
            set_value(self.tree, key, value)
        except ConfigError:
            return False
        self.settings[key] = (value, about)
        return True


def command_for(script: Path, environment: Mapping[str, str]) -> str:
    """The text of a bash script with our command. Raises ``ConfigError`` for a script that cannot be read or starts no training."""
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--from-skyrl {script} cannot be read: {reason}; give a launch script of SkyRL's") from error
    command = _training_command(script, commands_of(text, environment))
    return _written(script, translated(command))


def _training_command(script: Path, commands: list[Command]) -> Command:
    """The one command that runs Python with keys of a configuration."""
    found = []
    for command in commands:
        words = [word.text for word in command.words]
        runs_python = any(word == "-m" or word.endswith(".py") for word in words)
        if runs_python and any(_ARGUMENT.fullmatch(word) for word in words):
            found.append(command)
    if not found:
        raise ConfigError(
            f"--from-skyrl {script} holds no command that runs a Python module with key=value arguments; give the script that "
            "starts training, such as SkyRL's examples/train/fully_async/fully_async_run_gsm8k.sh"
        )
    if len(found) > 1:
        lines = ", ".join(str(command.line) for command in found)
        raise ConfigError(
            f"--from-skyrl {script} starts training {len(found)} times (lines {lines}); leave one in a copy"
        )
    packages = {word.text.partition(".")[0] for word in found[0].words}
    for package, name in _OTHERS.items():
        if package in packages:
            raise ConfigError(f"--from-skyrl {script} is a script of {name}'s, whose keys are in docs/coming_from.md")
    return found[0]


def translated(command: Command) -> Translation:
    """What becomes of each of the command's keys."""
    result = Translation()
    theirs: dict[str, str] = {}
    unresolved: set[str] = set()
    for word in command.words:
        found = _ARGUMENT.fullmatch(word.text)
        if word.unknown:  # without a key it may hold several
            result.unresolved.append(f"{word.text}: {'; '.join(word.unknown)}")
            unresolved |= {found[1]} if found else set()
        elif found:
            theirs[found[1]] = found[2]
    for key, value in theirs.items():
        _take(key, value, result, theirs)
    _take_schedule(command, theirs, result)
    _take_together(theirs, result)
    _take_defaults({*theirs, *unresolved}, result)
    return result


def _take(key: str, written: str, result: Translation, theirs: Mapping[str, str]) -> None:
    """Put one of their keys where it belongs."""
    row, shown = find(_SYSTEM, key), f"{key}={written}"
    if row is None and key in all_keys():
        row = Foreign(system=_SYSTEM, name=key, default="", ours=(key,), values={}, note="")
    if row is None:
        hint = did_you_mean(key, [*foreign_keys(_SYSTEM), *all_keys()], cutoff=0.85)
        result.unknown.append(shown + (hint or ": in neither SkyRL's keys nor ours"))
        return
    settings = list(_settings_of(row, written))
    if not settings:
        is_needless = row.value_of(_plain(written)) == "" or (not row.values and _is_the_policys(key, written, theirs))
        (result.needless if is_needless else result.missing).append(f"{shown}: {row.note}")
        return
    about = ": ".join(part for part in (key if row.ours != (key,) else "", row.note) if part)
    taken = [result.set(ours, value, about) for ours, value in settings]
    if all(taken):
        result.num_set += 1
    else:
        result.missing.append(f"{shown}: {row.answer}")


def _is_the_policys(key: str, written: str, theirs: Mapping[str, str]) -> bool:
    """Whether a key of the critic has the value of the policy's, which is the critic's here."""
    of_policy = key.replace("trainer.critic", "trainer.policy", 1)
    row = find(_SYSTEM, of_policy)
    if of_policy == key or row is None:
        return False
    return row.value_of(_plain(written)) == "" or _plain(theirs.get(of_policy, row.default)) == _plain(written)


def _settings_of(row: Foreign, written: str) -> Iterator[tuple[str, Any]]:
    """Our keys and values for one of theirs; none where nothing can or need be set."""
    meant = row.value_of(_plain(written))
    if meant == "":
        return
    if meant is not None and "=" in meant:
        for setting in meant.split():
            key, _, value = setting.partition("=")
            yield key, yaml.safe_load(value)
        return
    value = yaml_value(written if meant is None else meant)
    values = value if len(row.ours) > 1 and isinstance(value, list) else [value] * len(row.ours)
    yield from zip(row.ours, values, strict=False)


def _plain(written: str) -> str:
    """As the table writes values."""
    return value_text(yaml_value(written))


def _take_schedule(command: Command, theirs: Mapping[str, str], result: Translation) -> None:
    """Which trainer it is: the module says so, or else a key does."""
    words = [word.text for word in command.words]
    modules = [module for option, module in pairwise(words) if option == "-m"]
    scripts = [Path(word).name for word in words if word.endswith(".py")]  # a directory may have any name
    module = next((name for name in (modules or scripts)[:1] if "async" in name), "")
    if "fully_async" in module or yaml_value(theirs.get("trainer.fully_async.enabled", "false")):
        result.set("trainer.schedule", "fully_async", module or "trainer.fully_async.enabled")
        return
    schedule = "one_step_off" if module else "sync"
    result.set("trainer.schedule", schedule, module or "SkyRL's trainer without trainer.fully_async.enabled")
    for key in ("trainer.max_staleness_steps", "trainer.num_parallel_generation_workers"):
        if result.settings.pop(key, None):
            result.set(key, None, f"of fully_async, not of {schedule}")


def _take_together(theirs: Mapping[str, str], result: Translation) -> None:
    """What several of their keys mean together."""

    def value(key: str, default: Any) -> Any:
        found = yaml_value(theirs[key]) if key in theirs else default
        kinds = (int, float) if isinstance(default, float) else (object if default is None else type(default))
        return found if isinstance(found, kinds) else default

    placement, algorithm = "trainer.placement.policy_num_", "trainer.algorithm."
    if f"{placement}gpus_per_node" in theirs or f"{placement}nodes" in theirs:
        ranks = value(f"{placement}gpus_per_node", 1) * value(f"{placement}nodes", 1)
        result.set("training.num_workers", ranks, f"{placement}gpus_per_node times policy_num_nodes")
    if value(f"{algorithm}advantage_estimator", "grpo") == "gae":
        result.set(f"{algorithm}advantage_batch_normalize", True, "SkyRL's gae always normalises")
        if value("trainer.placement.colocate_all", False) and "placement.groups" in result.settings:
            result.set("placement.groups", [["policy", "generate", "critic"]], "trainer.placement.colocate_all")
        _take_critic_ranks(value, result)
    mini, key = value("trainer.policy_mini_batch_size", 256), "trainer.train_batch_size"
    is_equal = key not in theirs and result.tree.trainer.schedule == Schedule.fully_async
    if is_equal:
        result.set(key, None, "SkyRL's fully asynchronous trainer wants it equal to policy_mini_batch_size")
    batch = mini if is_equal else value(key, 1024)
    _take_steps(value("trainer.update_epochs_per_batch", 1) * max(1, batch // max(1, mini)), value, result)
    answer = value("generator.sampling_params.max_generate_length", 1024)
    if "generator.eval_sampling_params.max_generate_length" not in theirs:
        result.set("evaluation.sampling.max_tokens", answer, "as in training, SkyRL's default")
    micro, longest = "trainer.micro_train_batch_size_per_gpu", value("trainer.max_prompt_length", 512) + answer
    if value("trainer.max_tokens_per_microbatch", -1) <= 0:
        result.settings.pop("training.micro_batch_tokens", None)
        if micro in theirs:
            about = f"{micro} times the longest prompt plus answer, {longest}"
            result.set("training.micro_batch_tokens", value(micro, 1) * longest, about)
    batches = value(f"{algorithm}dynamic_sampling.max_sample_batches", 30)
    if batches > 0 and f"{algorithm}dynamic_sampling.max_sample_batches" in theirs:
        about = "in groups: times train_batch_size"
        result.set("trainer.fully_async.max_filtered_in_a_row", batches * batch, about)
    loss, key = value(f"{algorithm}policy_loss_type", "regular"), f"{algorithm}policy_loss_type"
    correction = f"{algorithm}off_policy_correction."
    weighs = value(f"{correction}tis_ratio_type", None) is not None or value(f"{algorithm}use_tis", False)
    if loss == "cispo":
        is_rollout = value(f"{algorithm}cispo.cispo_anchor", "old") == "rollout"
        result.set(key, "cispo" if is_rollout else "cispo_old", f"{key}, and cispo.cispo_anchor")
    elif loss in ("regular", "dual_clip") and weighs:
        result.set(key, "decoupled_ppo", f"{loss} with importance weights, around recomputed log-probs")
    elif loss == "rollout_is":
        about = "SkyRL's rollout_is drops tokens whose ratio is out of eps_clip_low and eps_clip_high"
        low, high = (value(f"{algorithm}eps_clip_{end}", 0.2) for end in ("low", "high"))
        result.set(f"{correction}token_mask_is_threshold_low", round(1 - low, 6), about)
        result.set(f"{correction}token_mask_is_threshold_high", round(1 + high, 6), about)
        result.set(f"{algorithm}tis_cap", round(1 + high, 6), "as that bound, so that it caps nothing")


def _take_critic_ranks(value: Callable[[str, Any], Any], result: Translation) -> None:
    """Keys that need nothing where there is no critic."""
    placement = "trainer.placement.critic_num_"
    given = [line for line in result.needless if line.startswith(placement)]
    if given:
        ranks = value(f"{placement}gpus_per_node", 1) * value(f"{placement}nodes", 1)
        result.set("training.num_critic_workers", ranks, f"{placement}gpus_per_node times critic_num_nodes")
        result.needless = [line for line in result.needless if line not in given]
        result.num_set += len(given)


def _take_steps(num_steps: int, value: Callable[[str, Any], Any], result: Translation) -> None:
    """Count in optimizer steps what SkyRL counts in batches, where a batch takes several."""
    if num_steps == 1:
        return
    about = f"times {num_steps}, the optimizer steps of a batch"
    keys = {
        "trainer.max_training_steps": ("trainer.num_steps", 0),
        "trainer.ckpt_interval": ("trainer.checkpoint_interval_steps", 10),
        "trainer.eval_interval": ("trainer.eval_interval_steps", 5),
    }
    for theirs, (ours, default) in keys.items():
        if (num_batches := value(theirs, default)) > 0:
            result.set(ours, num_batches * num_steps, f"{theirs} {about}")
    if result.tree.trainer.schedule == Schedule.fully_async:
        num_batches = value("trainer.fully_async.max_staleness_steps", 4)
        bound = (num_batches + 1) * num_steps - 1
        result.set("trainer.max_staleness_steps", bound, f"{num_batches} batches of {num_steps} optimizer steps")


def _take_defaults(given: set[str], result: Translation) -> None:
    """Set what the script leaves at a default that is not ours, and that something reads."""
    left = Translation(tree=result.tree)
    for name, row in foreign_keys(_SYSTEM).items():
        if name in given or not row.default:
            continue
        for key, value in _settings_of(row, row.default):
            before = copy.deepcopy(OmegaConf.select(result.tree, key))
            is_open = key not in result.settings and key not in left.settings
            if is_open and left.set(key, value, name) and OmegaConf.select(left.tree, key) == before:
                del left.settings[key]
    try:
        idle = idle_settings(built(result.tree))
    except SkyRLAsyncError:
        idle = []
    result.defaults = {
        key: setting
        for key, setting in left.settings.items()
        if not any(sentence.startswith(f"{key}=") for sentence in idle)
    }


def _written(script: Path, result: Translation) -> str:
    num_keys = result.num_set + sum(map(len, (result.needless, result.missing, result.unresolved, result.unknown)))
    lines = [
        f"# skyrl_async's command for {script.name}, which was read, not run.",
        f"# Of its {num_keys} keys {result.num_set} are set here, {len(result.needless)} need nothing, {len(result.missing)} have no "
        f"counterpart, {len(result.unresolved)} are known only when it runs, {len(result.unknown)} are unknown.",
        "settings=(",
        *(f"  {group}={option}" for group, option in _CHOICES.items()),
    ]
    lines += [_line(key, *setting) for key, setting in result.settings.items()]
    lines += ["  # SkyRL's defaults where ours differ:", *(_line(key, *each) for key, each in result.defaults.items())]
    lines += [")", 'uv run -m skyrl_async.main "${settings[@]}" "$@"']
    headings = {
        "Nothing to set:": result.needless,
        "No counterpart:": result.missing,
        "Known only when the script runs; add these:": result.unresolved,
        "Unknown:": result.unknown,
    }
    for heading, entries in headings.items():
        if entries:
            lines += ["", f"# {heading}", *(f"#   {' '.join(entry.split())}" for entry in entries)]
    try:
        load(result.tree)
    except SkyRLAsyncError as error:
        lines += ["", "# What this machine says of it:", f"#   {' '.join(str(error).split())}"]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, about: str) -> str:
    return f"  {shlex.quote(f'{key}={override_text(value)}')}" + (f"  # {about}" if about else "")


def override_text(value: Any) -> str:
    """A value in the grammar of overrides."""
    if isinstance(value, str):
        if _BARE.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
            return value
        return quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(override_text, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{override_text(below)}" for name, below in value.items()) + "}"
    return value_text(value)
