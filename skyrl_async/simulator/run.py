"""Puts the real trainer, staleness manager, buffer, workers, dataloader, client and publisher over modelled engines and a modelled policy.

The test harness of the training loop, and the planner of its capacity.
"""

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_async.algorithms.advantages import StepAdvantages
from skyrl_async.algorithms.aggregation import Aggregation
from skyrl_async.checkpoint.checkpointer import Checkpointer
from skyrl_async.composition.time_sharing import engine_time_sharing, lease_of, leasing_policy, on_leased_devices
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.placement import PlacementSettings, default_oldest_weight
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.finished_group_filter import SignalSettings
from skyrl_async.rollout.generator import Generator
from skyrl_async.rollout.preparation import Prepare, reward_with
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.rollout.staleness_policies import staleness_policy
from skyrl_async.rollout.worker import GenerationWorkers, RolloutSettings
from skyrl_async.runtime.device_leases import DeviceGroup, groups_by_member
from skyrl_async.runtime.outages import Deadlines
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.simulator.models import ModelledEngine, ModelledGenerator, ModelledPolicy
from skyrl_async.simulator.settings import SimulationSettings
from skyrl_async.trainer.evaluator import Evaluator
from skyrl_async.trainer.fully_async import FullyAsyncTrainer
from skyrl_async.trainer.run import (
    AdmissionSettings,
    Run,
    TrainerCallbacks,
    TrainerSettings,
    ValidationSettings,
    make_run,
)
from skyrl_async.types import Group, Prompt, SamplingParams
from skyrl_async.weight_sync.engine_time_sharing import EngineTimeSharing
from skyrl_async.weight_sync.publisher import WeightPublisher

__all__ = ["Simulation", "SimulationSettings", "build_simulation", "lognormal_length"]


@dataclass(slots=True)
class Simulation:
    """The parts of a simulated run."""

    trainer: FullyAsyncTrainer
    engines: list[ModelledEngine]
    policy: ModelledPolicy
    client: InferenceEngineClient
    dataloader: _AsyncDataloader
    run_parts: Run
    publisher: WeightPublisher
    device_groups: Mapping[str, DeviceGroup]
    engine_time_sharing: EngineTimeSharing | None
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step, values) as the trainer logged them."""

    @property
    def staleness(self) -> _AsyncStalenessManager:
        """Part of the trainer's run."""
        return self.run_parts.staleness

    @property
    def buffer(self) -> GroupBuffer:
        """Part of the trainer's run."""
        return self.run_parts.buffer

    @property
    def workers(self) -> GenerationWorkers:
        """Part of the trainer's run."""
        return self.run_parts.workers

    async def run(self) -> None:
        """Run the trainer, with time-sharing of devices beside it where they are shared."""
        async with self.engine_time_sharing.running() if self.engine_time_sharing else nullcontext():
            await self.trainer.run()


class _NoText:
    """Modelled tokens mean nothing."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return ""


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


def build_simulation(
    settings: SimulationSettings,
    *,
    checkpoint_dir: Path | None = None,
    max_checkpoints_to_keep: int = 0,
    generator_over: Callable[[InferenceEngineClient], Generator] = ModelledGenerator,
    log_groups: Callable[[int, Sequence[Group]], None] = lambda version, groups: None,
    shutdown: ShutdownRequest | None = None,
    engine_around: Callable[[ModelledEngine], InferenceEngine] = lambda engine: engine,
    make_buffer: Callable[[int], GroupBuffer] = GroupBuffer,
    advantages: Callable[[Sequence[float]], Sequence[float]] | None = lambda rewards: [0.0] * len(rewards),
    step_advantages: StepAdvantages | None = None,
    prepare_with: Callable[[ModelledPolicy], Mapping[str, Prepare]] = lambda policy: {},
    trace: Trace | None = None,
) -> Simulation:
    """Make every part; call inside ``run_in_virtual_time``.

    ``engine_around`` makes what the client uses of each engine, ``make_buffer`` is given the most groups that are held.
    ``advantages`` and ``step_advantages`` are the trainer's; ``prepare_with`` makes what finished groups go through after them.
    """
    loop = asyncio.get_running_loop()
    trace = trace or Trace(None, loop.time)
    engines = _engines(settings)
    client = InferenceEngineClient(
        [engine_around(engine) for engine in engines],
        tokenizer=_NoText(),
        max_model_len=settings.max_tokens + 1000,
        engine_wait_s=settings.engine_wait_s,
        placement=_placement(settings),
    )
    policy = ModelledPolicy(
        seconds_per_token=settings.seconds_per_token,
        step_seconds=settings.step_seconds,
        gather_seconds=settings.gather_seconds,
        send_seconds=settings.send_seconds,
    )
    device_groups = groups_by_member([settings.shared_by] if settings.shared_by else [])
    leasing = leasing_policy(policy, device_groups)
    time_sharing = engine_time_sharing(
        device_groups,
        client,
        min_slice_s=settings.min_generation_slice_s,
        is_busy=lambda: client.pool.is_busy,
        trace=trace,
        clock=loop.time,
    )
    prompts = _prompts(settings)
    dataloader = _AsyncDataloader(prompts, seed=settings.seed, num_epochs=settings.num_epochs)
    generator = generator_over(client)
    evaluator = _evaluator(settings, generator, prompts, client.deadlines)
    publisher = WeightPublisher(
        client=client,
        policy=leasing,
        directory=Path("unused"),
        bucket_bytes=1,
        double_buffer=settings.double_buffer,
        pause_mode=settings.pause_mode,
        max_retries=settings.max_publish_retries,
        hold_engines=time_sharing.holding if time_sharing else nullcontext,
        trace=trace,
        clock=loop.time,
    )
    logged: list[tuple[int, dict[str, float]]] = []
    run = make_run(
        _trainer_settings(settings),
        dataloader=dataloader,
        client=client,
        generator=generator,
        evaluator=evaluator,
        callbacks=TrainerCallbacks(log=lambda step, values: logged.append((step, values)), log_groups=log_groups),
        trace=trace,
        shutdown=shutdown,
        make_buffer=make_buffer,
    )
    trainer = FullyAsyncTrainer(
        run,
        policy=leasing,
        publisher=publisher,
        prepare={
            "reward": reward_with(advantages),
            **{name: _on_leased_devices(name, work, device_groups) for name, work in prepare_with(policy).items()},
        },
        evaluator=evaluator,
        checkpointer=Checkpointer(checkpoint_dir, max_to_keep=max_checkpoints_to_keep) if checkpoint_dir else None,
        step_advantages=step_advantages,
        lease=lease_of("policy", device_groups),
    )
    return Simulation(
        trainer=trainer,
        engines=engines,
        policy=policy,
        client=client,
        dataloader=dataloader,
        run_parts=run,
        publisher=publisher,
        device_groups=device_groups,
        engine_time_sharing=time_sharing,
        logged=logged,
    )


def _on_leased_devices(stage: str, work: Prepare, device_groups: Mapping[str, DeviceGroup]) -> Prepare:
    """Lease devices as separate workers of the stage would."""
    return on_leased_devices(work, {"ref_logp": "ref"}.get(stage, stage), device_groups)


def _placement(settings: SimulationSettings) -> PlacementSettings | None:
    weight = settings.oldest_weight
    if weight is None:
        is_waited_for = staleness_policy(settings.staleness_policy).holds_back
        weight = default_oldest_weight(settings.max_staleness_steps, is_waited_for=is_waited_for)
    if settings.num_engines == 1 or settings.max_staleness_steps == 0 or weight == 1:
        return None
    return PlacementSettings(oldest_weight=weight, oldest_age=settings.max_staleness_steps * settings.mini_batch_size)


def _engines(settings: SimulationSettings) -> list[ModelledEngine]:
    return [
        ModelledEngine(
            f"engine-{i}",
            num_tokens_of=lognormal_length(
                settings.mean_tokens, settings.sigma, settings.seed, settings.longest_over_mean
            ),
            tokens_per_second=settings.tokens_per_second,
            half_speed_requests=settings.half_speed_requests,
            stage_seconds=settings.stage_seconds,
            load_seconds=settings.load_seconds,
            max_num_seqs=settings.max_num_seqs,
            block_tokens=settings.block_tokens,
        )
        for i in range(settings.num_engines)
    ]


def _prompts(settings: SimulationSettings) -> list[Prompt]:
    return [
        Prompt(uid=f"p{i}", messages=({"role": "user", "content": str(i)},), env_class="modelled")
        for i in range(settings.num_prompts)
    ]


def _rollout_settings(settings: SimulationSettings) -> RolloutSettings:
    return RolloutSettings(
        num_samples=settings.group_size,
        sampling=SamplingParams(max_tokens=settings.max_tokens),
        seed=settings.seed,
        max_retries=settings.max_retries,
        max_failed_fraction=settings.max_failed_fraction,
        timeout_s=settings.rollout_timeout_s,
        on_failed_samples=settings.on_failed_samples,
        backoff=settings.backoff,
        requeues_groups=staleness_policy(settings.staleness_policy).drops_groups,
        signal=SignalSettings(max_in_a_row=settings.max_filtered_in_a_row) if settings.sample_full_batch else None,
        masks_overlong=settings.masks_overlong,
    )


def _evaluator(
    settings: SimulationSettings, generator: Generator, prompts: list[Prompt], deadlines: Deadlines
) -> Evaluator:
    return Evaluator(
        generator=generator,
        prompts=prompts,
        num_samples=1,
        sampling=SamplingParams(max_tokens=settings.max_tokens),
        max_concurrent=16,
        max_retries=settings.max_retries,
        timeout_s=settings.rollout_timeout_s,
        deadlines=deadlines,
    )


def _trainer_settings(settings: SimulationSettings) -> TrainerSettings:
    return TrainerSettings(
        admission=AdmissionSettings(
            max_concurrent_groups=settings.num_workers or settings.mini_batch_size * (settings.max_staleness_steps + 1),
            max_staleness_steps=settings.max_staleness_steps,
            limits_buffered_groups=settings.limits_buffered_groups,
            admits_whole_batches=settings.is_one_step_off,
        ),
        rollout=_rollout_settings(settings),
        stall_warning_s=settings.stall_warning_s,
        mini_batch_size=settings.mini_batch_size,
        num_steps=settings.num_steps,
        staleness_policy=staleness_policy(settings.staleness_policy),
        stream_mini_batch=settings.stream_mini_batch,
        deterministic=settings.deterministic,
        validation=ValidationSettings(
            interval_steps=settings.eval_interval_steps,
            num_prompts=settings.num_eval_prompts,
            num_prompts_while_training=settings.num_eval_prompts,
            pins_version=settings.pins_eval_version,
            before_training=settings.evaluates_before_training,
            at_the_end=settings.evaluates_at_the_end,
        ),
        checkpoint_interval_steps=settings.checkpoint_interval_steps,
        check_interval_steps=settings.check_interval_steps,
        publish_every_steps=settings.publish_every_steps,
        publishes_between_batches=settings.is_one_step_off or settings.publishes_between_batches,
        validates_only=settings.validates_only,
        aggregation=Aggregation(name=settings.loss_reduction),
    )
