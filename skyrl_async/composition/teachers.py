"""The teachers of on-policy distillation: what is checked before anything boots, and the stage that asks them.

finished group ──uid──> its teacher: workers of its own, or a server ──> log-probs of the group's tokens
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from skyrl_async.composition.data import Prompts, declared_context
from skyrl_async.composition.logprobs import check_same_tokens
from skyrl_async.composition.time_sharing import on_leased_devices
from skyrl_async.config.rules.algorithm import is_url, local_teachers
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError, TrainingError
from skyrl_async.rollout.preparation import Prepare
from skyrl_async.runtime.device_leases import DeviceGroup
from skyrl_async.training.workers.logprob_workers import ColumnStageWork, LogprobWorkers
from skyrl_async.training.workers.served_teacher import ServedTeacher
from skyrl_async.types import Group, Prompt

_KEY = "trainer.algorithm.distillation"
Teacher = LogprobWorkers | ServedTeacher


def check_teachers(config: Config, policy_dir: Path, prompts: Prompts) -> None:
    """Raise ``ConfigError`` for a prompt without a known teacher, and ``PolicyError`` for a directory with other tokens."""
    teachers = config.trainer.algorithm.distillation.teachers
    if not teachers:
        return
    for prompt in prompts.train:
        teacher_of(config, prompt)
    top_k = config.trainer.algorithm.distillation.top_k
    same_size = f"with {_KEY}.top_k={top_k} both must have as many, unused ones included; set top_k=null, or choose another teacher"
    for name, place in local_teachers(config).items():
        check_same_tokens(
            f"{_KEY}.teachers.{name}",
            Path(place),
            policy_dir,
            trust_remote_code=config.policy.trust_remote_code,
            same_size=None if top_k is None else same_size,
        )


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


async def served_teachers(config: Config, policy_dir: Path, stack: AsyncExitStack) -> dict[str, Teacher]:
    """Connect to the servers among the teachers until ``stack`` ends. Raises ``ConfigError`` for one that cannot be used."""
    distillation, found = config.trainer.algorithm.distillation, dict[str, Teacher]()
    if not any(map(is_url, distillation.teachers.values())):
        return found
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        policy_dir, local_files_only=True, trust_remote_code=config.policy.trust_remote_code
    )
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
