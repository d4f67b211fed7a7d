"""Log-probs under other models than the engine's: the workers that compute them, and the work of the stages that need them.

finished group ──> ref_logp ──> logp ──> the buffer            reference: workers of its own, or the policy's
                                 ^                             recomputed: workers of their own, or the policy's
         published versions ─────┘
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from skyrl_async.composition.algorithms import correction_settings, loss_constants
from skyrl_async.composition.time_sharing import on_leased_devices
from skyrl_async.config.rules.algorithm import needs_critic, needs_old_logprobs
from skyrl_async.config.rules.deepspeed import read_user_config
from skyrl_async.config.rules.devices import training_device
from skyrl_async.config.rules.notices import advice, idle_settings
from skyrl_async.config.schema.algorithm import RefLogp
from skyrl_async.config.schema.fields import from_section
from skyrl_async.config.schema.run import Config, WeightTransfer
from skyrl_async.config.schema.training import TrainingBackendName
from skyrl_async.errors import PolicyError
from skyrl_async.inference.policy_files import has_tokenizer, read_config, text_config
from skyrl_async.registries import POLICY_LOSSES
from skyrl_async.rollout.preparation import Prepare
from skyrl_async.runtime.device_leases import DeviceGroup
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.protocol import Critic, Policy
from skyrl_async.training.workers.logprob_workers import ColumnStageWork, LogprobWorkers
from skyrl_async.types import LogprobModel

logger = logging.getLogger(__name__)

_SAME_TOKENIZER = "it must have the policy's tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParts:
    """Separate workers for log-probs; None where the policy workers compute them, or none are needed."""

    ref: LogprobWorkers | None = None
    old: LogprobWorkers | None = None
    """Workers for the policy's log-probs; the publisher makes them load each version."""

    @property
    def num_restarts(self) -> int:
        """Number of times that dead workers were replaced."""
        return sum(workers.num_restarts for workers in (self.ref, self.old) if workers is not None)


def check_logprobs(config: Config, policy_dir: Path) -> None:
    """Warn of settings without effect or of doubtful use. Raises ``PolicyError`` when the reference or critic has other tokens."""
    for sentence in (*idle_settings(config), *advice(config)):
        logger.warning("%s", sentence)
    beside = {
        "trainer.ref.path": reference_path(config) if config.trainer.algorithm.uses_reference else None,
        "trainer.critic.model.path": critic_path(config) if needs_critic(config) else None,
    }
    for key, path in beside.items():
        if path is not None:
            check_same_tokens(key, Path(path), policy_dir, trust_remote_code=config.policy.trust_remote_code)


def check_same_tokens(
    key: str,
    path: Path,
    policy_dir: Path,
    *,
    trust_remote_code: bool,
    same_size: str | None = _SAME_TOKENIZER,
) -> None:
    """Raise ``PolicyError`` where a model has other tokens than the policy: by their number, and one by one where it has a tokenizer.

    Args:
        key: of the configuration, for messages.
        path: directory of the model.
        policy_dir: directory of the policy.
        trust_remote_code: passed to transformers.
        same_size: why both have as many tokens, unused ones included; None: they need not, if it has a tokenizer.
    """
    if path.samefile(policy_dir):
        return
    theirs, ours = (
        text_config(read_config(str(directory), key_of)).get("vocab_size")
        for directory, key_of in ((path, key), (policy_dir, "policy.path"))
    )
    other_size = f"{key}={path} has {theirs} tokens and the policy {ours}: {same_size or _SAME_TOKENIZER}"
    if not has_tokenizer(str(path)):
        if theirs != ours:
            raise PolicyError(other_size)
        logger.warning(
            "%s=%s has no tokenizer: it has as many tokens as the policy, and whether they are the same is not known",
            key,
            path,
        )
        return
    from transformers import AutoTokenizer

    load = partial(AutoTokenizer.from_pretrained, local_files_only=True, trust_remote_code=trust_remote_code)
    there, here = ({token: text for text, token in load(each).get_vocab().items()} for each in (path, policy_dir))
    if differing := [token for token in there.keys() | here.keys() if there.get(token) != here.get(token)]:
        token = min(differing)
        raise PolicyError(
            f"{key}={path} must have the policy's tokens: {token} is {there.get(token)!r} there and {here.get(token)!r} here"
        )
    if theirs != ours and same_size is not None:
        raise PolicyError(other_size)  # their tokenizers agree: one has more unused tokens
    if theirs != ours and (theirs or 0) <= max(here):
        raise PolicyError(f"{key}={path} has {theirs} tokens, and the policy's tokenizer more")


def reference_path(config: Config) -> str | None:
    """Return the directory of the reference; None: the policy that training begins with."""
    path = config.trainer.ref.path
    return None if path is None else str(Path(path).expanduser())


def critic_path(config: Config) -> Path | None:
    """Return the directory of the model that the critic begins with; None: the policy that training begins with."""
    path = config.trainer.critic.model.path
    return None if path is None else Path(path).expanduser()


def training_settings(config: Config, policy_path: Path, num_steps: int) -> TrainingSettings:
    """Return settings of the policy workers; ``num_steps`` are those of the whole run."""
    training, algorithm = config.training, config.trainer.algorithm
    distillation = algorithm.distillation
    deepspeed = training.deepspeed if training.backend is TrainingBackendName.deepspeed else None
    return from_section(
        TrainingSettings,
        *(training, config.policy),
        policy_path=str(policy_path),
        device=training_device(training).name,
        serve_dtype=config.policy.dtype.name,
        shares_weights=config.weight_sync.transfer is WeightTransfer.ipc,
        lora=config.policy.lora if config.policy.lora.is_on else None,
        deepspeed=deepspeed,
        deepspeed_json=read_user_config(deepspeed, max_grad_norm=training.max_grad_norm) if deepspeed else None,
        num_steps=num_steps,
        temperature=config.generator.sampling.temperature,
        returns_logprobs=config.trainer.samples.groups_with_text != 0,
        has_reference=algorithm.uses_reference and training.num_ref_workers == 0,
        reference_path=reference_path(config),
        policy_loss=POLICY_LOSSES.portable(algorithm.policy_loss_type),
        loss_constants=loss_constants(algorithm),
        correction=correction_settings(algorithm.off_policy_correction),
        kl_estimator=algorithm.kl_estimator.name if algorithm.use_kl_loss else None,
        kl_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        entropy_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        teacher_coef=distillation.coef if distillation.teachers and distillation.top_k is not None else 0.0,
        teacher_divergence=distillation.divergence.name,
        seed=config.trainer.seed,
        is_deterministic=config.trainer.deterministic,
    )


def forward_settings(config: Config, path: str) -> TrainingSettings:
    """Return settings of workers that compute log-probs like the policy workers, under the model at ``path``."""
    settings = training_settings(config, Path(path), num_steps=0)
    return replace(settings, trains=False, lora=None, deepspeed=None, shares_weights=False, has_reference=False)


def teacher_settings(config: Config, path: str) -> TrainingSettings:
    """Return settings of the workers of the teacher at ``path``."""
    return replace(forward_settings(config, path), num_top_tokens=config.trainer.algorithm.distillation.top_k or 0)


def critic_settings(config: Config, path: Path, num_steps: int) -> TrainingSettings:
    """Return settings of the critic's workers, which train like the policy's but for what its optimizer has of its own."""
    settings = training_settings(config, path, num_steps)
    own = {key: value for key, value in vars(config.trainer.critic.optimizer_config).items() if value is not None}
    return replace(
        settings,
        **own,
        is_critic=True,
        value_clip=config.trainer.algorithm.value_clip,
        lora=None,
        shares_weights=False,
        has_reference=False,
        returns_logprobs=False,
    )


def stage_works(
    config: Config,
    policy: Policy,
    parts: LogprobParts,
    device_groups: Mapping[str, DeviceGroup],
    teacher: Prepare | None = None,
    critic: Critic | None = None,
) -> dict[str, Prepare]:
    """Return the work of the stages between the reward and training on a finished group, as far as the run needs them.

    Args:
        config: checked.
        policy: computes where there are no separate workers; leases its devices itself.
        parts: the separate workers.
        device_groups: stage -> devices that it shares.
        teacher: the work of ``teacher_logp``; None: there is no teacher.
        critic: computes values; None: nothing asks for them.
    """

    def work_of(model: LogprobModel, member: str, workers: LogprobWorkers | None, *columns: str) -> Prepare:
        if workers is None:
            work = ColumnStageWork(lambda rows: policy.logprobs_of(rows, model), *columns)
            return on_leased_devices(work, "policy", device_groups)
        work = ColumnStageWork(workers.logprobs_of, *columns)
        return on_leased_devices(work, member, device_groups, workers.lease)

    algorithm = config.trainer.algorithm
    works = {}
    if algorithm.uses_reference and algorithm.ref_logp is RefLogp.stage:
        works["ref_logp"] = work_of(LogprobModel.REF, "ref", parts.ref, "ref_logprobs")
    if needs_old_logprobs(config):
        works["logp"] = work_of(LogprobModel.POLICY, "logp", parts.old, "old_logprobs", "old_version")
    if teacher is not None:
        works["teacher_logp"] = teacher
    if critic is not None:
        works["values"] = on_leased_devices(ColumnStageWork(critic.values_of, "values"), "critic", device_groups)
    return works
