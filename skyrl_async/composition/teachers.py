"""The teachers of on-policy distillation: what is checked before anything boots, and the stage that asks them.

finished group ──uid──> its teacher: workers of its own, or a server ──> log-probs of the group's tokens
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_async.composition.data import Prompts, declared_context
from skyrl_async.composition.time_sharing import on_leased_devices
from skyrl_async.config.rules.algorithm import is_url, local_teachers
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError, PolicyError, TrainingError
from skyrl_async.inference.policy_files import read_config, text_config
from skyrl_async.rollout.preparation import Prepare
from skyrl_async.runtime.device_leases import DeviceGroup
from skyrl_async.training.workers.logprob_workers import ColumnStageWork, LogprobWorkers
from skyrl_async.training.workers.served_teacher import ServedTeacher
from skyrl_async.types import Group, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "trainer.algorithm.distillation"
Teacher = LogprobWorkers | ServedTeacher


def check_teachers(config: Config, policy_dir: Path, prompts: Prompts) -> None:
    """Raise ``ConfigError`` for a prompt without a known teacher, and ``PolicyError`` for a directory with other tokens."""
    teachers = config.trainer.algorithm.distillation.teachers
    if not teachers:
        return
    for prompt in prompts.train:
        teacher_of(config, prompt)
    for name, place in local_teachers(config).items():
        _check_tokens(name, Path(place), policy_dir, config.trainer.algorithm.distillation.top_k)


def teacher_of(config: Config, prompt: Prompt) -> str:
    """Return the name of a prompt's teacher. Raises ``ConfigError`` where its row names none of them."""
    distillation = config.trainer.algorithm.distillation
    name = prompt.extras.get(distillation.teacher_key)
    if name is None and len(distillation.teachers) == 1:
        return next(iter(distillation.teachers))
    if name not in distillation.teachers:
        raise ConfigError(
            f"prompt {prompt.uid} must name one of {', '.join(distillation.teachers)} in its column {distillation.teacher_key!r} "
            f"({_KEY}.teacher_key), got {name!r}"
        )
    return str(name)


def _check_tokens(name: str, directory: Path, policy_dir: Path, top_k: int | None) -> None:
    from transformers import AutoTokenizer

    key = f"{_KEY}.teachers.{name}"
    if not directory.is_dir():
        raise PolicyError(
            f"{key} must be a local directory, or an address that begins with http:// or https://, got {directory}, which is no directory"
        )
    sizes = [
        text_config(read_config(str(path), key_of)).get("vocab_size")
        for path, key_of in ((directory, key), (policy_dir, "policy.path"))
    ]
    there, here = (AutoTokenizer.from_pretrained(path, local_files_only=True) for path in (directory, policy_dir))
    differing = first_difference(there, here)
    if differing is not None:
        token, theirs, ours = differing
        raise PolicyError(
            f"{key}={directory} must have the policy's tokens: {token} is {theirs!r} there and {ours!r} here"
        )
    if sizes[0] < max(here.get_vocab().values()) + 1:
        raise PolicyError(f"{key}={directory} has {sizes[0]} tokens, and the policy's tokenizer more")
    if top_k is not None and sizes[0] != sizes[1]:
        raise PolicyError(
            f"{key}={directory} has {sizes[0]} tokens and the policy {sizes[1]}: with {_KEY}.top_k={top_k} both must have as many, unused "
            "ones included; set top_k=null, or choose another teacher"
        )


def first_difference(
    there: "PreTrainedTokenizerBase", here: "PreTrainedTokenizerBase"
) -> tuple[int, str | None, str | None] | None:
    """The first token id that is not the same text in both; None if there is none."""
    theirs, ours = ({number: text for text, number in each.get_vocab().items()} for each in (there, here))
    differing = (number for number in sorted(ours.keys() | theirs.keys()) if ours.get(number) != theirs.get(number))
    number = next(differing, None)
    return None if number is None else (number, theirs.get(number), ours.get(number))


async def served_teachers(config: Config, policy_dir: Path, stack: AsyncExitStack) -> dict[str, Teacher]:
    """Connect to the servers among the teachers until ``stack`` ends. Raises ``ConfigError`` for one that cannot be used."""
    distillation, found = config.trainer.algorithm.distillation, dict[str, Teacher]()
    if not any(map(is_url, distillation.teachers.values())):
        return found
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy_dir, local_files_only=True)
    token_ids = sorted(tokenizer.get_vocab().values())
    for name, url in distillation.teachers.items():
        if is_url(url):
            teacher = ServedTeacher(name, url, api_key=distillation.api_key, timeout_s=distillation.timeout_s)
            stack.push_async_callback(teacher.close)
            await teacher.check(token_ids, tokenizer.decode)
            found[name] = teacher
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherStageWork:
    """The work of the stage ``teacher_logp``: asks each group's own teacher."""

    works: Mapping[str, Prepare]
    """By teacher."""
    names: Mapping[str, str]
    """Uid of a prompt -> its teacher."""
    contexts: Mapping[str, int]
    """Local teacher -> most tokens of prompt and answer that its files declare; a server says its own."""

    async def __call__(self, group: Group) -> Group:
        """Return the group with its teacher's log-probs. Raises ``TrainingError`` for a row that is too long for a local teacher."""
        name = self.names[group.uid]
        longest = max((row.num_tokens for row in group.trajectories if row.num_sampled_tokens), default=0)
        if longest > (context := self.contexts.get(name, longest)):
            raise TrainingError(
                f"{_KEY}.teachers.{name} has a context of {context} tokens (max_position_embeddings), and prompt {group.uid} with an "
                f"answer has {longest}: set engine.max_model_len={context}, or choose a teacher with a longer context"
            )
        return await self.works[name](group)


def teacher_work(
    config: Config, teachers: Mapping[str, Teacher], prompts: Sequence[Prompt], device_groups: Mapping[str, DeviceGroup]
) -> Prepare:
    """Return the work of the stage ``teacher_logp``; one lease serves all groups that wait, where local teachers share devices."""
    works = {name: ColumnStageWork(teacher.logprobs_of, "teacher_logprobs") for name, teacher in teachers.items()}
    names = {prompt.uid: teacher_of(config, prompt) for prompt in prompts}
    local = local_teachers(config).items()
    contexts = {name: declared_context(Path(place), f"{_KEY}.teachers.{name}") for name, place in local}
    work = TeacherStageWork(works=works, names=names, contexts=contexts)
    return on_leased_devices(work, "teacher", device_groups)
