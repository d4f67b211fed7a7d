"""The parts of a run that live in the driver: generator, evaluator, trainer.

This file decides which parts a configuration asks for, and hands them the configuration or the sections that they read.
"""

import contextlib
import importlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol, cast

from skyrl_async.chat import ChatRenderer
from skyrl_async.checkpoint.checkpointer import Checkpointer
from skyrl_async.composition.algorithms import Advantages, check_reward_shaping, make_advantages, reward_shapes
from skyrl_async.composition.data import Prompts, environment_factory, epoch_plan
from skyrl_async.composition.logprobs import LogprobParts, stage_works
from skyrl_async.composition.processes import Endpoint
from skyrl_async.composition.teachers import Teacher, teacher_work
from skyrl_async.composition.time_sharing import lease_of, lease_values, leasing_policy
from skyrl_async.config.schema.generator import GeneratorKind
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.task import HARBOR_TASK
from skyrl_async.data.dataloader import _AsyncDataloader
from skyrl_async.generators.agent.harness import Harness
from skyrl_async.generators.agent.settings import check_agent_settings, make_agent_generator
from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.harbor.trials import VerifierReward, harbor_harness
from skyrl_async.harnesses.registry import named_harness, shipped
from skyrl_async.inference.cache_limit import CacheLimit
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.fleet import Fleet
from skyrl_async.inference.placement import PlacementSettings, default_oldest_weight
from skyrl_async.inference.pool import EnginePool
from skyrl_async.inference.protocol import EngineLoad
from skyrl_async.metrics.trace import Trace
from skyrl_async.registries import import_function
from skyrl_async.rollout.buffer import GroupBuffer
from skyrl_async.rollout.generator import Generator
from skyrl_async.rollout.preparation import Prepare, reward_with
from skyrl_async.rollout.staleness import STALENESS_POLICIES, _AsyncStalenessManager
from skyrl_async.runtime.device_leases import DeviceGroup
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.trainer.critic import CriticTraining
from skyrl_async.trainer.fully_async import FullyAsyncTrainer
from skyrl_async.trainer.run import TrainerCallbacks, make_run
from skyrl_async.trainer.validation import Evaluator
from skyrl_async.training.protocol import Critic, Policy
from skyrl_async.weight_sync.publisher import WeightPublisher

logger = logging.getLogger(__name__)


def check_generator(config: Config) -> None:
    """Raise ``ConfigError`` when the generator or the reward shaping names something that cannot be used."""
    check_reward_shaping(config)
    generator = config.generator
    if generator.kind is GeneratorKind.agent:
        check_agent_settings(generator)
        if generator.harness is not None and config.task.name != HARBOR_TASK:
            shipped(generator.harness)
    elif generator.entrypoint is not None:
        import_function("generator.entrypoint", generator.entrypoint)


def make_generator(
    config: Config,
    client: InferenceEngineClient,
    renderer: ChatRenderer,
    endpoint: Endpoint | None,
    run_dir: Path,
    stack: contextlib.AsyncExitStack,
) -> Generator:
    """Make the configured generator; it is closed with ``stack``."""
    generator = config.generator
    made: Any
    environments = environment_factory(config)
    limits: Any = {"max_turns": generator.max_turns, "max_trajectory_tokens": generator.max_trajectory_tokens}
    if generator.kind is GeneratorKind.agent:
        assert endpoint is not None
        harness: Harness | None = None
        reward_source = None
        if config.task.name == HARBOR_TASK:
            reward_source = VerifierReward()
            harness, generator = harbor_harness(
                generator, Path(config.cache_dir), run_dir, client.pool.deadlines.outages
            )
        elif generator.harness is not None:
            harness = named_harness(generator, Path(config.cache_dir), run_dir)
        made = make_agent_generator(
            generator,
            urls=endpoint.urls,
            controller_key=endpoint.controller_key,
            make_environment=environments,
            harness=harness,
            reward_source=reward_source,
            deadlines=client.pool.deadlines,
            outage_timeout_s=config.engine.no_engine_timeout_s,
            run_dir=run_dir,
            on_call=client.pool.count_call,
        )
    elif generator.entrypoint is not None:
        return cast(Generator, import_function("generator.entrypoint", generator.entrypoint)(client, renderer, config))
    elif generator.kind is GeneratorKind.gym_http:
        assert endpoint is not None
        made = importlib.import_module("skyrl_gym_http.generator").SkyRLGymHTTPGenerator(
            endpoint.base_url,
            endpoint.api_key,
            config.server.model_name,
            environments,
            **limits,
            outages=client.pool.deadlines.outages,
            outage_timeout_s=config.engine.no_engine_timeout_s,
            on_call=client.pool.count_call,
        )
    else:
        made = GymGenerator(client, renderer, environments, **limits)
    stack.push_async_callback(made.close)
    return cast(Generator, made)


def placement(config: Config) -> PlacementSettings | None:
    """Return how the client weighs old requests when it picks an engine; None: all requests alike."""
    max_staleness_steps = config.trainer.staleness_bound
    weight = config.engine.oldest_request_weight
    if weight is None:
        is_waited_for = STALENESS_POLICIES[config.trainer.staleness_policy.name].holds_back
        weight = default_oldest_weight(max_staleness_steps, is_waited_for=is_waited_for)
    if config.trainer.most_open_groups == config.trainer.batch_size or weight == 1:
        return None
    return PlacementSettings(
        oldest_weight=weight, oldest_age=config.trainer.most_open_groups - config.trainer.batch_size
    )


class RestartablePolicy(Policy, Protocol):
    """A policy whose workers are replaced when they die."""

    @property
    def num_restarts(self) -> int:
        """Number of times that workers were replaced."""

    def checkpoint_written(self, directory: Path) -> None:
        """Note that ``directory`` holds what was saved last, in a checkpoint that is complete."""


class RestartableCritic(Critic, Protocol):
    """A critic whose workers are replaced when they die."""

    @property
    def num_restarts(self) -> int:
        """Number of times that workers were replaced."""

    def checkpoint_written(self, directory: Path) -> None:
        """As ``RestartablePolicy.checkpoint_written``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What runs before a trainer does, and can serve one trainer after another."""

    prompts: Prompts
    client: InferenceEngineClient
    generator: Generator
    policy: RestartablePolicy
    device_groups: Mapping[str, DeviceGroup]
    """Stage that shares its devices -> their group."""
    publisher: WeightPublisher
    renderer: ChatRenderer | None = None
    """Turns tokens into text; None where they mean nothing."""
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    """By name; empty without distillation."""
    critic: RestartableCritic | None = None
    """Computes values; None: nothing needs them."""
    logprobs: LogprobParts = field(default_factory=LogprobParts)
    endpoint_url: str | None = None
    """URL of the endpoint, with ``/v1``; None where none is served."""
    fleet: Fleet | None = None
    """Keeps the engines alive; None where they are not processes of their own."""

    shared_cores: int = 0
    """Cores of the machine on whose CPUs trainer and engines compute; 0: on devices."""

    def values(self) -> dict[str, float]:
        """Return what the parts count beside the trainer, by metric name."""
        num_restarts = self.policy.num_restarts + self.logprobs.num_restarts
        num_restarts += self.critic.num_restarts if self.critic else 0
        values = {"trainer/restarts": float(num_restarts), "engines/shared_cores": float(self.shared_cores)}
        engines = self.fleet.statistics() if self.fleet else {}
        self.client.pool.measure_speeds()
        slowest, *others = sorted(self.client.pool.speeds.values()) or [0.0]
        if others:
            engines |= {"engines/slowest_frac": slowest / median(others)}
        return values | self.publisher.lag_values() | lease_values(self.device_groups) | engines

    def checkpoint_written(self, checkpoint: Path) -> None:
        """Note that a checkpoint is complete."""
        self.policy.checkpoint_written(checkpoint / "policy")
        if self.critic is not None:
            self.critic.checkpoint_written(checkpoint / "critic")

    def engines(self) -> dict[str, dict[str, float]]:
        """Engine -> its lag behind the trainer, and its speed in the last step where it is known."""
        speeds = self.client.pool.speeds
        return {
            name: {"lag_steps": lag.steps, "lag_seconds": round(lag.seconds, 3)}
            | ({"tokens_per_call_second": round(speeds[name], 1)} if name in speeds else {})
            for name, lag in self.publisher.lags().items()
        }


def make_trainer(
    config: Config,
    parts: Parts,
    *,
    checkpoint_dir: Path | None,
    callbacks: TrainerCallbacks,
    trace: Trace,
    shutdown: ShutdownRequest | None = None,
    disk: Executor | None = None,
    advantages: Advantages | None = None,
    works: Mapping[str, Prepare] | None = None,
    make_buffer: Callable[[int], GroupBuffer] = GroupBuffer,
) -> FullyAsyncTrainer:
    """Make the trainer of a real or simulated run over running parts.

    Args:
        config: checked.
        parts: run already.
        checkpoint_dir: for checkpoints; None writes none.
        callbacks: take metrics, samples and stalls.
        trace: gets the spans of the run.
        shutdown: ends the run early.
        disk: threads that write checkpoints.
        advantages: what computes advantages; None: what the configuration names.
        works: stages between the reward and training; None: those that the configuration needs.
        make_buffer: takes the most groups to hold at a time.
    """
    policy, groups, trainer = parts.policy, parts.device_groups, config.trainer
    leasing = leasing_policy(policy, groups)
    advantages = advantages or make_advantages(trainer.algorithm)
    if works is None:
        teacher = teacher_work(config, parts.teachers, parts.prompts.train, groups) if parts.teachers else None
        works = stage_works(config, leasing, parts.logprobs, groups, teacher, parts.critic)
    plan = epoch_plan(config, parts.prompts)
    evaluator = Evaluator(config, parts.generator, parts.prompts.held_out, callbacks.record, parts.client.deadlines)
    run = make_run(
        config,
        dataloader=_AsyncDataloader(parts.prompts.train, seed=trainer.seed, num_epochs=trainer.num_epochs, plan=plan),
        client=parts.client,
        generator=parts.generator,
        evaluation_statuses=evaluator.statuses,
        callbacks=replace(callbacks, log=lambda step, values: callbacks.log(step, parts.values() | values)),
        trace=trace,
        shutdown=shutdown,
        make_buffer=make_buffer,
    )
    _limit_by_cache(config, run.staleness, parts.client.pool)
    checkpointer = None
    if checkpoint_dir is not None:
        checkpointer = Checkpointer(
            checkpoint_dir, trainer.max_checkpoints_to_keep, on_written=parts.checkpoint_written, threads=disk
        )
    return FullyAsyncTrainer(
        run,
        policy=leasing,
        publisher=parts.publisher,
        prepare={"reward": reward_with(advantages.of_stage, reward_shapes(config)), **works},
        evaluator=evaluator,
        checkpointer=checkpointer,
        step_advantages=advantages.of_step,
        lease=lease_of("policy", groups),
        critic=critic_training(config, parts.critic, groups),
    )


def _limit_by_cache(config: Config, staleness: _AsyncStalenessManager, pool: EnginePool) -> None:
    """Let the engines' heartbeats decide how many groups are in flight, down to one mini-batch, if the configuration says so."""
    if not config.trainer.limit_groups_by_cache:
        return
    most = staleness.max_concurrent_generation_groups
    limit = CacheLimit(most, min(most, config.trainer.policy_mini_batch_size))

    def observe(engine: str, load: EngineLoad, of_all: EngineLoad) -> None:
        num_running, step = staleness.num_running, staleness.trained_version
        if limit.observe(engine, load, of_all, in_flight=num_running, step=step):
            logger.warning(
                "engines have preempted running requests because their caches are full: at most %d groups are in flight from now on "
                "(trainer.limit_groups_by_cache); more room: engine.gpu_memory_utilization, or more engines",
                limit.limit,
            )
        staleness.limit_groups(limit.limit)

    pool.on_load = observe


def critic_training(config: Config, critic: Critic | None, groups: Mapping[str, DeviceGroup]) -> CriticTraining | None:
    """Return what trains the critic. On the policy's devices the training stage's own lease covers its calls."""
    if critic is None:
        return None
    group = groups.get("critic")
    lease = contextlib.nullcontext if group is None or group is groups.get("policy") else partial(group.lease, "critic")
    return CriticTraining(critic=critic, warmup_steps=config.trainer.critic.warmup_steps, lease=lease)
