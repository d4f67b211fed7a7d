"""Puts the real trainer, staleness manager, buffer, workers, dataloader, client and publisher over modelled engines and a modelled policy.

The test harness of the training loop, and the planner of its capacity.
"""

import asyncio
import math
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_async.algorithms.advantages import AdvantageEstimator
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.composition.algorithms import Advantages
from skyrl_async.composition.data import Prompts
from skyrl_async.composition.parts import Parts, make_trainer, placement
from skyrl_async.composition.time_sharing import leasing_policy, on_leased_devices
from skyrl_async.config.schema.algorithm import AlgorithmConfig
from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.config.schema.fields import from_section
from skyrl_async.config.schema.generator import GeneratorConfig, OnFailedSamples, SamplingConfig
from skyrl_async.config.schema.run import Config, EvaluationConfig
from skyrl_async.config.schema.trainer import FullyAsyncConfig, Schedule, StalenessPolicy, TrainerConfig
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.record.ended import CountsSamples, RecordsSamples
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.generator import Generator
from skyrl_async.rollout.preparation import Prepare
from skyrl_async.runtime.device_leases import groups_by_member
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.simulator.models import KnownGroup, ModelledEngine, ModelledGenerator, ModelledPolicy
from skyrl_async.simulator.shared_machine import ENGINE_CORES, TRAINING_CORES, SharedMachine
from skyrl_async.trainer.run import TrainerCallbacks
from skyrl_async.types import PauseMode, Prompt
from skyrl_async.weight_sync.engine_time_sharing import GENERATE, EngineTimeSharing
from skyrl_async.weight_sync.publisher import WeightPublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What is simulated; seconds are virtual."""

    mini_batch_size: int = 8
    """Groups per step."""
    train_batch_size: int | None = None
    """Groups per batch; None: one mini-batch."""
    update_epochs_per_batch: int = 1
    group_size: int = 2
    """Trajectories per group."""
    max_staleness_steps: int = 2
    staleness_policy: str = "wait"
    staleness_window_groups: int | None = None
    num_steps: int | None = 20
    num_prompts: int = 64
    num_epochs: int | None = None
    num_workers: int | None = None
    """Groups in flight; None: as many as the staleness bound allows."""
    count_buffered_as_in_flight: bool = False
    num_engines: int = 2
    tokens_per_second: float = 100.0
    half_speed_requests: float = 170.0
    max_num_seqs: int | None = None
    """Most requests that run in an engine at a time; None: all."""
    prefill_seconds: float = 0.0
    """Seconds of each request, also one that is continued; see ``ModelledEngine``."""
    known_groups: tuple[KnownGroup, ...] = ()
    """Groups to draw from in place of lognormal lengths; see ``ModelledGenerator``."""
    call_seconds: float = 0.0
    """What every call of an engine takes besides the engine."""
    shared_cores: int | None = None
    """Cores of the one machine on which trainer and engines compute, see ``SharedMachine``; None: each has its own."""
    engine_cores: float = ENGINE_CORES
    training_cores: float = TRAINING_CORES
    """What an engine takes of them, and training."""
    block_tokens: int = 16
    """Tokens per block of a stream; larger blocks simulate faster."""
    continues_aborted: bool = False
    """Whether engines continue by themselves what a pause aborts; see ``ModelledEngine``."""
    carries_tokens: bool = False
    """Answers come in blocks, as from engines in other processes."""
    oldest_weight: float | None = None
    """Weight of the oldest requests, see ``inference.placement``; None: the default of real runs, 1: all alike."""
    mean_tokens: float = 1000.0
    sigma: float = 0.8
    """Sigma of the lognormal lengths."""
    longest_over_mean: float = 8.0
    """Longest length, in means."""
    seconds_per_token: float = 0.0
    """Seconds of training per token."""
    seconds_per_group: float = 0.0
    """Seconds of training per group, whatever its length."""
    prompt_tokens: float = 0.0
    """Tokens of a prompt, each of which is trained in the time of a response's token."""
    step_seconds: float = 0.0
    stage_seconds: float = 0.0
    load_seconds: float = 0.0
    idle_stage_seconds: float | None = None
    idle_load_seconds: float | None = None
    """The same of an engine without a request; None: as long."""
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
    stream_mini_batch: bool | None = None
    """As ``trainer.stream_mini_batch``."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """As ``trainer.algorithm``; advantages are the argument of ``Simulation``."""
    deterministic: bool = False
    pause_mode: PauseMode = PauseMode.ABORT
    checkpoint_interval_steps: int = 0
    eval_interval_steps: int = 0
    num_eval_prompts: int = 0
    """Prompts per evaluation before, during and after training."""
    pins_eval_version: bool = True
    eval_before_train: bool = True
    eval_at_end: bool = True
    logprob_probe_interval_steps: int = 0
    """Steps between comparisons of the engines with the policy; 0: none."""
    eval_only: bool = False
    rollout_timeout_s: float = 1e9
    max_retries: int = 0
    max_failed_fraction: float = 0.5
    on_failed_samples: OnFailedSamples = OnFailedSamples.train_rest
    retry_backoff_s: float = 0.0
    max_retry_backoff_s: float = 0.0
    apply_overlong_filtering: bool = False
    sample_full_batch: bool = False
    max_filtered_in_a_row: int = 0
    shared_by: tuple[tuple[str, ...], ...] = ()
    """Groups of stages that share devices, such as ``(("policy", "ref", "logp", "generate"),)``."""
    on_policy_workers: tuple[str, ...] = ()
    """Stages between the reward and training that the policy's workers compute."""
    min_generation_slice_s: float = 1.0
    stall_warning_s: float = math.inf
    """Seconds without progress after which the watchdog reports."""
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        """Longest length, in tokens."""
        if self.known_groups:
            return max(num_tokens for group in self.known_groups for turns in group.samples for num_tokens, _ in turns)
        return round(self.longest_over_mean * self.mean_tokens)


def lognormal_length(
    mean: float, sigma: float, seed: int, longest_over_mean: float = 8.0
) -> Callable[[tuple[int, ...], int | None], int]:
    """Return lengths that depend only on the prompt and the seed: lognormal with this mean, cut at ``longest_over_mean`` means."""
    location = math.log(mean) - sigma**2 / 2
    longest = round(longest_over_mean * mean)

    def length(prompt: tuple[int, ...], request_seed: int | None) -> int:
        drawn = random.Random(f"{seed}-{prompt}-{request_seed}").lognormvariate(location, sigma)
        return max(1, min(round(drawn), longest))

    return length


_MEMBERS = {"ref_logp": "ref", "teacher_logp": "teacher", "values": "critic"}
"""Stage -> which workers compute it, where the name is another."""


def _as_long_as_asked(prompt: tuple[int, ...], request_seed: int | None) -> int:
    return sys.maxsize


class Simulation:
    """The parts of a simulated run; made inside ``run_in_virtual_time``.

    Args:
        settings: what is simulated.
        checkpoint_dir: for checkpoints; None writes none.
        max_checkpoints_to_keep: 0 keeps all.
        generator_over: makes the generator, of the client; None: a ``ModelledGenerator``.
        record: takes every group at its end.
        shutdown: ends the run early.
        on_step: called with each step once it is logged.
        engine_around: makes what the client uses of each engine.
        make_buffer: takes the most groups to hold at a time.
        advantages: the trainer's; the default gives every sample 0.
        prepare_with: makes what finished groups go through after their reward.
        trace: gets the spans of the run.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        *,
        checkpoint_dir: Path | None = None,
        max_checkpoints_to_keep: int = 0,
        generator_over: Callable[[InferenceEngineClient], Generator] | None = None,
        record: RecordsSamples | None = None,
        shutdown: ShutdownRequest | None = None,
        on_step: Callable[[int], object] = lambda step: None,
        engine_around: Callable[[ModelledEngine], InferenceEngine] = lambda engine: engine,
        make_buffer: Callable[[int], GroupBuffer] = GroupBuffer,
        advantages: Advantages | None = None,
        prepare_with: Callable[[ModelledPolicy], Mapping[str, Prepare]] = lambda policy: {},
        trace: Trace | None = None,
    ) -> None:
        self._settings, self._on_step = settings, on_step
        self._clock = asyncio.get_running_loop().time
        self._trace = trace or Trace(None, self._clock)
        config = _config(settings, max_checkpoints_to_keep)
        questions = [({"role": "user", "content": str(i)},) for i in range(settings.num_prompts)]
        prompts = tuple(Prompt(uid=f"p{i}", messages=q, env_class="modelled") for i, q in enumerate(questions))
        length = lognormal_length(settings.mean_tokens, settings.sigma, settings.seed, settings.longest_over_mean)
        if settings.known_groups:
            length = _as_long_as_asked
        machine = None if settings.shared_cores is None else SharedMachine(settings.shared_cores)
        self.engines = [
            from_section(ModelledEngine, settings, name=f"engine-{i}", num_tokens_of=length, machine=machine)
            for i in range(settings.num_engines)
        ]
        self.client = InferenceEngineClient(
            [engine_around(engine) for engine in self.engines],
            max_model_len=settings.max_tokens + 1000,
            carries_tokens=settings.carries_tokens,
            engine_wait_s=settings.engine_wait_s,
            placement=placement(config),
        )
        self.policy = from_section(ModelledPolicy, settings, machine=machine)
        self.device_groups = groups_by_member(settings.shared_by)
        self.engine_time_sharing = self._time_sharing() if GENERATE in self.device_groups else None
        self.publisher = self._make_publisher()
        parts = Parts(
            prompts=Prompts(train=prompts, held_out=prompts),
            client=self.client,
            generator=generator_over(self.client)
            if generator_over
            else ModelledGenerator(self.client, settings.known_groups, settings.call_seconds),
            policy=self.policy,
            device_groups=self.device_groups,
            publisher=self.publisher,
            shared_cores=settings.shared_cores or 0,
        )
        self.logged: list[tuple[int, dict[str, float]]] = []
        """(step, values) as the trainer logged them."""
        self.trainer = make_trainer(
            config,
            parts,
            checkpoint_dir=checkpoint_dir,
            callbacks=TrainerCallbacks(log=self._log, record=record or CountsSamples()),
            trace=self._trace,
            shutdown=shutdown,
            advantages=advantages
            or Advantages(
                of_stage=AdvantageEstimator(compute=lambda rewards: [0.0] * len(rewards)), of_step=StepAdvantages()
            ),
            # A stage leases devices as separate workers of its own would.
            works={
                name: on_leased_devices(
                    work,
                    "policy" if name in settings.on_policy_workers else _MEMBERS.get(name, name),
                    self.device_groups,
                )
                for name, work in prepare_with(self.policy).items()
            },
            make_buffer=make_buffer,
        )
        run = self.trainer._run
        self.dataloader, self.staleness = run.dataloader, run.staleness
        self.buffer, self.workers = run.buffer, run.workers

    async def run(self) -> None:
        """Run the trainer, with time-sharing of devices beside it where they are shared."""
        async with self.engine_time_sharing.running() if self.engine_time_sharing else nullcontext():
            await self.trainer.run()

    def _log(self, step: int, values: dict[str, float]) -> None:
        self.logged.append((step, values))
        self._on_step(step)

    def _time_sharing(self) -> EngineTimeSharing:
        return EngineTimeSharing(
            self.client,
            self.device_groups[GENERATE],
            min_slice_s=self._settings.min_generation_slice_s,
            is_busy=lambda: self.client.pool.is_busy,
            trace=self._trace,
            clock=self._clock,
        )

    def _make_publisher(self) -> WeightPublisher:
        return from_section(
            WeightPublisher,
            self._settings,
            client=self.client,
            policy=leasing_policy(self.policy, self.device_groups),
            directory=Path("unused"),
            bucket_bytes=1,
            max_retries=self._settings.max_publish_retries,
            hold_engines=self.engine_time_sharing.holding if self.engine_time_sharing else nullcontext,
            trace=self._trace,
            clock=self._clock,
        )


def _config(settings: SimulationSettings, max_checkpoints_to_keep: int) -> Config:
    """Return the configuration of the real run with these settings."""
    trainer = from_section(
        TrainerConfig,
        settings,
        schedule=Schedule.one_step_off if settings.is_one_step_off else Schedule.fully_async,
        staleness_policy=StalenessPolicy[settings.staleness_policy],
        policy_mini_batch_size=settings.mini_batch_size,
        num_epochs=settings.num_epochs or sys.maxsize,
        fully_async=from_section(FullyAsyncConfig, settings, max_staleness_steps=None),
        max_checkpoints_to_keep=max_checkpoints_to_keep,
    )
    # Unlike a run, a simulation may have fewer groups in flight than a mini-batch.
    trainer.num_parallel_generation_workers = settings.num_workers or trainer.most_open_groups
    sampling = SamplingConfig(max_tokens=settings.max_tokens)
    generator = from_section(GeneratorConfig, settings, n_samples_per_prompt=settings.group_size, sampling=sampling)
    evaluation = EvaluationConfig(
        num_prompts=settings.num_eval_prompts,
        num_prompts_while_training=settings.num_eval_prompts,
        max_concurrent=16,
        pin_version=settings.pins_eval_version,
        sampling=sampling,
    )
    engine = EngineConfig(num_engines=settings.num_engines, oldest_request_weight=settings.oldest_weight)
    return Config(trainer=trainer, generator=generator, evaluation=evaluation, engine=engine)
