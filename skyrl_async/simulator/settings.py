"""The sizes and speeds of a simulated run."""

from dataclasses import dataclass

from skyrl_async.rollout.failed_samples import OnFailedSamples
from skyrl_async.runtime.outages import NO_BACKOFF, Backoff
from skyrl_async.types import PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What is simulated; seconds are virtual."""

    mini_batch_size: int = 8
    """Groups per step."""
    group_size: int = 2
    """Trajectories per group."""
    max_staleness_steps: int = 2
    staleness_policy: str = "wait"
    num_steps: int | None = 20
    num_prompts: int = 64
    num_epochs: int | None = None
    num_workers: int | None = None
    """Groups in flight; None: as many as the staleness bound allows."""
    limits_buffered_groups: bool = False
    num_engines: int = 2
    tokens_per_second: float = 100.0
    half_speed_requests: float = 170.0
    max_num_seqs: int | None = None
    """Requests running at once in an engine; None: no limit."""
    block_tokens: int = 16
    """Tokens per block of a stream; larger blocks simulate faster."""
    oldest_weight: float | None = None
    """Weight of the oldest requests, see ``inference.placement``; None: the default of real runs, 1: all alike."""
    mean_tokens: float = 1000.0
    sigma: float = 0.8
    """Sigma of the lognormal lengths."""
    longest_over_mean: float = 8.0
    """Longest length, in means."""
    seconds_per_token: float = 0.0
    """Seconds of training per token."""
    step_seconds: float = 0.0
    stage_seconds: float = 0.0
    load_seconds: float = 0.0
    engine_wait_s: float | None = 0.0
    """How long requests wait when there is no engine; None: until one comes."""
    gather_seconds: float = 0.0
    send_seconds: float = 0.0
    double_buffer: bool = True
    """As ``weight_sync.double_buffer``."""
    publish_every_steps: int = 1
    is_one_step_off: bool = False
    """Schedule ``one_step_off``; set ``max_staleness_steps=1`` and ``stream_mini_batch=False`` with it."""
    max_publish_retries: int = 0
    stream_mini_batch: bool = True
    loss_reduction: str = "token_mean"
    deterministic: bool = False
    pause_mode: PauseMode = PauseMode.ABORT
    checkpoint_interval_steps: int = 0
    eval_interval_steps: int = 0
    num_eval_prompts: int = 0
    """Prompts per evaluation before, during and after training."""
    pins_eval_version: bool = True
    evaluates_before_training: bool = True
    evaluates_at_the_end: bool = True
    check_interval_steps: int = 0
    """Steps between comparisons of the engines with the policy; 0: none."""
    validates_only: bool = False
    rollout_timeout_s: float = 1e9
    max_retries: int = 0
    max_failed_fraction: float = 0.5
    on_failed_samples: OnFailedSamples = OnFailedSamples.TRAIN_REST
    backoff: Backoff = NO_BACKOFF
    masks_overlong: bool = False
    sample_full_batch: bool = False
    max_filtered_in_a_row: int = 0
    shared_by: tuple[str, ...] = ()
    """Stages that share devices: ``policy``, ``ref``, ``logp``, ``generate``."""
    min_generation_slice_s: float = 1.0
    stall_warning_s: float | None = None
    """Seconds without progress after which the watchdog reports; None watches nothing."""
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        """Longest length, in tokens."""
        return round(self.longest_over_mean * self.mean_tokens)
