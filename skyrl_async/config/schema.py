"""Every key of a run's configuration, with its default, its unit and what it does.

Flows in: nothing. Flows out: dataclasses that hydra composes and ``config.load`` turns into checked objects. The text behind
each key is what ``--help`` and the configuration reference print. Rules that involve one class are in its ``__post_init__``
(omegaconf runs it when it builds the object); rules across classes are in ``config.rules``.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from skyrl_async.config.algorithm import AlgorithmConfig
from skyrl_async.config.deepspeed import DeepSpeedConfig
from skyrl_async.config.fields import doc, require
from skyrl_async.config.lora import LoraConfig
from skyrl_async.config.task import TaskConfig


class StalenessPolicy(Enum):
    wait = "wait"
    mask = "mask"
    resample = "resample"
    allow = "allow"


class Schedule(Enum):
    sync = "sync"
    one_step_off = "one_step_off"
    fully_async = "fully_async"


_OWN_BOUNDS = {Schedule.sync: 0, Schedule.one_step_off: 1}
_DEFAULT_BOUND = 4
_FILTERED_MINI_BATCHES = 30
"""SkyRL's ``dynamic_sampling.max_sample_batches``."""


class OnLostSamples(Enum):
    fill = "fill"
    train_rest = "train_rest"
    drop = "drop"


class ResumeMode(Enum):
    latest = "latest"
    none = "none"
    from_path = "from_path"


class PauseModeName(Enum):
    abort = "abort"
    keep = "keep"


class EngineBackend(Enum):
    vllm = "vllm"
    deterministic = "deterministic"


class TrainingBackendName(Enum):
    fsdp = "fsdp"
    deepspeed = "deepspeed"


class GeneratorKind(Enum):
    gym = "gym"
    gym_http = "gym_http"
    agent = "agent"


class LrSchedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class DType(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ReasoningPolicy(Enum):
    keep = "keep"
    template = "template"


class BranchPolicyName(Enum):
    all = "all"
    longest = "longest"
    last = "last"


class WeightTransfer(Enum):
    auto = "auto"
    shm = "shm"


@dataclass
class WarmStartConfig:
    enabled: bool = doc(
        True, "Teach the tiny policy the task's format by supervised learning first (cached under cache_dir)."
    )
    target_accuracy: float = doc(0.95, "Greedy accuracy on clean worked answers at which the first phase ends.")
    min_tokens: int = doc(60_000, "Least tokens of the first phase: at its first success a policy still slips.")
    max_tokens: int = doc(400_000, "Most tokens of the first phase.")
    mixture_tokens: int = doc(
        40_000,
        "Tokens of the second phase: terse guesses mixed with worked answers, so that reinforcement has something to learn.",
    )
    terse_share: float = doc(0.7, "Share of terse guesses in the second phase.")
    slip_rate: float = doc(0.0, "Wrong digits in the second phase's worked answers; of built-in tasks.")
    files: list[str] = doc(
        list,
        "Conversations to imitate, for tasks that are not built in: files as of task.train_files, whose rows have messages, and "
        "guess=true where they are hasty answers for the second phase. The tiny policy's tokenizer is made for them.",
    )

    def __post_init__(self) -> None:
        require(0 <= self.terse_share <= 1, "policy.warm_start.terse_share", "in [0, 1]", self.terse_share)
        require(0 <= self.slip_rate <= 1, "policy.warm_start.slip_rate", "in [0, 1]", self.slip_rate)


@dataclass
class PolicyConfig:
    path: str | None = doc(
        None,
        "Local Hugging Face directory (config, safetensors, tokenizer). Null builds the tiny policy for the built-in task.",
    )
    dtype: DType = doc(DType.float32, "Of the weights the engines serve; training keeps float32 master weights.")
    trust_remote_code: bool = doc(False, "Passed to transformers and vLLM.")
    hidden_size: int = doc(128, "Of the tiny policy.")
    num_layers: int = doc(2, "Of the tiny policy.")
    num_heads: int = doc(4, "Of the tiny policy; half as many key-value heads.")
    intermediate_size: int = doc(512, "Of the tiny policy.")
    tie_word_embeddings: bool = doc(False, "Of the tiny policy.")
    warm_start: WarmStartConfig = doc(WarmStartConfig, "What the tiny policy learns before reinforcement.")
    lora: LoraConfig = doc(LoraConfig, "Adapters of low rank that train in place of the weights.")


@dataclass
class EngineConfig:
    backend: EngineBackend = doc(
        EngineBackend.vllm,
        "vllm, or deterministic: one request at a time through transformers, slow, bit-reproducible.",
    )
    num_engines: int = doc(1, "Replicas of the policy.")
    tensor_parallel_size: int = doc(1, "Devices per engine.")
    device: Device = doc(Device.auto, "auto takes cuda where there is one.")
    max_model_len: int | None = doc(None, "Longest prompt plus answer in tokens; null takes the model's own.")
    max_num_seqs: int = doc(64, "Requests running at once in an engine.")
    gpu_memory_utilization: float = doc(0.85, "Share of a GPU's memory an engine takes.")
    cpu_kv_cache_gb: int = doc(1, "KV cache on CPU, GiB.")
    enforce_eager: bool = doc(True, "Skip compilation and CUDA graphs; set false for long GPU runs.")
    enable_prefix_caching: bool = doc(True, "Share prompt prefixes; dropped at each weight update.")
    oldest_request_weight: float | None = doc(
        None,
        "Several engines get requests of equal weight instead of equal number; the oldest weigh this much, the newest 1, so that those "
        "which training waits for share an engine with few others. 1 treats all alike; null: so, unless trainer.staleness_policy=wait, "
        "then 1.5 (trainer.max_staleness_steps + 1).",
    )
    start_timeout_s: float = doc(300.0, "An engine that is not up by then stops the run, with its last log lines.")
    call_timeout_s: float = doc(
        60.0, "Deadline of a control call (pause, load, resume, checksum); an engine that misses it counts as dead."
    )
    heartbeat_interval_s: float = doc(5.0, "Seconds between the heartbeats asked of an engine.")
    heartbeat_timeout_s: float = doc(
        60.0,
        "An engine that leaves a heartbeat unanswered for so long is killed; what it was sampling goes on in the others. "
        "At least heartbeat_interval_s, and longer than the engine's longest forward pass.",
    )
    max_restarts: int = doc(
        5,
        "Times that a dead engine is started anew; 0: never. The run ends, with a checkpoint, when no engine is left.",
    )
    restart_backoff_s: float = doc(
        1.0, "Wait before a dead engine is started anew; doubled, to a minute at most, at each death in a row."
    )
    all_gone_timeout_s: float = doc(
        900.0,
        "With no engine left, generation and training wait so long for one to come back; then the run ends, with a checkpoint.",
    )
    stream_interval: int = doc(10, "Tokens per streamed block.")
    pause_mode: PauseModeName = doc(
        PauseModeName.abort,
        "What a weight update does to requests in flight: abort (continued in token space) or keep (frozen, KV recomputed).",
    )
    extra_args: dict[str, Any] = doc(dict, "More vLLM engine arguments, as in AsyncEngineArgs.")

    def __post_init__(self) -> None:
        require(self.num_engines >= 1, "engine.num_engines", ">= 1", self.num_engines)
        require(self.tensor_parallel_size >= 1, "engine.tensor_parallel_size", ">= 1", self.tensor_parallel_size)
        require(self.max_num_seqs >= 1, "engine.max_num_seqs", ">= 1", self.max_num_seqs)
        require(
            self.max_model_len is None or self.max_model_len >= 2,
            "engine.max_model_len",
            ">= 2 or null",
            self.max_model_len,
        )
        require(
            0 < self.gpu_memory_utilization <= 1,
            "engine.gpu_memory_utilization",
            "in (0, 1]",
            self.gpu_memory_utilization,
        )
        weight = self.oldest_request_weight
        require(weight is None or weight >= 1, "engine.oldest_request_weight", ">= 1 or null", weight)
        require(self.stream_interval >= 1, "engine.stream_interval", ">= 1", self.stream_interval)
        require(self.start_timeout_s > 0, "engine.start_timeout_s", "> 0", self.start_timeout_s)
        require(self.call_timeout_s > 0, "engine.call_timeout_s", "> 0", self.call_timeout_s)
        for key in ("heartbeat_interval_s", "all_gone_timeout_s"):
            require(getattr(self, key) > 0, f"engine.{key}", "> 0", getattr(self, key))
        for key in ("max_restarts", "restart_backoff_s"):
            require(getattr(self, key) >= 0, f"engine.{key}", ">= 0", getattr(self, key))
        require(
            self.heartbeat_timeout_s >= self.heartbeat_interval_s,
            "engine.heartbeat_timeout_s",
            f">= engine.heartbeat_interval_s ({self.heartbeat_interval_s:g})",
            self.heartbeat_timeout_s,
        )


@dataclass
class SamplingConfig:
    max_tokens: int = doc(320, "Most new tokens per generation call.")
    temperature: float = doc(1.0, "Softmax temperature, >= 0; 0 is greedy.")
    top_p: float = doc(1.0, "Nucleus mass, in (0, 1].")
    top_k: int = doc(0, "0 keeps all.")
    min_p: float = doc(0.0, "Least probability relative to the likeliest token, in [0, 1].")
    stop: list[str] = doc(list, "Strings that end an answer.")

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "sampling max_tokens", ">= 1", self.max_tokens)
        require(self.temperature >= 0, "sampling temperature", ">= 0", self.temperature)
        require(0 < self.top_p <= 1, "sampling top_p", "in (0, 1]", self.top_p)
        require(self.top_k >= 0, "sampling top_k", ">= 0", self.top_k)
        require(0 <= self.min_p <= 1, "sampling min_p", "in [0, 1]", self.min_p)


@dataclass
class GeneratorConfig:
    kind: GeneratorKind = doc(
        GeneratorKind.gym,
        "gym plays environments over generate(); gym_http over the endpoint with the openai client; agent runs any harness "
        "against the endpoint: generator.command or generator.entrypoint.",
    )
    entrypoint: str | None = doc(
        None,
        "module:function. With kind=agent the harness, an async function called with an AgentTask; else what makes a generator of "
        "your own, called with (client, renderer, config).",
    )
    command: str | None = doc(
        None,
        "Command line of the harness, for kind=agent; gets OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and the task in its environment.",
    )
    reward: str | None = doc(
        None, "module:function that rewards an agent's episode, for kind=agent; null asks the prompt's environment."
    )
    agent_timeout_s: float = doc(300.0, "An agent that takes longer is ended, with all its processes, and fails.")
    max_concurrent_agents: int | None = doc(
        None, "Agents running at once; null: as many as groups and samples ask for."
    )
    working_dir: str | None = doc(
        None, "Where agents' working directories are made, one each; null: temporary ones, deleted after use."
    )
    n_samples_per_prompt: int = doc(8, "Group size.")
    apply_overlong_filtering: bool = doc(
        False,
        "Answers that a length limit cut are masked from the loss and left out of their group's baseline (DAPO, section 3.4): what they "
        "would have earned counts for nothing.",
    )
    max_turns: int = doc(8, "Most turns of an episode, whatever the environment says.")
    max_trajectory_tokens: int | None = doc(
        None,
        "Most response tokens of an episode, the environment's included; null is bounded by the model's context only.",
    )
    sampling: SamplingConfig = doc(SamplingConfig, "How training rollouts are sampled.")
    max_retries: int = doc(2, "Times a failed rollout is tried again before its group counts as failed.")
    retry_backoff_s: float = doc(
        1.0,
        "Wait before the first retry, doubled for each further one, less up to half of it at random; 0 never waits.",
    )
    max_retry_backoff_s: float = doc(60.0, "Longest wait before a retry.")
    on_lost_samples: OnLostSamples = doc(
        OnLostSamples.train_rest,
        "What becomes of a group of which some samples failed, hung or were abandoned by their agent. fill plays these again, "
        "max_retries times; a group that stays incomplete fails. train_rest does too, and then trains the others if they are at least "
        "two; an agent's abandoned samples are played again only while fewer than two finished. drop fails the group at once.",
    )
    max_failed_fraction: float = doc(
        0.1,
        "Share of failed groups (of the last 100) past which the run stops with the last error. A group trained without some of its "
        "samples counts by their share.",
    )
    rollout_timeout_s: float = doc(
        600.0,
        "Deadline of one try of a group: samples that are not finished by then are lost, by name; the others are kept. It stands "
        "still while there is no engine.",
    )

    def __post_init__(self) -> None:
        require(self.n_samples_per_prompt >= 1, "generator.n_samples_per_prompt", ">= 1", self.n_samples_per_prompt)
        require(self.max_turns >= 1, "generator.max_turns", ">= 1", self.max_turns)
        require(self.max_retries >= 0, "generator.max_retries", ">= 0", self.max_retries)
        require(
            0 <= self.max_failed_fraction <= 1, "generator.max_failed_fraction", "in [0, 1]", self.max_failed_fraction
        )
        require(self.retry_backoff_s >= 0, "generator.retry_backoff_s", ">= 0", self.retry_backoff_s)
        require(
            self.max_retry_backoff_s >= self.retry_backoff_s,
            "generator.max_retry_backoff_s",
            f">= generator.retry_backoff_s ({self.retry_backoff_s:g})",
            self.max_retry_backoff_s,
        )
        require(self.rollout_timeout_s > 0, "generator.rollout_timeout_s", "> 0", self.rollout_timeout_s)
        require(self.agent_timeout_s > 0, "generator.agent_timeout_s", "> 0", self.agent_timeout_s)
        limit = self.max_concurrent_agents
        require(limit is None or limit >= 1, "generator.max_concurrent_agents", ">= 1 or null", limit)

    @property
    def needs_endpoint(self) -> bool:
        """It samples over HTTP; a generator of one's own is handed the client instead."""
        own = self.kind is not GeneratorKind.agent and self.entrypoint is not None
        return self.kind is not GeneratorKind.gym and not own

    @property
    def longest_response(self) -> int:
        """Tokens of a response at which a limit cuts it: of an episode, or where that has no limit, of a generation call."""
        return self.max_trajectory_tokens or self.sampling.max_tokens


@dataclass
class FullyAsyncConfig:
    sample_full_batch: bool = doc(
        False,
        "Dynamic sampling (DAPO): groups whose rewards do not differ are filtered as soon as they are finished, and other prompts take "
        "their places, so that every mini-batch is full of groups with a signal. Filtered prompts are done for this epoch.",
    )
    max_filtered_in_a_row: int | None = doc(
        None,
        "So many groups one after the other without a difference in reward end the run with an error that says what they had instead. "
        "Null: 30 mini-batches of them; 0: only the data's end does.",
    )

    def __post_init__(self) -> None:
        most = self.max_filtered_in_a_row
        require(most is None or most >= 0, "trainer.fully_async.max_filtered_in_a_row", ">= 0 or null", most)


@dataclass
class RefConfig:
    path: str | None = doc(
        None,
        "Local Hugging Face directory of the reference, with the policy's tokens. Null: the policy that training began with.",
    )


@dataclass
class TrainerConfig:
    schedule: Schedule = doc(
        Schedule.fully_async,
        "fully_async: generation goes on while training does, weights change in flight. sync: generate a mini-batch, train on it, "
        "publish. one_step_off: the next whole mini-batch is generated while this one trains, and weights change between the two.",
    )
    max_staleness_steps: int | None = doc(
        None,
        "Most optimizer steps between a group's admission and its training. Null: 4; 0 with schedule=sync, 1 with one_step_off, and "
        "generate_ahead_steps where that is given. 0 is synchronous training, which may still stream.",
    )
    generate_ahead_steps: int | None = doc(
        None,
        "Another name for max_staleness_steps, for those who come from async-rl: there it is by how many steps generation may run ahead of "
        "the last parameter update, which is when a group may be admitted here, too. Here it also bounds the age at which it is trained.",
    )
    staleness_policy: StalenessPolicy = doc(
        StalenessPolicy.wait,
        "What becomes of groups that training would overtake by more than max_staleness_steps: wait does not end a step that would "
        "push one past it, mask trains them without their tokens that are past it, resample gives them up and draws their prompts "
        "again, allow trains and counts.",
    )
    policy_mini_batch_size: int = doc(8, "Groups per optimizer step.")
    num_parallel_generation_workers: int | None = doc(
        None,
        "Groups in flight at once, from policy_mini_batch_size to policy_mini_batch_size * (max_staleness_steps + 1). "
        "Null: as many as that allows, at most twice a mini-batch.",
    )
    limit_buffered_groups: bool = doc(
        True,
        "While the trainer is busy, finished groups count among num_parallel_generation_workers until they are trained, so that "
        "none is generated earlier than it can be used. False fills the buffer up to the staleness bound.",
    )
    num_steps: int | None = doc(100, "Optimizer steps of the run; null: as many as num_epochs hold.")
    num_epochs: int = doc(1000, "Passes over the training prompts, when num_steps does not end the run first.")
    publish_every_steps: int = doc(
        1,
        "Optimizer steps between publishes, beside those before a checkpoint and at the end; at most max_staleness_steps + 1.",
    )
    stream_mini_batch: bool | None = doc(
        None,
        "Accumulate gradients of finished groups while the mini-batch's last ones are still generated. Null: unless "
        "trainer.algorithm.advantage_estimator needs them all at once.",
    )
    deterministic: bool = doc(
        False,
        "Nothing that is trained depends on how long anything took: groups are trained in the order of admission, weights change when no "
        "group is in flight, and limit_buffered_groups is off. With engine=deterministic two runs are equal bit for bit.",
    )
    seed: int = doc(0, "Of everything that is drawn: shuffling, the warm start, sampling where the engine allows.")
    algorithm: AlgorithmConfig = doc(AlgorithmConfig, "Advantages and loss.")
    fully_async: FullyAsyncConfig = doc(FullyAsyncConfig, "Dynamic sampling.")
    ref: RefConfig = doc(RefConfig, "The frozen reference of trainer.algorithm.use_kl_loss and use_kl_in_reward.")
    resume_mode: ResumeMode = doc(
        ResumeMode.none,
        "latest continues trainer.output_dir's newest checkpoint (a fresh start where there is none); "
        "from_path continues trainer.resume_path.",
    )
    resume_path: str | None = doc(None, "Checkpoint directory for resume_mode=from_path.")
    checkpoint_interval_steps: int = doc(
        20, "Steps between checkpoints, and one at the end; 0 writes none, but for that of a run that is asked to stop."
    )
    max_checkpoints_to_keep: int = doc(2, "Older checkpoints are deleted; 0 keeps all.")
    max_restarts: int = doc(
        3,
        "How often a run replaces policy workers that died or hung, each time from its last checkpoint, doing again what was trained "
        "since; 0 ends it with the first. The next one ends the run.",
    )
    restart_journal_mb: int = doc(
        1024,
        "Memory for what was trained since the last checkpoint, in case policy workers die (about 20 bytes per token, and 9 for each kind "
        "of log-probs beside the engine's); when it is full the run saves the policy for itself, and deletes that at its end.",
    )
    eval_interval_steps: int = doc(
        20, "Steps between evaluations while training, beside those before and after; 0 leaves them out."
    )
    eval_before_train: bool = doc(True, "Evaluate before training, too.")
    eval_at_end: bool = doc(True, "Evaluate after training, too.")
    eval_only: bool = doc(
        False, "Train nothing: evaluate the policy, or with trainer.resume_mode the checkpoint's, and end."
    )
    output_dir: str | None = doc(None, "The run's directory; null makes one under outputs/.")
    export_hf: bool = doc(True, "Write the final policy as a Hugging Face directory.")
    logprob_probe_interval_steps: int = doc(
        20,
        "Steps between comparisons of the engine's log-probs with the trainer's, beside the one after the first publish; 0: only that one.",
    )
    max_engine_logprob_gap: float = doc(
        0.3,
        "Largest difference in nats per token between engine and trainer before the run stops. "
        "float32 agrees to 1e-4, bfloat16 to 0.2; stale weights are off by more than 0.8.",
    )
    shutdown_timeout_s: float = doc(
        60.0,
        "After Ctrl-C or SIGTERM: half of it for what the step in progress still lacks, a quarter to train and save, the rest to end "
        "all processes. A second signal ends the run at once.",
    )
    stall_warning_s: float = doc(
        60.0,
        "What does the same thing for longer than this (a sample that generates or is in its environment, a publish, a checkpoint, a wait "
        "for groups) is named in the log, in the metrics and on the console, with its seconds.",
    )

    def __post_init__(self) -> None:
        self._check_the_bound()
        require(self.policy_mini_batch_size >= 1, "trainer.policy_mini_batch_size", ">= 1", self.policy_mini_batch_size)
        require(self.num_steps is None or self.num_steps >= 1, "trainer.num_steps", ">= 1 or null", self.num_steps)
        require(self.num_epochs >= 1, "trainer.num_epochs", ">= 1", self.num_epochs)
        require(
            1 <= self.publish_every_steps <= self.staleness_bound + 1,
            "trainer.publish_every_steps",
            f"between 1 and max_staleness_steps + 1 ({self.staleness_bound + 1}): training would wait for groups that nobody "
            "may generate",
            self.publish_every_steps,
        )
        require(self.stall_warning_s > 0, "trainer.stall_warning_s", "> 0", self.stall_warning_s)
        require(self.shutdown_timeout_s > 0, "trainer.shutdown_timeout_s", "> 0", self.shutdown_timeout_s)
        for key in (
            "checkpoint_interval_steps",
            "max_checkpoints_to_keep",
            "max_restarts",
            "restart_journal_mb",
            "eval_interval_steps",
            "logprob_probe_interval_steps",
        ):
            require(getattr(self, key) >= 0, f"trainer.{key}", ">= 0", getattr(self, key))
        if self.resume_mode is ResumeMode.from_path:
            require(
                self.resume_path is not None,
                "trainer.resume_path",
                "a checkpoint directory when trainer.resume_mode=from_path",
                self.resume_path,
            )
        least, most = self.policy_mini_batch_size, self.policy_mini_batch_size * (self.staleness_bound + 1)
        workers = self.num_parallel_generation_workers
        require(
            workers is None or least <= workers <= most,
            "trainer.num_parallel_generation_workers",
            f"between policy_mini_batch_size ({least}) and policy_mini_batch_size * (max_staleness_steps + 1) ({most})",
            workers,
        )

    def _check_the_bound(self) -> None:
        """Raise ``ConfigError`` for a bound that contradicts the schedule or its other name."""
        bound, ahead = self.max_staleness_steps, self.generate_ahead_steps
        require(ahead is None or ahead >= 0, "trainer.generate_ahead_steps", ">= 0 or null", ahead)
        require(bound is None or bound >= 0, "trainer.max_staleness_steps", ">= 0", bound)
        require(
            None in (bound, ahead) or bound == ahead,
            "trainer.generate_ahead_steps",
            f"left out, or equal to trainer.max_staleness_steps ({bound}), whose other name it is",
            ahead,
        )
        asked, own = self._asked_bound, _OWN_BOUNDS.get(self.schedule)
        name = "generate_ahead_steps" if bound is None else "max_staleness_steps"
        require(
            None in (asked, own) or asked == own,
            f"trainer.{name}",
            f"left out, or {own}, when trainer.schedule={self.schedule.name} (fully_async takes any)",
            asked,
        )

    @property
    def _asked_bound(self) -> int | None:
        return self.generate_ahead_steps if self.max_staleness_steps is None else self.max_staleness_steps

    @property
    def staleness_bound(self) -> int:
        """``max_staleness_steps``, or what follows from the schedule where it is null."""
        default = _OWN_BOUNDS.get(self.schedule, _DEFAULT_BOUND)
        return default if self._asked_bound is None else self._asked_bound

    @property
    def max_filtered_in_a_row(self) -> int:
        """Groups; 0 where there is no limit."""
        most = self.fully_async.max_filtered_in_a_row
        return _FILTERED_MINI_BATCHES * self.policy_mini_batch_size if most is None else most

    @property
    def max_concurrent_generation_groups(self) -> int:
        """Groups in flight at once."""
        most = self.policy_mini_batch_size * (self.staleness_bound + 1)
        return self.num_parallel_generation_workers or min(most, 2 * self.policy_mini_batch_size)


@dataclass
class TrainingConfig:
    backend: TrainingBackendName = doc(
        TrainingBackendName.fsdp,
        "fsdp is FSDP2, whose checkpoints load on any number of ranks; deepspeed is ZeRO, whose load on as many as wrote them.",
    )
    deepspeed: DeepSpeedConfig = doc(DeepSpeedConfig, "Of backend=deepspeed.")
    num_workers: int = doc(1, "Ranks.")
    num_ref_workers: int = doc(
        0,
        "Ranks of the reference alone; 0: it lives on the policy workers, which compute its log-probs between their other calls.",
    )
    num_logp_workers: int = doc(
        0,
        "Ranks that recompute log-probs under the newest published weights, for decoupled_ppo; 0: the policy workers do, under the "
        "weights they hold.",
    )
    device: Device = doc(Device.auto, "auto takes cuda where there is one.")
    lr: float = doc(8e-4, "Peak learning rate of AdamW.")
    adam_beta1: float = doc(0.9, "Decay of AdamW's first moment.")
    adam_beta2: float = doc(0.95, "Decay of AdamW's second moment.")
    weight_decay: float = doc(0.0, "Decoupled weight decay of AdamW.")
    lr_schedule: LrSchedule = doc(LrSchedule.linear, "After warm-up, over trainer.num_steps.")
    num_warmup_steps: int = doc(3, "Steps of linear warm-up.")
    max_grad_norm: float = doc(1.0, "Gradient clipping; 0 does not clip.")
    micro_batch_tokens: int = doc(
        4096, "Most tokens, padding included, of one forward on one rank; a longer single sequence goes alone."
    )
    use_sample_packing: bool = doc(
        True,
        "Lay the sequences of a micro-batch end to end, each attending to itself alone, instead of padding them to the longest. A model "
        "that cannot keep them apart is refused.",
    )
    logprobs_chunk_size: int = doc(
        1024,
        "Sampled tokens whose logits exist at once: a micro-batch with more of them computes its logits chunk by chunk, and again in the "
        "backward pass, so that memory does not grow with its length times the vocabulary.",
    )
    mixed_precision: bool = doc(False, "bfloat16 forward and backward over float32 weights.")
    activation_checkpointing: bool = doc(False, "Recompute activations in the backward pass.")
    cpu_offload: bool = doc(
        False,
        "Keep parameters, gradients and the optimizer in the host's memory and step there; a layer is on the GPU while it is computed.",
    )
    step_timeout_s: float = doc(
        1800.0,
        "Deadline of one call to the workers, and of their start; past it they are replaced (see trainer.max_restarts).",
    )
    heartbeat_interval_s: float = doc(5.0, "Seconds between the heartbeats asked of a policy worker while it works.")
    heartbeat_timeout_s: float = doc(
        60.0,
        "Policy workers of which one leaves a heartbeat unanswered for so long (its process is stopped, its machine is gone) are replaced, "
        "see trainer.max_restarts. A thread beside the work answers. At least heartbeat_interval_s.",
    )

    def __post_init__(self) -> None:
        require(self.num_workers >= 1, "training.num_workers", ">= 1", self.num_workers)
        for key in ("num_ref_workers", "num_logp_workers"):
            require(getattr(self, key) >= 0, f"training.{key}", ">= 0", getattr(self, key))
        require(self.lr > 0, "training.lr", "> 0", self.lr)
        for key in ("micro_batch_tokens", "logprobs_chunk_size"):
            require(getattr(self, key) >= 1, f"training.{key}", ">= 1", getattr(self, key))
        require(self.max_grad_norm >= 0, "training.max_grad_norm", ">= 0", self.max_grad_norm)
        require(self.step_timeout_s > 0, "training.step_timeout_s", "> 0", self.step_timeout_s)
        interval_s = self.heartbeat_interval_s
        require(interval_s > 0, "training.heartbeat_interval_s", "> 0", interval_s)
        require(
            self.heartbeat_timeout_s >= interval_s,
            "training.heartbeat_timeout_s",
            f">= training.heartbeat_interval_s ({interval_s:g})",
            self.heartbeat_timeout_s,
        )
        require(self.num_warmup_steps >= 0, "training.num_warmup_steps", ">= 0", self.num_warmup_steps)


@dataclass
class WeightSyncConfig:
    transfer: WeightTransfer = doc(
        WeightTransfer.auto, "shm: safetensors in shared memory, for trainer and engines of one machine; auto takes it."
    )
    send_bucket_mb: int = doc(
        512, "Most that is sent at a time in a publish, MiB; a larger tensor is sent in several pieces."
    )
    load_bucket_mb: int = doc(
        512,
        "Most of a publish that an engine hands to its model, or keeps mapped, at a time, MiB; a larger tensor goes alone.",
    )
    dual_buffer: bool = doc(
        True,
        "Send a version while the one before is being loaded or served, and let engines on CPUs prepare it in memory of their own, so that "
        "the pause is a swap: up to three versions are in shared memory, and an engine holds its weights twice for a while. false: one "
        "version, sent when the one before is loaded and its buckets are deleted; longer pauses, and engines that come up wait for the "
        "version being sent.",
    )
    verify_checksums: bool = doc(
        False,
        "Ask every engine for its checksum after each publish and stop when they differ (after the first publish it is always done).",
    )

    max_retries: int = doc(
        2,
        "Times that a publish which failed (an engine refuses, shared memory is full) is tried again; then the run ends, with a "
        "checkpoint.",
    )

    def __post_init__(self) -> None:
        require(self.send_bucket_mb >= 1, "weight_sync.send_bucket_mb", ">= 1", self.send_bucket_mb)
        require(self.load_bucket_mb >= 1, "weight_sync.load_bucket_mb", ">= 1", self.load_bucket_mb)
        require(self.max_retries >= 0, "weight_sync.max_retries", ">= 0", self.max_retries)


@dataclass
class EvaluationConfig:
    num_prompts: int = doc(256, "Held-out prompts used before and after training.")
    num_prompts_while_training: int = doc(96, "Held-out prompts used between.")
    n_samples_per_prompt: int = doc(1, "Answers per held-out prompt.")
    max_concurrent: int | None = doc(
        None, "Held-out prompts played at once, beside training's groups; null: as many as the engines run."
    )
    pin_version: bool = doc(
        True,
        "While training, play held-out prompts under one version: the next publish waits until they are through, and the trainer with it "
        "where it is faster. False publishes meanwhile: their tokens are then of several versions.",
    )
    sampling: SamplingConfig = doc(SamplingConfig, "How held-out prompts are sampled.")

    def __post_init__(self) -> None:
        require(self.num_prompts >= 0, "evaluation.num_prompts", ">= 0", self.num_prompts)
        limit = self.max_concurrent
        require(limit is None or limit >= 1, "evaluation.max_concurrent", ">= 1 or null", limit)
        require(self.n_samples_per_prompt >= 1, "evaluation.n_samples_per_prompt", ">= 1", self.n_samples_per_prompt)


@dataclass
class ServerConfig:
    enabled: bool | None = doc(
        None, "Serve the OpenAI-compatible endpoint while training; null: when the generator needs it."
    )
    host: str = doc("127.0.0.1", "Address to bind; one that is not loopback needs server.api_key.")
    port: int = doc(0, "Of the first front end, the others take those after it; 0 takes free ones.")
    api_key: str | None = doc(None, "Bearer key; null makes one and writes it to the run directory (mode 600).")
    model_name: str = doc("policy", "Name in /v1/models and in replies.")
    max_body_bytes: int = doc(16 * 2**20, "Larger requests get 413.")
    keep_alive_timeout_s: int = doc(75, "Of idle connections; clients break below 75.")
    shutdown_timeout_s: int = doc(30, "What open requests and streams get to finish when the endpoint stops, seconds.")
    num_front_ends: int = doc(1, "Processes that serve, each on a port of its own; a session belongs to one of them.")
    max_concurrent_requests: int = doc(4096, "Requests sampled at once per front end; more wait in line.")
    max_concurrent_requests_per_session: int = doc(16, "The same for one session.")
    engine_wait_s: float = doc(
        120.0, "With no engine left, requests are held for so long; then they get 503, with a Retry-After."
    )
    heartbeat_interval_s: float = doc(5.0, "Seconds between the heartbeats asked of a front end.")
    heartbeat_timeout_s: float = doc(
        60.0,
        "A front end that leaves a heartbeat unanswered for so long is replaced, on the same port. Its sessions are lost with it: their "
        "samples are played again.",
    )
    max_restarts: int = doc(10, "Times each front end is replaced, because it died or did not answer.")
    tool_call_parser: str = doc(
        "auto", "vLLM's parser of tool calls by name; auto takes what the chat template calls for, none parses nothing."
    )
    reasoning_parser: str = doc("auto", "vLLM's parser of reasoning by name; auto and none as above.")
    reasoning_policy: ReasoningPolicy = doc(
        ReasoningPolicy.keep,
        "What a later turn of a session sees of earlier reasoning: keep (the tokens as sampled) or template (what the chat template "
        "leaves of it; turns whose prompt thereby changes begin a branch).",
    )
    branch_policy: BranchPolicyName = doc(
        BranchPolicyName.all,
        "Which branches of a session whose history was rewritten are trained: all, the longest, or that of the last turn.",
    )
    session_idle_timeout_s: float = doc(600.0, "A session without a request for so long has expired.")
    session_lifetime_s: float = doc(7200.0, "A session older than this has expired.")
    session_max_turns: int = doc(1000, "Turns sampled in one session; the next is refused with 401.")
    session_max_tokens: int = doc(1_000_000, "Tokens sampled in one session; the next turn is refused with 401.")

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "server.port", "in [0, 65535]", self.port)
        for key in (
            "num_front_ends",
            "max_concurrent_requests",
            "max_concurrent_requests_per_session",
            "session_max_turns",
            "session_max_tokens",
        ):
            require(getattr(self, key) >= 1, f"server.{key}", ">= 1", getattr(self, key))
        require(self.engine_wait_s >= 0, "server.engine_wait_s", ">= 0", self.engine_wait_s)
        require(self.max_restarts >= 0, "server.max_restarts", ">= 0", self.max_restarts)
        for key in ("session_idle_timeout_s", "session_lifetime_s", "heartbeat_interval_s"):
            require(getattr(self, key) > 0, f"server.{key}", "> 0", getattr(self, key))
        require(
            self.heartbeat_timeout_s >= self.heartbeat_interval_s,
            "server.heartbeat_timeout_s",
            f">= server.heartbeat_interval_s ({self.heartbeat_interval_s:g})",
            self.heartbeat_timeout_s,
        )
        require(self.shutdown_timeout_s >= 0, "server.shutdown_timeout_s", ">= 0", self.shutdown_timeout_s)
        loopback = self.host in ("127.0.0.1", "localhost", "::1")
        require(
            loopback or bool(self.api_key),
            "server.api_key",
            f"set when server.host={self.host} is not loopback",
            self.api_key,
        )


@dataclass
class PlacementConfig:
    ray_address: str = doc("local", "local starts a Ray of the run's own; auto or host:port joins one.")
    groups: list[list[str]] | None = doc(
        None,
        "Stages that share devices, such as [[policy,logp],[ref],[generate]]: policy (training, and what a publish gathers), logp "
        "(recomputed log-probs), ref (reference log-probs), generate (engines). Those of a group take turns; groups overlap. "
        "Null: each actor reserves what num_*_per_engine and num_*_per_worker say.",
    )
    ratios: list[float] | None = doc(
        None,
        "Each group's part of the cluster's devices (GPUs; CPU slots where nothing runs on GPUs), summing to 1; rounded to whole "
        "devices.",
    )
    devices: list[int] | None = doc(None, "Devices of each group, in place of ratios.")
    num_cpu_slots: int | None = doc(
        None,
        "CPU slots of a Ray of the run's own; null: one per core. Slots are counted, not enforced: more of them than cores share these.",
    )
    shortest_generate_turn_s: float = doc(
        1.0,
        "Seconds that a turn of generation lasts at least, where its engines share devices (placement.groups), have requests, and others "
        "wait: what bounds how often devices change hands, and how long training waits.",
    )
    num_cpus_per_engine: float = doc(0.0, "CPU slots Ray reserves per engine.")
    num_gpus_per_engine: float | None = doc(None, "GPUs per engine; null: engine.tensor_parallel_size on cuda, else 0.")
    num_cpus_per_worker: float = doc(0.0, "CPU slots Ray reserves per policy worker.")
    num_gpus_per_worker: float | None = doc(None, "GPUs per policy worker; null: 1 on cuda, else 0.")

    def __post_init__(self) -> None:
        slots = self.num_cpu_slots
        require(slots is None or slots >= 1, "placement.num_cpu_slots", ">= 1 or null", slots)
        shortest_s = self.shortest_generate_turn_s
        require(shortest_s >= 0, "placement.shortest_generate_turn_s", ">= 0", shortest_s)


@dataclass
class LoggingConfig:
    tensorboard: bool = doc(True, "Write TensorBoard events to the run directory.")
    wandb: bool = doc(False, "Log to Weights & Biases (extra skyrl-async[wandb]).")
    wandb_project: str = doc("skyrl_async", "Project of the W&B run.")
    console: bool = doc(True, "Live progress display (plain lines where standard output is no terminal).")
    trace: bool = doc(True, "Write a Chrome/Perfetto trace of the stages.")
    trained_groups: bool = doc(
        True, "Write trained_groups.jsonl: one line per trained group, with its versions, rewards and lengths."
    )
    trained_tokens: bool = doc(False, "Have it hold every token with its behavior log-prob too.")
    level: str = doc("INFO", "Of the run's log file and standard error.")


@dataclass
class Config:
    task: TaskConfig = doc(TaskConfig, "What is learned.")
    policy: PolicyConfig = doc(PolicyConfig, "What learns.")
    engine: EngineConfig = doc(EngineConfig, "What samples.")
    training: TrainingConfig = doc(TrainingConfig, "What computes gradients.")
    generator: GeneratorConfig = doc(GeneratorConfig, "How prompts become trajectories.")
    trainer: TrainerConfig = doc(TrainerConfig, "The asynchronous loop.")
    evaluation: EvaluationConfig = doc(EvaluationConfig, "Held-out prompts.")
    weight_sync: WeightSyncConfig = doc(WeightSyncConfig, "How weights reach the engines.")
    server: ServerConfig = doc(ServerConfig, "The endpoint.")
    placement: PlacementConfig = doc(PlacementConfig, "What Ray reserves.")
    logging: LoggingConfig = doc(LoggingConfig, "Where figures go.")
    cache_dir: str = doc("~/.cache/skyrl_async", "Where warm-started policies are kept between runs.")

    @property
    def serves_endpoint(self) -> bool:
        """Whether this run opens the endpoint."""
        return self.generator.needs_endpoint if self.server.enabled is None else self.server.enabled
