"""The keys under ``trainer.algorithm``: advantages, the policy loss, its corrections, and the divergence from a reference."""

from dataclasses import dataclass
from enum import Enum

from skyrl_async.config.schema.corrections import OffPolicyCorrectionConfig
from skyrl_async.config.schema.fields import doc, require
from skyrl_async.config.schema.policy_losses import CispoConfig, ClipCovConfig, DppoConfig, KlCovConfig, SapoConfig


class LossReduction(Enum):
    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    seq_mean_token_mean = "sequence_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"
    prompt_mean = "prompt_mean"


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    abs = "abs"


class RefLogp(Enum):
    stage = "stage"
    inline = "inline"


class KlControl(Enum):
    fixed = "fixed"
    adaptive = "adaptive"


@dataclass
class KlCtrlConfig:
    type: KlControl = doc(
        KlControl.fixed, "adaptive moves the coefficient after each step, so that the divergence comes to kl_target."
    )
    kl_target: float = doc(0.1, "Mean divergence per token to come to, nats.")
    horizon: int = doc(
        10_000,
        "Samples, not steps, over which the coefficient moves by at most a fifth; the larger, the more slowly it follows. With "
        "type=adaptive at least those of a step: policy_mini_batch_size * n_samples_per_prompt.",
    )

    def __post_init__(self) -> None:
        require(self.kl_target > 0, "trainer.algorithm.kl_ctrl.kl_target", "> 0", self.kl_target)
        require(self.horizon >= 1, "trainer.algorithm.kl_ctrl.horizon", ">= 1", self.horizon)


@dataclass
class AlgorithmConfig:
    advantage_estimator: str = doc(
        "grpo",
        "Rewards to advantages. Within the group: grpo (centred, see grpo_norm_by_std), dr_grpo (centred), rloo (less the mean of the "
        "others: exact for groups of any size), maxrl (centred, over the mean; rewards of 0 and 1). Over the mini-batch: reinforce++ "
        "(normalised), reinforce++_baseline (centred within the group, then normalised). Or package.module:function, of the "
        "rewards of a group, in place of a name.",
    )
    reward_shaping: str | None = doc(
        None,
        "module:function that shapes rewards before advantages are computed: called with the samples of a group "
        "(skyrl_async.samples), it returns one number each. Metrics report the environment's reward.",
    )
    overlong_buffer_len: int = doc(
        0,
        "Soft overlong punishment (DAPO, equation 13): over the last so many tokens before generator.max_trajectory_tokens (with "
        "generator.max_turns=1 and null: generator.sampling.max_tokens) a penalty grows from 0 to overlong_buffer_penalty_factor. Not of "
        "agents, whose episodes no such limit cuts. 0: none.",
    )
    overlong_buffer_penalty_factor: float = doc(1.0, "The largest penalty, >= 0.")
    zero_variance_filter_tol: float = doc(
        1e-6, "Rewards of a group that differ by no more are equal to trainer.fully_async.sample_full_batch."
    )
    grpo_norm_by_std: bool = doc(True, "Divide the centred rewards of grpo by the group's standard deviation.")
    policy_loss_type: str = doc(
        "ppo_clip",
        "Anchored on the engine's log-probs: ppo_clip (also regular; clip_higher where the upper bound is to be the larger), "
        "dual_clip, gspo (one ratio per answer; goes with loss_reduction=sequence_mean and bounds of some 1e-4), dppo (bounds the "
        "change of probability, not its ratio), rollout_is (the token-level truncated importance weight), cispo (bounded on both "
        "sides), sapo (a soft gate; goes with loss_reduction=sequence_mean), clip_cov and kl_cov (ppo_clip without, and the plain ratio "
        "with a pull back on, the tokens that take most of the entropy away; chosen over the mini-batch). Anchored on the policy as it "
        "was when the group was finished, which is recomputed for it (training.num_logp_workers): decoupled_ppo, weighted by how far that "
        "was from the engine's log-probs, and cispo_old, not weighted. Or package.module:function in place of a name. Where "
        "generator.sampling.top_p, top_k or min_p leave tokens out the engine's log-probs are of those left: only rollout_is, cispo and "
        "losses of recomputed log-probs go with that.",
    )
    eps_clip_low: float = doc(
        0.2, "Lower clip range of ppo_clip, clip_higher, dual_clip, decoupled_ppo, gspo and clip_cov."
    )
    eps_clip_high: float = doc(0.28, "Upper clip range of the same.")
    clip_ratio_c: float = doc(3.0, "Largest ratio at which dual_clip still lowers a token, > 1.")
    tis_cap: float = doc(2.0, "Largest importance weight of rollout_is and decoupled_ppo.")
    cispo: CispoConfig = doc(CispoConfig, "Settings of policy_loss_type=cispo and cispo_old.")
    dppo: DppoConfig = doc(DppoConfig, "Settings of policy_loss_type=dppo.")
    sapo: SapoConfig = doc(SapoConfig, "Settings of policy_loss_type=sapo.")
    clip_cov: ClipCovConfig = doc(ClipCovConfig, "Settings of policy_loss_type=clip_cov.")
    kl_cov: KlCovConfig = doc(KlCovConfig, "Settings of policy_loss_type=kl_cov.")
    loss_reduction: LossReduction = doc(
        LossReduction.token_mean,
        "How the losses of a step's tokens become one: token_mean; sequence_mean (also seq_mean_token_mean), the mean over sequences of "
        "their means; seq_mean_token_sum, of their sums; seq_mean_token_sum_norm, of their sums over max_seq_len (Dr. GRPO's); "
        "prompt_mean, the mean over prompts of the means of their tokens. Sequences without a trained token do not count.",
    )
    max_seq_len: int | None = doc(
        None, "Constant that seq_mean_token_sum_norm divides by, such as generator.sampling.max_tokens."
    )
    off_policy_correction: OffPolicyCorrectionConfig = doc(
        OffPolicyCorrectionConfig, "Corrections of the policy loss for tokens that an older policy sampled."
    )
    use_kl_loss: bool = doc(
        False,
        "Add kl_loss_coef times the divergence from a frozen reference (trainer.ref.path) to the loss of every token.",
    )
    use_kl_in_reward: bool = doc(
        False,
        "Take kl_loss_coef times the divergence of an answer's tokens, from the engine's log-probs to the frozen reference's, from its "
        "reward before advantages are computed. In place of use_kl_loss. Not with generator.sampling.top_p, top_k or min_p: engines have "
        "log-probs of the tokens that these leave.",
    )
    kl_ctrl: KlCtrlConfig = doc(KlCtrlConfig, "How the coefficient changes with use_kl_in_reward.")
    kl_loss_coef: float = doc(
        0.001,
        "Coefficient of that divergence, >= 0; 0 only measures it (policy/ref_kl, policy/reward_kl). kl_ctrl.type=adaptive starts from it.",
    )
    kl_estimator_type: KlEstimator | None = doc(
        None,
        "Per token, r the reference's probability over the policy's: k1 is -log r, k2 is (log r)^2 / 2, k3 is r - 1 - log r (GRPO's), abs "
        "is |log r|; each token's estimate is cut at 10 nats of either sign, past which it has no gradient (that of k3 is at most 12.6). "
        "Null: k3 in the loss, k1 in the reward. In the loss k2 pulls as KL(policy, reference) does, k3 as KL(reference, policy), and k1 "
        "not at all in the mean. In the reward k1 alone pulls as a divergence, KL(policy, reference), does; k2, k3 and abs may push away "
        "from the reference.",
    )
    ref_logp: RefLogp = doc(
        RefLogp.stage,
        "When the reference's log-probs are computed: stage, as soon as a group is finished; inline, in the training step.",
    )

    use_entropy_loss: bool = doc(
        False, "Take entropy_loss_coef times the policy's entropy (policy/entropy) from the loss of every token."
    )
    entropy_loss_coef: float = doc(0.01, "Coefficient of that entropy, >= 0.")

    def __post_init__(self) -> None:
        not_negative = (
            "overlong_buffer_len",
            "overlong_buffer_penalty_factor",
            "zero_variance_filter_tol",
            "kl_loss_coef",
            "entropy_loss_coef",
        )
        for key in not_negative:
            require(getattr(self, key) >= 0, f"trainer.algorithm.{key}", ">= 0", getattr(self, key))
        require(
            not (self.use_kl_loss and self.use_kl_in_reward),
            "trainer.algorithm.use_kl_in_reward",
            "false with trainer.algorithm.use_kl_loss=true, which takes the same divergence into account",
            self.use_kl_in_reward,
        )
        if self.kl_ctrl.type is KlControl.adaptive:
            key, expected = "trainer.algorithm.kl_ctrl.type", "fixed without trainer.algorithm.use_kl_in_reward=true"
            require(self.use_kl_in_reward, key, expected, self.kl_ctrl.type.name)
            coef, expected = self.kl_loss_coef, "> 0 with trainer.algorithm.kl_ctrl.type=adaptive, which multiplies it"
            require(coef > 0, "trainer.algorithm.kl_loss_coef", expected, coef)
        require(0 <= self.eps_clip_low < 1, "trainer.algorithm.eps_clip_low", "in [0, 1)", self.eps_clip_low)
        require(self.eps_clip_high >= 0, "trainer.algorithm.eps_clip_high", ">= 0", self.eps_clip_high)
        require(self.tis_cap > 0, "trainer.algorithm.tis_cap", "> 0", self.tis_cap)
        require(self.clip_ratio_c > 1, "trainer.algorithm.clip_ratio_c", "> 1", self.clip_ratio_c)
        require(
            self.policy_loss_type != "clip_higher" or self.eps_clip_high > self.eps_clip_low,
            "trainer.algorithm.eps_clip_high",
            f"> trainer.algorithm.eps_clip_low ({self.eps_clip_low:g}) with policy_loss_type=clip_higher",
            self.eps_clip_high,
        )
        length, is_normed = self.max_seq_len, self.loss_reduction is LossReduction.seq_mean_token_sum_norm
        require(length is None or length >= 1, "trainer.algorithm.max_seq_len", ">= 1 or null", length)
        require(
            length is not None or not is_normed,
            "trainer.algorithm.max_seq_len",
            "set with trainer.algorithm.loss_reduction=seq_mean_token_sum_norm",
            length,
        )

    @property
    def uses_reference(self) -> bool:
        """Whether log-probs of the frozen reference are needed."""
        return self.use_kl_loss or self.use_kl_in_reward

    @property
    def kl_estimator(self) -> KlEstimator:
        """The estimator asked for, or by default the one whose mean gradient is a divergence's: k1 in the reward, k3 in the loss."""
        return self.kl_estimator_type or (KlEstimator.k1 if self.use_kl_in_reward else KlEstimator.k3)
