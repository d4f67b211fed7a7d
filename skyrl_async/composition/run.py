"""Puts a run together from its configuration: the one place that knows every class.

    task, policy files ──> Ray ──> engines, policy workers, endpoint ──> client, generator ──> FullyAsyncTrainer

Flows in: a checked ``Config`` and a run directory. Flows out: a trainer whose parts all run, and end with the context.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from skyrl_async.chat import ChatRenderer
from skyrl_async.composition.data import PolicyFiles, Say, fitting_prompts, load_tokenizer, prepare_prompts
from skyrl_async.composition.parts import Log, make_generator, make_publisher, make_trainer
from skyrl_async.composition.processes import needs_endpoint, ray_session, serving_endpoint, start_engines_and_policy
from skyrl_async.config.schema import Config
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.trainer import FullyAsyncTrainer
from skyrl_async.training.protocol import Policy


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of a run that its entry point needs."""

    trainer: FullyAsyncTrainer
    policy: Policy
    endpoint_url: str | None


@contextlib.asynccontextmanager
async def composed(config: Config, run_dir: Path, *, log: Log, trace: Trace, say: Say) -> AsyncIterator[Run]:
    """Start everything a run needs, engines and warm start side by side; on exit everything is gone again.

    Args:
        config: checked.
        run_dir: logs of the engines and the endpoint's address go there.
        log: takes (step, values).
        trace: of the stages.
        say: takes one line about the phase.
    """
    prompts = prepare_prompts(config)
    files = PolicyFiles(config, say)
    async with contextlib.AsyncExitStack() as stack:
        say("preparing the policy, starting Ray and the engines")
        stack.enter_context(ray_session(config))
        initial = files.initial()
        engines, policy = await start_engines_and_policy(config, stack, files, initial, run_dir)
        tokenizer = load_tokenizer(initial, config.policy.trust_remote_code)
        renderer = ChatRenderer(tokenizer)
        max_model_len = min(engine.max_model_len for engine in engines)
        client = InferenceEngineClient(engines, tokenizer=tokenizer, max_model_len=max_model_len, renderer=renderer)
        endpoint = None
        if needs_endpoint(config):
            say("starting the endpoint")
            endpoint = await stack.enter_async_context(
                serving_endpoint(config, initial, engines, max_model_len, run_dir)
            )
        generator = make_generator(config, client, renderer, endpoint)
        publisher = make_publisher(config, client, policy, renderer, prompts, trace, stack)
        trainer = make_trainer(
            config,
            prompts=fitting_prompts(prompts, renderer, max_model_len, say),
            policy=policy,
            publisher=publisher,
            generator=generator,
            run_dir=run_dir,
            log=log,
            trace=trace,
        )
        yield Run(trainer=trainer, policy=policy, endpoint_url=endpoint.base_url if endpoint else None)
