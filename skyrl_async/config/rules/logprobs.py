"""Rules about log-probs under other models than the engine's: who computes them, and whether anybody asks for them.

Flows in: a built ``Config``. Flows out: nothing, or ``ConfigError``.
"""

from skyrl_async.config.schema.algorithm import RefLogp
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import ConfigError
from skyrl_async.registries import POLICY_LOSSES


def logprob_workers_have_work(config: Config) -> None:
    """Workers of their own are for log-probs that the loss asks for."""
    algorithm, training = config.trainer.algorithm, config.training
    if training.num_ref_workers and not algorithm.uses_reference:
        raise ConfigError(
            "training.num_ref_workers must be 0 with trainer.algorithm.use_kl_loss=false and use_kl_in_reward=false, got "
            f"{training.num_ref_workers}: nothing asks for the reference's log-probs"
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
