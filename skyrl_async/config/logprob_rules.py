"""Rules about log-probs under other models than the engine's: who computes them, and whether anybody asks for them; and settings of
training that do nothing.

Flows in: a built ``Config``. Flows out: nothing, or ``ConfigError``; or a line for each setting that does nothing.
"""

from skyrl_async.config.algorithm import AlgorithmConfig, LossReduction, RefLogp
from skyrl_async.config.correction_rules import idle_corrections
from skyrl_async.config.devices import training_device
from skyrl_async.config.schema import Config, Device
from skyrl_async.errors import ConfigError
from skyrl_async.registries import POLICY_LOSSES


def logprob_workers_have_work(config: Config) -> None:
    """Workers of their own are for log-probs that the loss asks for."""
    algorithm, training = config.trainer.algorithm, config.training
    if training.num_ref_workers and not algorithm.uses_reference:
        raise ConfigError(
            f"training.num_ref_workers must be 0 with trainer.algorithm.use_kl_loss=false, got {training.num_ref_workers}: "
            "nothing asks for the reference's log-probs"
        )
    if training.num_ref_workers and algorithm.ref_logp is RefLogp.inline:
        raise ConfigError(
            f"training.num_ref_workers must be 0 with trainer.algorithm.ref_logp=inline, got {training.num_ref_workers}: inline is on "
            "the policy workers; set trainer.algorithm.ref_logp=stage"
        )
    if training.num_logp_workers and not POLICY_LOSSES.entry(algorithm.policy_loss_type).needs_old_logprobs:
        raise ConfigError(
            f"training.num_logp_workers must be 0 with trainer.algorithm.policy_loss_type={algorithm.policy_loss_type}, got "
            f"{training.num_logp_workers}: decoupled_ppo asks for recomputed log-probs, and cispo_old; it does not"
        )


def idle_settings(config: Config) -> list[str]:
    """What is set and does nothing, a sentence each."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    idle = []
    if not algorithm.grpo_norm_by_std and algorithm.advantage_estimator != "grpo":
        idle.append(
            f"trainer.algorithm.grpo_norm_by_std=false does nothing with advantage_estimator={algorithm.advantage_estimator}"
        )
    if algorithm.max_seq_len is not None and algorithm.loss_reduction is not LossReduction.seq_mean_token_sum_norm:
        idle.append(
            f"trainer.algorithm.max_seq_len={algorithm.max_seq_len} does nothing with loss_reduction={algorithm.loss_reduction.name}"
        )
    if not algorithm.uses_reference:
        set_anyway = {
            f"trainer.algorithm.kl_loss_coef={algorithm.kl_loss_coef:g}": algorithm.kl_loss_coef
            != AlgorithmConfig.kl_loss_coef,
            f"trainer.ref.path={trainer.ref.path}": trainer.ref.path is not None,
        }
        idle += [
            f"{key} does nothing with trainer.algorithm.use_kl_loss=false"
            for key, is_set in set_anyway.items()
            if is_set
        ]
    if config.training.cpu_offload and training_device(config.training) is Device.cpu:
        idle.append("training.cpu_offload=true does nothing where policy workers run on CPUs (training.device)")
    if not algorithm.use_entropy_loss and algorithm.entropy_loss_coef != AlgorithmConfig.entropy_loss_coef:
        idle.append(
            f"trainer.algorithm.entropy_loss_coef={algorithm.entropy_loss_coef:g} does nothing with "
            "trainer.algorithm.use_entropy_loss=false"
        )
    if algorithm.policy_loss_type == "decoupled_ppo" and trainer.max_staleness_steps == 0:
        idle.append(
            "trainer.algorithm.policy_loss_type=decoupled_ppo never clips with trainer.max_staleness_steps=0, where groups are "
            "recomputed under the weights that are trained: it is rollout_is then, which costs one forward less"
        )
    return idle + idle_corrections(algorithm)
