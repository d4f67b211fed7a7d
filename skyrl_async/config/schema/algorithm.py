"""The keys under ``trainer.algorithm``: advantages, the policy loss, its corrections, and the divergence from a reference."""

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from skyrl_async.config.schema.fields import bounded, require

_OF_ITS_OWN = "a token that its own sampler would sample as often has a ratio of 1, and must not be masked"


class LossReduction(Enum):
    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    seq_mean_token_mean = "sequence_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"
    prompt_mean = "prompt_mean"


KlEstimator = StrEnum("KlEstimator", ["k1", "k2", "k3", "abs"])
RefLogp = StrEnum("RefLogp", ["stage", "inline"])
KlControl = StrEnum("KlControl", ["fixed", "adaptive"])
TisRatioType = StrEnum("TisRatioType", ["token", "sequence"])
SequenceMaskMetric = StrEnum("SequenceMaskMetric", ["product", "geometric"])


@dataclass
class KlCtrlConfig:
    type: KlControl = KlControl.fixed
    """adaptive moves the coefficient after each step, so that the divergence comes to kl_target."""
    kl_target: float = bounded(0.1, gt=0)
    """Mean divergence per token to come to, nats."""
    horizon: int = bounded(10_000, ge=1)
    """Samples, not steps, over which the coefficient moves by at most a fifth; the larger, the more slowly it follows. With type=adaptive
    at least those of a batch: train_batch_size (or policy_mini_batch_size) * n_samples_per_prompt.
    """


@dataclass
class OffPolicyCorrectionConfig:
    tis_ratio_type: TisRatioType | None = None
    """Weigh the loss by the importance ratio pi / mu of each token, or of its whole row (product over its tokens), cut from above; mu is
    the engine's. With policy_loss_type=rollout_is pi is the policy, with decoupled_ppo the recomputed one; the weight takes the place of
    theirs and of tis_cap.
    """
    token_tis_ratio_clip_high: float = bounded(2.0, gt=0)
    """Largest weight with tis_ratio_type=token; inf does not cut."""
    sequence_tis_ratio_clip_high: float = bounded(5.0, gt=0)
    """Largest weight with tis_ratio_type=sequence; inf does not cut."""
    sequence_mask_metric: SequenceMaskMetric | None = None
    """Mask rows whose ratio pi / mu is out of bounds: its product over the tokens, or its geometric mean. Masked tokens add nothing to the
    policy loss, and count in the mean over tokens.
    """
    geo_mask_high: float = bounded(1.01, gt=1, reason=_OF_ITS_OWN)
    """Upper bound with sequence_mask_metric=geometric."""
    geo_mask_low: float = bounded(0.99, ge=0, lt=1, reason=_OF_ITS_OWN)
    """Lower bound with sequence_mask_metric=geometric."""
    product_mask_high: float = bounded(2.0, gt=1, reason=_OF_ITS_OWN)
    """Upper bound with sequence_mask_metric=product. With tis_ratio_type=sequence and product_mask_low=0 it is the C of sequence-level
    masked importance sampling (MIS).
    """
    product_mask_low: float = bounded(0.5, ge=0, lt=1, reason=_OF_ITS_OWN)
    """Lower bound with sequence_mask_metric=product."""
    outlier_token_is_threshold_low: float | None = bounded(None, ge=0, lt=1, reason=_OF_ITS_OWN)
    """Mask rows with a token whose ratio pi / mu is below this, such as 1e-4; null: none."""
    outlier_token_is_threshold_high: float | None = bounded(None, gt=1, reason=_OF_ITS_OWN)
    """Mask rows with a token whose ratio pi / mu is above this, such as 100; null: none."""
    token_mask_is_threshold_low: float | None = bounded(None, ge=0, lt=1, reason=_OF_ITS_OWN)
    """Mask tokens whose ratio pi / mu is below this; null: none. IcePop is tis_ratio_type=token with token_tis_ratio_clip_high=inf and
    thresholds of 0.5 and 5; token-level MIS has the upper one alone.
    """
    token_mask_is_threshold_high: float | None = bounded(None, gt=1, reason=_OF_ITS_OWN)
    """Mask tokens whose ratio pi / mu is above this; null: none."""
    opsm_delta: float | None = bounded(None, gt=0)
    """Off-policy sequence masking (DeepSeek-V3.2): mask tokens of negative advantage in rows whose mean of log(mu / pi) is above this, in
    nats; pi is the policy. Null: none.
    """
    m2_threshold: float | None = bounded(None, gt=0)
    """M2PO: mask the tokens of largest squared log-ratio until their mean in the row is at most this, such as 0.04, among those that the
    loss would push further off; pi is the policy. The paper's mean is over the batch; held in each row the bound masks more, above all of a
    single row that has drifted for long. In place of clipping: with policy_loss_type=rollout_is. Null: none.
    """


@dataclass
class CispoConfig:
    cispo_eps_clip_low: float = bounded(1.0, ge=0, le=1)
    """Weights are at least 1 less this; 1 is no lower bound, as in its paper; 0 raises every weight to at least 1."""
    cispo_eps_clip_high: float = bounded(4.0, ge=0)
    """Weights are at most 1 plus this."""


Divergence = StrEnum("Divergence", ["reverse_kl", "forward_kl"])
DppoType = StrEnum("DppoType", ["binary_tv", "binary_kl"])


@dataclass
class DppoConfig:
    dppo_type: DppoType = DppoType.binary_tv
    """How far a token's probability has changed: binary_tv by its difference, binary_kl by the divergence of 'this token or any other' in
    nats, for which bounds of some 0.05 do.
    """
    delta_low: float = 0.2
    """Fall of a token's probability past which a negative advantage lowers it no further."""
    delta_high: float = 0.2
    """Rise of a token's probability past which a positive advantage raises it no further."""

    def __post_init__(self) -> None:
        most = 1.0 if self.dppo_type is DppoType.binary_tv else math.inf
        expected = "in [0, 1] with dppo_type=binary_tv" if most == 1.0 else ">= 0"
        for key in ("delta_low", "delta_high"):
            value = getattr(self, key)
            require(0 <= value <= most, f"trainer.algorithm.dppo.{key}", expected, value)


@dataclass
class SapoConfig:
    tau_pos: float = bounded(1.0, gt=0)
    """How fast a positive advantage loses its force away from ratio 1."""
    tau_neg: float = bounded(1.05, gt=0)
    """The same of other advantages."""


@dataclass
class ClipCovConfig:
    clip_ratio: float = bounded(0.0002, gt=0, le=1)
    """Share of a mini-batch's tokens that are left out, one at least, drawn from those between the bounds."""
    clip_cov_lb: float = 1.0
    """Lower bound of a token's covariance of log-prob and advantage."""
    clip_cov_ub: float = 5.0
    """Upper bound of it."""

    def __post_init__(self) -> None:
        low, high = self.clip_cov_lb, self.clip_cov_ub
        require(low < high, "trainer.algorithm.clip_cov.clip_cov_ub", f"> clip_cov_lb ({low:g})", high)


@dataclass
class KlCovConfig:
    kl_cov_frac: float = bounded(0.002, gt=0, le=1)
    """Share of a mini-batch's tokens, one at least, that are held back: those of largest covariance (the paper's is 0.0002 to 0.002,
    SkyRL's default 0.2).
    """
    ppo_kl_coef: float = bounded(1.0, ge=0, lt=math.inf)
    """How strongly they are held to the engine's log-probs, >= 0."""


@dataclass
class GigpoConfig:
    step_advantage_w: float = bounded(1.0, ge=0, lt=math.inf)
    """Weight of the comparison of turns that were shown the same, beside that of whole samples."""


@dataclass
class TurnCreditConfig:
    decay: float = bounded(0.9, ge=0, le=1)
    """Share of a turn's credit for a later reward that the turn before it gets."""
    weight: float = bounded(1.0, ge=0, lt=math.inf)
    """How much credit moves between the turns of a sample; 0: none, as rloo."""


@dataclass
class RunningMeanConfig:
    decay: float = bounded(0.9, ge=0, le=1)
    """What samples of one visit to a prompt count beside those of the next."""


@dataclass
class DistillationConfig:
    teachers: dict[str, str] = field(default_factory=dict)
    """Teachers by name, such as {math:DIR,code:http://host:8000/v1}: local Hugging Face directories with the policy's tokens, each on
    training.num_teacher_workers, and addresses of OpenAI-compatible servers that give prompt log-probs, as vLLM's. Empty: none.
    """
    teacher_key: str = "teacher"
    """Column of the dataset that names each prompt's teacher; one teacher needs none."""
    coef: float = bounded(1.0, gt=0, lt=math.inf)
    """Weight of the teacher in the advantage of each token, or with top_k of the divergence in its loss."""
    divergence: Divergence = Divergence.reverse_kl
    """What is made smaller at each token. reverse_kl: KL(student, teacher), by log teacher - log student; the student becomes sure of what
    the teacher would say. forward_kl: KL(teacher, student), by teacher / student - 1; the student comes to say all that the teacher might.
    """
    top_k: int | None = bounded(None, ge=1)
    """Compute the divergence itself at each token, over the teacher's top_k likeliest tokens and the rest of the vocabulary taken together;
    at the vocabulary's size or above, over all tokens. It is a term of the loss, not of the advantage, and needs local teachers. From the
    teacher to its step each response token of an answer takes 8 top_k + 4 more bytes, and then in trainer.restart_journal_mb. Null:
    estimate it from the sampled token alone.
    """
    ratio_clip: float | None = bounded(10.0, gt=1)
    """Largest teacher / student with forward_kl and no top_k: rare tokens that the teacher likes weigh no more. Null: no bound, no bias."""
    use_rewards: bool = False
    """Add it to the advantages of the rewards. False: put it in their place; rewards are shown, and train nothing, nor is a critic started
    for them.
    """
    api_key: str | None = None
    """Key for the servers, the same for all. Null: none is sent."""
    timeout_s: float = bounded(600.0, gt=0)
    """How long a server that does not answer is asked again, before the run saves and ends."""

    @property
    def is_alone(self) -> bool:
        """Whether there are teachers, and rewards train nothing."""
        return bool(self.teachers) and not self.use_rewards

    @property
    def replaces_policy_loss(self) -> bool:
        """Whether no advantage is trained: the divergence from teachers alone, in the loss."""
        return self.is_alone and self.top_k is not None


@dataclass
class AlgorithmConfig:
    advantage_estimator: str = "grpo"
    """Rewards to advantages. Within the group: grpo (centred, see grpo_norm_by_std), dr_grpo (centred), rloo (less the mean of the others:
    exact for groups of any size), maxrl (centred, over the mean; rewards of 0 and 1). Over the mini-batch: reinforce++ (normalised),
    reinforce++_baseline (centred within the group, then normalised). By turn, from what the environment gives for each: turn_rloo (what
    follows a turn, by token where rewards are, less the mean of the others: exact, however many turns each took), gigpo (turns shown the
    same are compared too), turn_credit (rloo, moved towards the turns before a reward). Without a group, so that
    generator.n_samples_per_prompt=1 works too: running_mean (less the mean of what the prompt's earlier samples earned), and from a
    critic's values (trainer.critic) gae (over tokens) and turn_gae (over turns). Or package.module:function in place of a name, of the
    rewards of a group.
    """
    gamma: float = bounded(1.0, ge=0, le=1)
    """What a reward counts one token earlier with gae, one turn earlier with turn_gae."""
    lambd: float = bounded(1.0, ge=0, le=1)
    """How far gae and turn_gae look past the next value: 1 takes what was earned less the value, which is unbiased; below 1 there is less
    noise, and the critic's errors become bias.
    """
    value_clip: float | None = bounded(0.2, gt=0)
    """How far a critic's value moves in a step from what it was when its answer was finished, in units of the reward; null: as far as it
    likes.
    """
    vtrace_clip: float | None = bounded(1.0, ge=1, reason="a fresh token weighs 1")
    """Largest importance weight of V-trace: what follows a token that an older policy sampled counts by how likely the present one is to
    sample it, in the advantages and returns of gae and turn_gae. It asks for recomputed log-probs where max_staleness_steps is above 0
    (training.num_logp_workers). Null: nothing is weighted.
    """
    advantage_batch_normalize: bool = False
    """Give the advantages of a mini-batch's tokens mean 0 and standard deviation 1, as SkyRL's and verl's gae always do. Every group of the
    step has to be there first: it turns trainer.stream_mini_batch off.
    """
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """On-policy distillation: teachers judge every token of the policy's own answers."""
    turn_discount: float = bounded(1.0, ge=0, le=1)
    """What a reward counts for the turn before its own, of turn_rloo and gigpo. Below 1 their advantages follow another gradient than the
    reward's.
    """
    gigpo: GigpoConfig = field(default_factory=GigpoConfig)
    """Settings of advantage_estimator=gigpo."""
    turn_credit: TurnCreditConfig = field(default_factory=TurnCreditConfig)
    """Settings of advantage_estimator=turn_credit."""
    running_mean: RunningMeanConfig = field(default_factory=RunningMeanConfig)
    """Settings of advantage_estimator=running_mean."""
    reward_shaping: str | None = None
    """module:function that shapes rewards before advantages are computed: called with the samples of a group (skyrl_async.samples), it
    returns one number each. Metrics report the environment's reward.
    """
    overlong_buffer_len: int = bounded(0, ge=0)
    """Soft overlong punishment (DAPO, equation 13): over the last so many tokens before generator.max_trajectory_tokens (with
    generator.max_turns=1 and null: generator.sampling.max_tokens) a penalty grows from 0 to overlong_buffer_penalty_factor. Not of agents,
    whose episodes no such limit cuts. 0: none.
    """
    overlong_buffer_penalty_factor: float = bounded(1.0, ge=0, lt=math.inf)
    """The largest penalty, >= 0."""
    zero_variance_filter_tol: float = bounded(1e-6, ge=0)
    """Rewards of a group that differ by no more are equal to trainer.fully_async.sample_full_batch."""
    grpo_norm_by_std: bool = True
    """Divide what grpo and gigpo have centred by its standard deviation."""
    policy_loss_type: str = "ppo_clip"
    """Anchored on the engine's log-probs: ppo_clip (also regular; clip_higher where the upper bound is to be the larger), dual_clip, gspo
    (one ratio per answer; goes with loss_reduction=sequence_mean and bounds of some 1e-4), dppo (bounds the change of probability, not its
    ratio), rollout_is (the token-level truncated importance weight), cispo (bounded on both sides), sapo (a soft gate; goes with
    loss_reduction=sequence_mean), clip_cov and kl_cov (ppo_clip without, and the plain ratio with a pull back on, the tokens that take most
    of the entropy away; chosen over the mini-batch). Anchored on the policy as it was when the group was finished, which is recomputed for
    it (training.num_logp_workers): decoupled_ppo, weighted by how far that was from the engine's log-probs, and cispo_old, not weighted. Or
    package.module:function in place of a name. Where generator.sampling.top_p, top_k or min_p leave tokens out the engine's log-probs are
    of those left: only rollout_is, cispo and losses of recomputed log-probs go with that.
    """
    eps_clip_low: float = bounded(0.2, ge=0, lt=1)
    """Lower clip range of ppo_clip, clip_higher, dual_clip, decoupled_ppo, gspo and clip_cov."""
    eps_clip_high: float = bounded(0.28, ge=0)
    """Upper clip range of the same."""
    clip_ratio_c: float = bounded(3.0, gt=1)
    """Largest ratio at which dual_clip still lowers a token, > 1."""
    tis_cap: float = bounded(2.0, gt=0)
    """Largest importance weight of rollout_is and decoupled_ppo."""
    cispo: CispoConfig = field(default_factory=CispoConfig)
    """Settings of policy_loss_type=cispo and cispo_old."""
    dppo: DppoConfig = field(default_factory=DppoConfig)
    """Settings of policy_loss_type=dppo."""
    sapo: SapoConfig = field(default_factory=SapoConfig)
    """Settings of policy_loss_type=sapo."""
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    """Settings of policy_loss_type=clip_cov."""
    kl_cov: KlCovConfig = field(default_factory=KlCovConfig)
    """Settings of policy_loss_type=kl_cov."""
    loss_reduction: LossReduction = LossReduction.token_mean
    """How the losses of a step's tokens become one: token_mean; sequence_mean (also seq_mean_token_mean), the mean over sequences of their
    means; seq_mean_token_sum, of their sums; seq_mean_token_sum_norm, of their sums over max_seq_len (Dr. GRPO's); prompt_mean, the mean
    over prompts of the means of their tokens. Sequences without a trained token do not count.
    """
    max_seq_len: int | None = bounded(None, ge=1)
    """Constant that seq_mean_token_sum_norm divides by, such as generator.sampling.max_tokens."""
    split_sample_weight: bool = False
    """Have the rows of a sample share the weight of one. A session whose history was rewritten has a row per branch: false counts each as a
    sequence, and with token_mean each token alike; true counts the session as one, so that each of its tokens weighs less the more
    branches it has.
    """
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)
    """Corrections of the policy loss for tokens that an older policy sampled."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the divergence from a frozen reference (trainer.ref.path) to the loss of every token."""
    use_kl_in_reward: bool = False
    """Take kl_loss_coef times the divergence of an answer's tokens, from the engine's log-probs to the frozen reference's, from its reward
    before advantages are computed. In place of use_kl_loss. Not with generator.sampling.top_p, top_k or min_p: engines have log-probs of
    the tokens that these leave.
    """
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    """How the coefficient changes with use_kl_in_reward."""
    kl_loss_coef: float = bounded(0.001, ge=0, lt=math.inf)
    """Coefficient of that divergence, >= 0; 0 only measures it (policy/ref_kl, policy/reward_kl). kl_ctrl.type=adaptive starts from it."""
    kl_estimator_type: KlEstimator | None = None
    """Per token, r the reference's probability over the policy's: k1 is -log r, k2 is (log r)^2 / 2, k3 is r - 1 - log r (GRPO's), abs is
    |log r|; each token's estimate is cut at 10 nats of either sign, past which it has no gradient (that of k3 is at most 12.6). Null: k3 in
    the loss, k1 in the reward. In the loss k2 pulls as KL(policy, reference) does, k3 as KL(reference, policy), and k1 not at all in the
    mean. In the reward k1 alone pulls as a divergence, KL(policy, reference), does; k2, k3 and abs may push away from the reference.
    """
    ref_logp: RefLogp = RefLogp.stage
    """When the reference's log-probs are computed: stage, as soon as a group is finished; inline, in the training step."""

    use_entropy_loss: bool = False
    """Take entropy_loss_coef times the policy's entropy (policy/entropy) from the loss of every token."""
    entropy_loss_coef: float = bounded(0.01, ge=0, lt=math.inf)
    """Coefficient of that entropy, >= 0."""

    def __post_init__(self) -> None:
        if self.use_kl_in_reward:
            expected = "false with trainer.algorithm.use_kl_loss=true, which takes the same divergence into account"
            require(not self.use_kl_loss, "trainer.algorithm.use_kl_in_reward", expected, True)
        if self.kl_ctrl.type is KlControl.adaptive:
            expected = "fixed without trainer.algorithm.use_kl_in_reward=true"
            require(self.use_kl_in_reward, "trainer.algorithm.kl_ctrl.type", expected, self.kl_ctrl.type.name)
            coef, expected = self.kl_loss_coef, "> 0 with trainer.algorithm.kl_ctrl.type=adaptive, which multiplies it"
            require(coef > 0, "trainer.algorithm.kl_loss_coef", expected, coef)
        if self.policy_loss_type == "clip_higher":
            low, high = self.eps_clip_low, self.eps_clip_high
            expected = f"> trainer.algorithm.eps_clip_low ({low:g}) with policy_loss_type=clip_higher"
            require(high > low, "trainer.algorithm.eps_clip_high", expected, high)
        if self.loss_reduction is LossReduction.seq_mean_token_sum_norm:
            expected = "set with trainer.algorithm.loss_reduction=seq_mean_token_sum_norm"
            require(self.max_seq_len is not None, "trainer.algorithm.max_seq_len", expected, self.max_seq_len)

    @property
    def uses_reference(self) -> bool:
        """Whether log-probs of the frozen reference are needed."""
        return self.use_kl_loss or self.use_kl_in_reward

    @property
    def kl_estimator(self) -> KlEstimator:
        """The estimator asked for, or by default the one whose mean gradient is a divergence's: k1 in the reward, k3 in the loss."""
        return self.kl_estimator_type or (KlEstimator.k1 if self.use_kl_in_reward else KlEstimator.k3)


_CLIPPED = ("ppo_clip", "regular", "clip_higher", "dual_clip", "decoupled_ppo", "gspo", "clip_cov")
_READ_BY: dict[tuple[str, ...], tuple[str, ...]] = {
    _CLIPPED: ("eps_clip_low", "eps_clip_high"),
    ("dual_clip",): ("clip_ratio_c",),
    ("rollout_is", "decoupled_ppo"): ("tis_cap",),
    ("cispo", "cispo_old"): ("cispo.cispo_eps_clip_low", "cispo.cispo_eps_clip_high"),
    ("dppo",): ("dppo.dppo_type", "dppo.delta_low", "dppo.delta_high"),
    ("sapo",): ("sapo.tau_pos", "sapo.tau_neg"),
    ("clip_cov",): ("clip_cov.clip_ratio", "clip_cov.clip_cov_lb", "clip_cov.clip_cov_ub"),
    ("kl_cov",): ("kl_cov.kl_cov_frac", "kl_cov.ppo_kl_coef"),
}
LOSSES_THAT_READ = {key: losses for losses, keys in _READ_BY.items() for key in keys}
"""Key under ``trainer.algorithm`` -> the policy losses that read it."""
ESTIMATORS_THAT_READ = {
    "grpo_norm_by_std": ("grpo", "gigpo"),
    "turn_discount": ("turn_rloo", "gigpo"),
    "gigpo.step_advantage_w": ("gigpo",),
    "turn_credit.decay": ("turn_credit",),
    "turn_credit.weight": ("turn_credit",),
    "running_mean.decay": ("running_mean",),
    **dict.fromkeys(("gamma", "lambd", "value_clip", "vtrace_clip"), ("gae", "turn_gae")),
}
"""Key under ``trainer.algorithm`` -> the built-in advantage estimators that read it."""
