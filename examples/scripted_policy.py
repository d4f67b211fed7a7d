"""A policy that says what a script tells it, behind the real endpoint: the plumbing of an agent, shown without a model.

    uv run python -m examples.scripted_policy mini_swe_agent

plays the first task of ``examples/mini_swe_agent/train.jsonl``: the example's harness, its reward, the session and the training
rows are those of a training run; only the sampler is not. An example is a folder with ``train.jsonl``, ``task.py`` that has ``SETTINGS``
(keys of ``generator``) and ``reward``, and ``script.py`` that has ``script``.

Flows in: scripts. Flows out: an endpoint's application, and training rows of what a harness did with it. Does not know harnesses.
"""

import argparse
import asyncio
import importlib
import secrets
from pathlib import Path
from typing import Any

from skyrl_async.config.schema.generator import GeneratorConfig
from skyrl_async.config.schema.run import Config
from skyrl_async.data.dataset import load_sources
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.generators.agent.settings import make_agent_generator
from skyrl_async.harnesses.registry import named_harness
from skyrl_async.harnesses.scripted import Script, in_turn, make_app
from skyrl_async.harnesses.shipped import tool_call
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.tasks.registry import make_environment
from skyrl_async.types import Prompt, SamplingParams, Trajectory

__all__ = ["Script", "in_turn", "load_example", "make_app", "play", "settings_of", "tool_call"]

EXAMPLES = Path(__file__).parent
CACHE_DIR = Path(Config().cache_dir)
MAX_ANSWER_TOKENS = 4096
AGENT_TIMEOUT_S = 240.0


def load_example(name: str) -> tuple[Prompt, ...]:
    """The tasks of an example."""
    (prompts,) = load_sources([EXAMPLES / name / "train.jsonl"], default_env_class="none")
    return prompts


def settings_of(name: str, **others: Any) -> GeneratorConfig:
    """The ``generator`` section of an example; ``others`` replace its keys."""
    task = importlib.import_module(f"examples.{name}.task")
    fixed = {"reward": f"{task.__name__}:reward", "max_turns": 1, "agent_timeout_s": AGENT_TIMEOUT_S}
    return GeneratorConfig(**(task.SETTINGS | fixed | others))


async def play(
    prompt: Prompt, settings: GeneratorConfig, *, url: str, controller_key: str, num_samples: int = 1
) -> tuple[Trajectory, ...]:
    """The training rows of ``num_samples`` runs of a harness: what a training run does with ``generator=agent``.

    Args:
        url: of the endpoint, without ``/v1``.

    Raises ``GenerationError`` when too few of them come to an end.
    """
    harness = None if settings.harness is None else named_harness(settings, CACHE_DIR, None)
    generator = make_agent_generator(
        settings, urls=[url], controller_key=controller_key, make_environment=make_environment, harness=harness
    )
    sampling = SamplingParams(max_tokens=MAX_ANSWER_TOKENS)
    try:
        return await generator.generate(GroupRequest(prompt=prompt, num_samples=num_samples, sampling=sampling))
    finally:
        await generator.close()


async def show(name: str) -> None:
    """Play an example's first task with its script, and print the training rows."""
    script = importlib.import_module(f"examples.{name}.script").script
    key = secrets.token_urlsafe()
    async with start_server(make_app(script, controller_key=key)) as (host, port):
        url = f"http://{host}:{port}"
        rows = await play(load_example(name)[0], settings_of(name), url=url, controller_key=key)
    for row in rows:
        print(
            f"reward {row.reward:g}, {row.num_turns} turns, {len(row.prompt_token_ids)} prompt tokens, "
            f"{len(row.response_token_ids)} response tokens, {row.num_sampled_tokens} of them sampled and trained"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Play an example's first task with a scripted policy.")
    parser.add_argument("example", choices=sorted(path.parent.name for path in EXAMPLES.glob("*/script.py")))
    asyncio.run(show(parser.parse_args().example))
