"""Puts a run together from its configuration: the one place that knows every class.

task, policy files ──> Ray ──> engines, policy workers, endpoint ──> client, generator, publisher ──> make_trainer
"""

import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_async.chat import ChatRenderer
from skyrl_async.checkpoint.checkpointer import require_critic
from skyrl_async.composition.algorithms import check_algorithm
from skyrl_async.composition.autoscale import autoscaled
from skyrl_async.composition.closing import ClosingStack
from skyrl_async.composition.control import controlled
from skyrl_async.composition.data import (
    PolicyFiles,
    ProgressFn,
    Prompts,
    check_checkpoint_is_of,
    check_context,
    check_critic_warmup,
    check_overlong_penalty,
    check_positions,
    fitting_prompts,
    known_context,
    load_renderer,
    num_planned_steps,
    prepare_prompts,
)
from skyrl_async.composition.logprobs import check_logprobs
from skyrl_async.composition.parts import Parts, check_generator, make_generator, placement
from skyrl_async.composition.processes import Processes, is_supervised
from skyrl_async.composition.publishing import check_shared_memory, make_publisher
from skyrl_async.composition.ray_cluster import reserve_devices, start_ray
from skyrl_async.composition.teachers import check_teachers, served_teachers
from skyrl_async.config.rules.algorithm import needs_critic
from skyrl_async.config.rules.devices import engine_device, num_cores
from skyrl_async.config.rules.placement import sharing_stages
from skyrl_async.config.schema.fields import Device
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.task import BUILT_IN_TASKS, HARBOR_TASK
from skyrl_async.harbor.trials import check_harbor
from skyrl_async.harnesses.registry import check_harness
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.device_leases import DeviceGroup, groups_by_member
from skyrl_async.runtime.shutdown import ShutdownRequest
from skyrl_async.training.rank_process import seed_all
from skyrl_async.weight_sync.engine_time_sharing import GENERATE, EngineTimeSharing


@contextlib.asynccontextmanager
async def started_parts(
    config: Config,
    run_dir: Path,
    *,
    trace: Trace,
    say: ProgressFn,
    announce: ProgressFn = lambda _: None,
    checkpoint: Path | None = None,
    stack: ClosingStack | None = None,
    shutdown: ShutdownRequest | None = None,
) -> AsyncIterator[Parts]:
    """Start everything that a run needs, engines and warm start side by side; end it all on exit.

    Args:
        config: checked.
        run_dir: logs of the engines and the endpoint's address go there.
        trace: gets the spans of the publisher and of time-sharing.
        say: takes one line about the phase.
        announce: takes one line about an event that people should see, such as the death of the last engine.
        checkpoint: will be resumed; a checkpoint of another model is refused before anything boots.
        stack: ends the parts, and lists afterwards which did not end.
        shutdown: gets failures after which the trainer should save and end; None: they end the block at once.
    """
    seed_all(config.trainer.seed)
    plan = _planned(config, checkpoint, say)
    async with stack or ClosingStack() as stack:
        teachers = await served_teachers(config, plan.initial, stack)
        say("starting Ray")
        await start_ray(config.placement, stack)
        reserved = await reserve_devices(config, stack)
        if reserved is not None:
            announce(reserved.plan.table())
        say("booting engines, preparing the policy")
        processes = Processes(config, plan.files, plan.initial, run_dir, stack, reserved)
        engines, policy = await processes.engines_and_policy(num_planned_steps(config, plan.prompts))
        groups = groups_by_member(sharing_stages(config))
        logprobs = await processes.logprob_workers(groups)
        teachers |= await processes.local_teachers()
        critic = await processes.critic(num_planned_steps(config, plan.prompts))
        renderer = plan.renderer or load_renderer(plan.initial, config.policy.trust_remote_code)
        client = _client(config, engines, renderer)
        endpoint = None
        if config.serves_endpoint:
            say("starting the endpoint")
            endpoint = await stack.enter_async_context(processes.endpoint(client, shutdown))
        time_sharing = _time_sharing(config, client, groups, trace, has_endpoint=endpoint is not None)
        generator = make_generator(config, client, renderer, endpoint, run_dir, stack)
        publisher = make_publisher(
            config, client, policy, groups, renderer, plan.prompts, trace, stack, time_sharing, logprobs.old
        )
        fleet = await processes.fleet(client, endpoint, announce, trace)
        await stack.enter_async_context(time_sharing.running() if time_sharing else contextlib.nullcontext())
        parts = Parts(
            prompts=fitting_prompts(plan.prompts, renderer, client.max_model_len, say),
            client=client,
            generator=generator,
            policy=policy,
            renderer=renderer,
            critic=critic,
            teachers=teachers,
            logprobs=logprobs,
            device_groups=groups,
            publisher=publisher,
            endpoint_url=endpoint.base_url if endpoint else None,
            fleet=fleet,
            shared_cores=_shared_cores(config),
        )
        await stack.enter_async_context(controlled(run_dir, fleet, parts.engines))
        await stack.enter_async_context(autoscaled(run_dir, fleet, config))
        yield parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is checked before anything boots."""

    prompts: Prompts
    files: PolicyFiles
    initial: Path
    """Directory of the policy that training begins with."""
    renderer: ChatRenderer | None


def _planned(config: Config, checkpoint: Path | None, say: ProgressFn) -> _Plan:
    """Make every check that needs no process. Raises ``ConfigError`` and ``PolicyError``."""
    check_generator(config)
    generator = config.generator
    has_lone_samples = generator.apply_overlong_filtering or generator.n_samples_per_prompt == 1
    check_algorithm(config.trainer.algorithm, has_lone_samples=has_lone_samples)
    prompts = prepare_prompts(config)
    check_critic_warmup(config, prompts)
    if config.task.name == HARBOR_TASK:
        check_harbor(generator, Path(config.cache_dir), say)
    elif generator.harness is not None:
        check_harness(generator, Path(config.cache_dir), say)
    files = PolicyFiles(config, prompts, say)
    initial = files.initial()
    check_context(config, initial)
    check_positions(config, initial)
    check_overlong_penalty(config, initial)
    check_logprobs(config, initial)
    check_teachers(config, initial, prompts)
    check_shared_memory(config, initial)
    if checkpoint is not None:
        check_checkpoint_is_of(checkpoint, initial)
        if needs_critic(config):
            require_critic(checkpoint)
    renderer = None
    if config.task.name not in BUILT_IN_TASKS:
        # A user's prompts may not fit: say so before anything boots. Built-in prompts fit, and loading takes seconds.
        renderer = load_renderer(initial, config.policy.trust_remote_code)
        prompts = fitting_prompts(prompts, renderer, known_context(config, initial), say)
    return _Plan(prompts=prompts, files=files, initial=initial, renderer=renderer)


def _shared_cores(config: Config) -> int:
    """Cores that engines and trainer share, 0 where engines have devices."""
    return num_cores() if engine_device(config.engine) is Device.cpu else 0


def _time_sharing(
    config: Config,
    client: InferenceEngineClient,
    groups: Mapping[str, DeviceGroup],
    trace: Trace,
    *,
    has_endpoint: bool,
) -> EngineTimeSharing | None:
    """Make what pauses engines while others use their devices; None where they have them for themselves."""
    if GENERATE not in groups:
        return None
    return EngineTimeSharing(
        client,
        groups[GENERATE],
        min_slice_s=config.placement.min_generation_slice_s,
        is_busy=lambda: has_endpoint or client.pool.is_busy,  # requests to the endpoint are not in this pool
        trace=trace,
        clock=time.monotonic,
    )


def _client(config: Config, engines: Sequence[InferenceEngine], renderer: ChatRenderer) -> InferenceEngineClient:
    return InferenceEngineClient(
        engines,
        tokenizer=renderer.tokenizer,
        max_model_len=min(engine.max_model_len for engine in engines),
        renderer=renderer,
        carries_tokens=is_supervised(config),
        engine_wait_s=None if is_supervised(config) else 0.0,
        placement=placement(config),
    )
