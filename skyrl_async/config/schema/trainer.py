"""The ``trainer`` section: the loop, its staleness bound, its checkpoints and its steps."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from skyrl_async.config.schema.algorithm import AlgorithmConfig
from skyrl_async.config.schema.fields import bounded, require

StalenessPolicy = StrEnum("StalenessPolicy", ["wait", "window", "mask", "resample", "allow"])
Schedule = StrEnum("Schedule", ["sync", "one_step_off", "fully_async"])


BOUND_NAMES = ("max_staleness_steps", "generate_ahead_steps", "fully_async.max_staleness_steps")
WORKERS_NAMES = ("num_parallel_generation_workers", "fully_async.num_parallel_generation_workers")
_SCHEDULE_BOUNDS = {Schedule.sync: 0, Schedule.one_step_off: 1}
_DEFAULT_BOUND = 4
_WINDOW_SHARE = 0.3
"""Share of the groups that may be open: MiniMax's (arXiv 2605.26494, section 6.2.4), and torchtitan's default."""
_FILTERED_MINI_BATCHES = 30
"""SkyRL's ``dynamic_sampling.max_sample_batches``."""


ResumeMode = StrEnum("ResumeMode", ["latest", "none", "from_path"])


@dataclass
class FullyAsyncConfig:
    max_staleness_steps: int | None = None
    """SkyRL's name for trainer.max_staleness_steps."""
    num_parallel_generation_workers: int | None = None
    """SkyRL's name for trainer.num_parallel_generation_workers."""
    sample_full_batch: bool = False
    """Dynamic sampling (DAPO): groups whose rewards do not differ are filtered as soon as they are finished, and other prompts take their
    places, so that every mini-batch is full of groups with a signal. Filtered prompts are done for this epoch. Only what samples earned in
    all is compared: the log says where the algorithm would train some of these groups, and teachers alone are refused.
    """
    max_filtered_in_a_row: int | None = bounded(None, ge=0)
    """So many groups one after the other without a difference in reward end the run with an error that says what they had instead. Null: 30
    mini-batches of them; 0: only the data's end does.
    """


@dataclass
class RefConfig:
    path: str | None = None
    """Local Hugging Face directory of the reference, with the policy's tokens. Null: the policy that training began with."""


@dataclass
class CriticModelConfig:
    path: str | None = None
    """Local Hugging Face directory of the model that the critic begins with, with the policy's tokens; a value head takes the place of
    its output projection. A value or reward model (one label, score.weight) begins with its own head. Null: the policy that training
    begins with.
    """


@dataclass
class CriticOptimizerConfig:
    lr: float = bounded(5e-6, gt=0, lt=math.inf)
    """Peak learning rate. Default: SkyRL's."""
    weight_decay: float | None = bounded(None, ge=0, lt=math.inf)
    """Decoupled weight decay of its AdamW. Null: the policy's (training.weight_decay), as the rest of its optimizer is."""
    max_grad_norm: float | None = bounded(None, ge=0)
    """Gradient clipping; 0 does not clip. Null: training.max_grad_norm."""
    num_warmup_steps: int | None = bounded(None, ge=0)
    """Steps of linear warm-up. Null: training.num_warmup_steps."""


@dataclass
class CriticConfig:
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """What the critic begins with."""
    optimizer_config: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    """How its weights change."""
    warmup_steps: int = bounded(0, ge=0)
    """First steps in which the critic alone is trained: the policy's gradients are dropped. training.num_warmup_steps counts them."""


@dataclass
class GuardConfig:
    scale_lr_by_ess: bool = False
    """Multiply a step's learning rate by the square root of policy/sequence_ess, which stale answers lower (VCPO)."""
    min_ess: float = bounded(0.0, ge=0, lt=1)
    """Refuse a step whose policy/sequence_ess is lower: its gradient is dropped and its groups count as trained. 0: none."""


@dataclass
class SamplesConfig:
    keep: str = "all"
    """Samples whose texts, tokens and log-probs are kept: all; the number of groups per step of each outcome (trained, filtered, failed,
    held out); or none. The figures of every sample are kept: reward, advantage, lengths, versions, staleness, why it was not trained.
    """
    max_gb: float = bounded(20.0, gt=0)
    """Most gigabytes of samples on disk: past it the oldest lose their texts, tokens and log-probs, and after those their figures."""

    def __post_init__(self) -> None:
        is_known = self.keep in ("all", "none") or (self.keep.isdecimal() and int(self.keep) > 0)
        require(is_known, "trainer.samples.keep", "all, none, or a number of groups per step (>= 1)", self.keep)

    @property
    def groups_with_text(self) -> int | None:
        """Groups of each outcome in a step whose texts and tokens are kept; None: all."""
        return {"all": None, "none": 0}[self.keep] if self.keep in ("all", "none") else int(self.keep)


@dataclass
class TrainerConfig:
    schedule: Schedule = Schedule.fully_async
    """fully_async: generation goes on while training does, weights change in flight. sync: generate a mini-batch, train on it, publish.
    one_step_off: the next whole mini-batch is generated while this one trains, and weights change between the two.
    """
    max_staleness_steps: int | None = None
    """Most optimizer steps between a group's admission and its training. Null: 4; 0 with schedule=sync, 1 with one_step_off, and
    generate_ahead_steps or fully_async.max_staleness_steps where one is given. 0 is synchronous training, which may still stream. Where a
    batch takes n optimizer steps, at least n - 1, and null is n - 1 with sync, 2n - 1 with one_step_off, else 2n - 1 or 4.
    """
    generate_ahead_steps: int | None = None
    """async-rl's name of max_staleness_steps: there the number of steps that generation may run ahead of the last parameter update. Groups
    are admitted by the same rule here; the age at which they are trained is bounded, too.
    """
    staleness_policy: StalenessPolicy = StalenessPolicy.wait
    """What to do with groups older than the bound. wait: hold the step until they are in. window: train any of the
    staleness_window_groups oldest, which raises the bound by ceil((staleness_window_groups - 1) / policy_mini_batch_size). mask: train
    them, mask tokens past the bound. resample: abort and requeue the prompt. allow: train and count.
    """
    staleness_window_groups: int | None = None
    """With staleness_policy=window: groups admitted one after the other, from the oldest open one on, of which training may take any that
    is finished; up to policy_mini_batch_size * (max_staleness_steps + 1), the most that are open. 1 is the order of admission. Null: 0.3 of
    the most.
    """
    policy_mini_batch_size: int = 64
    """Groups per optimizer step. Default: with groups of 8 the 512 samples of a step of verl's DAPO scripts (32 groups of 16); SkyRL's
    GSM8K script takes 256 groups of 5.
    """
    train_batch_size: int | None = None
    """Groups of a batch, between whose optimizer steps no weights are published: a multiple of policy_mini_batch_size; null: one of it. A
    batch of several optimizer steps is trained once all of its groups are there; one that the data's end leaves smaller counts as whole.
    """
    update_epochs_per_batch: int = 1
    """Passes over a batch, each with an optimizer step per policy_mini_batch_size groups. Staleness counts optimizer steps, up to the last
    one that trains a group.
    """
    num_parallel_generation_workers: int | None = None
    """Groups in flight at once, from policy_mini_batch_size to policy_mini_batch_size * (max_staleness_steps + 1). Null: as many as that
    allows, at most twice a mini-batch or what the engines run at once, whichever is more.
    """
    limit_groups_by_cache: bool = True
    """Have fewer groups in flight once engines preempt requests because their caches are full: at once a quarter fewer, then 2 % more per
    step in which none waits inside an engine and caches are not nine tenths full. Never more than num_parallel_generation_workers.
    """
    count_buffered_as_in_flight: bool = True
    """While the trainer is busy, finished groups count among num_parallel_generation_workers until they are trained, so that none is
    generated earlier than it can be used. False fills the buffer up to the staleness bound.
    """
    num_steps: int | None = bounded(None, ge=1)
    """Optimizer steps of the run; null: as many as num_epochs hold. Those of policy=tiny are rounded up to whole batches."""
    num_epochs: int = bounded(20, ge=1)
    """Passes over the training prompts, unless num_steps ends the run first. Default: SkyRL's GSM8K script's."""
    publish_every_steps: int = 1
    """Optimizer steps between publishes, beside those before an evaluation, a comparison of log-probs or a checkpoint, and at the end; at
    most max_staleness_steps + 1.
    """
    stream_mini_batch: bool | None = None
    """Accumulate gradients of finished groups while the mini-batch's last ones are still generated. Null: unless
    trainer.algorithm.advantage_estimator, policy_loss_type or advantage_batch_normalize needs them all at once, a batch has several
    optimizer steps, or trainer.schedule is another than fully_async.
    """
    deterministic: bool = False
    """Nothing that is trained depends on how long anything took: groups are trained in the order of admission, weights change when no group
    is in flight, and count_buffered_as_in_flight is off. With engine=deterministic two runs are equal bit for bit; policy workers on CUDA
    take deterministic kernels for that.
    """
    seed: int = bounded(0, ge=0, lt=2**63)
    """Seed of everything that is drawn: shuffling, the warm start, sampling where the engine allows."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages and loss."""
    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    """Dynamic sampling, and SkyRL's names of two keys."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The frozen reference of trainer.algorithm.use_kl_loss and use_kl_in_reward."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic of advantage_estimator=gae and turn_gae, on training.num_critic_workers."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """What holds back a step whose answers are far from the policy."""
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    """The record of every finished sample, in samples/ of the run's directory."""
    resume_mode: ResumeMode = ResumeMode.none
    """latest continues trainer.output_dir's newest checkpoint; where there is none yet, it begins with trainer.resume_path or, without
    that, anew. from_path continues trainer.resume_path: in a new directory, or back in the run that it is of.
    """
    resume_path: str | None = None
    """Checkpoint directory to go on from; see resume_mode."""
    checkpoint_interval_steps: int = bounded(20, ge=0)
    """Steps between checkpoints, and one at the end; 0 writes none, but for that of a run that is asked to stop."""
    max_checkpoints_to_keep: int = bounded(2, ge=0)
    """Older checkpoints are deleted; 0 keeps all."""
    max_restarts: int = bounded(3, ge=0)
    """How often a run replaces policy workers that died or hung, each time from its last checkpoint, doing again what was trained since; 0
    ends it with the first. The next one ends the run.
    """
    restart_journal_mb: int = bounded(1024, ge=0)
    """Memory for what was trained since the last checkpoint, in case policy workers die (about 9 bytes per token, 4 for each kind of
    log-probs beside the engine's and for advantages that differ within an answer, and 8 top_k + 4 with distillation.top_k); when it is
    full the run saves the policy for itself, and deletes that at its end.
    """
    eval_interval_steps: int = bounded(20, ge=0)
    """Steps between evaluations while training, beside those before and after; 0 leaves them out."""
    eval_before_train: bool = True
    """Evaluate before training, too."""
    eval_at_end: bool = True
    """Evaluate after training, too."""
    eval_only: bool = False
    """Train nothing: evaluate the policy, or with trainer.resume_mode the checkpoint's, write evaluation.json and end. What a run has left
    in the directory stays.
    """
    output_dir: str | None = None
    """The run's directory; null makes one under outputs/."""
    export_hf: bool = True
    """Write the final policy as a Hugging Face directory."""
    logprob_probe_interval_steps: int = bounded(20, ge=0)
    """Steps between comparisons of the engine's log-probs with the trainer's, beside the one after the first publish; 0: only that one."""
    max_engine_logprob_gap: float = bounded(0.3, gt=0)
    """Largest difference in nats per token between engine and trainer before the run stops. float32 agrees to 1e-4, bfloat16 to 0.2; stale
    weights are off by more than 0.8.
    """
    shutdown_timeout_s: float = bounded(60.0, gt=0)
    """After Ctrl-C or SIGTERM: half of it for what the step in progress still lacks, a quarter to train and save, the rest to end all
    processes. A second signal ends the run at once.
    """
    stall_warning_s: float = bounded(60.0, gt=0)
    """What does the same thing for longer than this (a sample that generates or is in its environment, a publish, a checkpoint, a wait for
    groups) is named in the log, in the metrics and on the console, with its seconds.
    """

    def __post_init__(self) -> None:
        self._check_batch()
        self._check_schedule()
        bound, interval, num_steps = self.staleness_bound, self.publish_every_steps, self.steps_per_batch
        expected = f">= {num_steps - 1}, since a batch takes {num_steps} optimizer steps under one published version"
        require(bound >= num_steps - 1, "trainer.max_staleness_steps", expected, bound)
        expected = f"between 1 and max_staleness_steps + 1 ({bound + 1}): training would wait for groups that may not be generated yet"
        require(1 <= interval <= bound + 1, "trainer.publish_every_steps", expected, interval)
        if self.resume_mode is ResumeMode.from_path:
            expected = "a checkpoint directory when trainer.resume_mode=from_path"
            require(self.resume_path is not None, "trainer.resume_path", expected, self.resume_path)
        key, workers = self._asked(*WORKERS_NAMES)
        least, most = self.batch_size, self.most_open_groups
        expected = (
            f"between policy_mini_batch_size ({least}) and policy_mini_batch_size * (max_staleness_steps + 1) ({most})"
        )
        if num_steps > 1:
            expected = f"between a batch ({least}) and the groups that max_staleness_steps lets be open ({most})"
        require(workers is None or least <= workers <= most, key, expected, workers)
        self._check_window(most)

    def _check_batch(self) -> None:
        """Raise ``ConfigError`` unless batches consist of whole mini-batches, the run of whole batches, and publishes come between them."""
        epochs, mini = self.update_epochs_per_batch, self.policy_mini_batch_size
        require(epochs >= 1, "trainer.update_epochs_per_batch", ">= 1", epochs)
        require(mini >= 1, "trainer.policy_mini_batch_size", ">= 1", mini)
        size, num_steps = self.batch_size, self.steps_per_batch
        expected = f"a multiple of trainer.policy_mini_batch_size ({mini})"
        require(size >= mini and size % mini == 0, "trainer.train_batch_size", expected, size)
        if num_steps == 1:
            return
        expected = f"a multiple of {num_steps}, the optimizer steps of a batch, or null"
        require(
            self.num_steps is None or self.num_steps % num_steps == 0, "trainer.num_steps", expected, self.num_steps
        )
        expected = f"1 with batches of {num_steps} optimizer steps, after each of which weights are published"
        require(self.publish_every_steps == 1, "trainer.publish_every_steps", expected, self.publish_every_steps)
        expected = f"false or null with batches of {num_steps} optimizer steps, which take whole mini-batches"
        require(not self.stream_mini_batch, "trainer.stream_mini_batch", expected, self.stream_mini_batch)

    def _check_window(self, most: int) -> None:
        """Raise ``ConfigError`` for a window that the policy does not have, or of more groups than may be open."""
        asked, key = self.staleness_window_groups, "trainer.staleness_window_groups"
        if self.staleness_policy is not StalenessPolicy.window:
            expected = f"null unless trainer.staleness_policy=window (it is {self.staleness_policy.name})"
            require(asked is None, key, expected, asked)
        open_groups = "policy_mini_batch_size * (max_staleness_steps + 1)"
        if self.steps_per_batch > 1:
            open_groups = "the groups that max_staleness_steps lets be open"
        expected = f"between 1 and {open_groups} ({most}), or null"
        require(asked is None or 1 <= asked <= most, key, expected, asked)

    def _check_schedule(self) -> None:
        """Raise ``ConfigError`` for a bound or streaming that the schedule does not have, and for names of the bound that differ."""
        key, asked = self._asked(*BOUND_NAMES)
        require(asked is None or asked >= 0, key, ">= 0 or null", asked)
        if self.schedule is Schedule.fully_async:
            return
        own, name = self._own_bound, self.schedule.name
        expected = (
            f"false or null when trainer.schedule={name}, which trains whole mini-batches (fully_async streams, also with "
            "max_staleness_steps=0)"
        )
        require(not self.stream_mini_batch, "trainer.stream_mini_batch", expected, self.stream_mini_batch)
        expected = f"left out, or {own}, when trainer.schedule={name} (fully_async takes any)"
        require(asked in (None, own), key, expected, asked)

    def _asked(self, *names: str) -> tuple[str, int | None]:
        """The first of several names of a key that is given, and its value. Raises ``ConfigError`` for values that differ."""
        given = {f"trainer.{name}": value for name in names if (value := attrgetter(name)(self)) is not None}
        key, asked = next(iter(given.items()), (f"trainer.{names[0]}", None))
        for other, value in given.items():
            require(value == asked, other, f"left out, or equal to {key} ({asked}), whose other name it is", value)
        return key, asked

    @property
    def staleness_bound(self) -> int:
        """``max_staleness_steps``, or what follows from the schedule where it is null."""
        _, asked = self._asked(*BOUND_NAMES)
        return self._own_bound if asked is None else asked

    @property
    def _own_bound(self) -> int:
        """The bound of the schedule, in optimizer steps; of ``fully_async`` its default."""
        num_steps = self.steps_per_batch
        if self.schedule is Schedule.fully_async:
            return max(_DEFAULT_BOUND, 2 * num_steps - 1)
        return (_SCHEDULE_BOUNDS[self.schedule] + 1) * num_steps - 1

    @property
    def batch_size(self) -> int:
        """Groups between two published versions."""
        return self.policy_mini_batch_size if self.train_batch_size is None else self.train_batch_size

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps between two published versions."""
        return self.update_epochs_per_batch * (self.batch_size // self.policy_mini_batch_size)

    @property
    def most_open_groups(self) -> int:
        """Groups that the bound lets be admitted and not trained."""
        return self.batch_size * ((self.staleness_bound + 1) // self.steps_per_batch)

    @property
    def window_groups(self) -> int:
        """``staleness_window_groups``, or its default; 1 with another policy than ``window``."""
        if self.staleness_policy is not StalenessPolicy.window:
            return 1
        return self.staleness_window_groups or max(1, int(_WINDOW_SHARE * self.most_open_groups))

    @property
    def publishes_between_batches(self) -> bool:
        """Whether weights change only while no group is being generated and none may be admitted."""
        return self.deterministic or self.schedule is Schedule.one_step_off

    @property
    def max_filtered_in_a_row(self) -> int:
        """Filtered groups in a row that end the run; 0: no limit."""
        most = self.fully_async.max_filtered_in_a_row
        return _FILTERED_MINI_BATCHES * self.policy_mini_batch_size if most is None else most

    def max_concurrent_generation_groups(self, num_places: int) -> int:
        """Groups in flight at once, on engines that run ``num_places`` groups at once."""
        _, asked = self._asked(*WORKERS_NAMES)
        return asked or min(self.most_open_groups, max(2 * self.batch_size, num_places))
