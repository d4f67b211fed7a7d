"""A policy that says what a script tells it, behind the real endpoint: the plumbing of an agent, shown without a model.

    uv run python -m examples.scripted_policy mini_swe_agent

plays the first task of ``examples/mini_swe_agent/train.jsonl``: the example's harness, its reward, the session and the training
rows are those of a training run; only the sampler is not. An example is a folder with ``train.jsonl``, ``task.py`` that has ``COMMAND``
and ``reward``, and ``script.py`` that has ``script``.

Flows in: scripts. Flows out: an endpoint's application, and training rows of what a harness did with it. Does not know harnesses.
"""

import argparse
import asyncio
import importlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
from starlette.applications import Starlette
from transformers import PreTrainedTokenizerFast

from skyrl_async.chat import ChatRenderer
from skyrl_async.columns import TokenIds, VersionSpans, token_ids
from skyrl_async.config.schema.generator import GeneratorConfig
from skyrl_async.data.dataset import load_sources
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.endpoint.sessions.settings import SessionSettings
from skyrl_async.generators.agent.settings import make_agent_generator
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.tasks.registry import make_environment
from skyrl_async.tasks.tokenizer import CALL_END, CALL_START, START_TOKEN, train_tokenizer
from skyrl_async.types import Completion, CompletionDelta, FinishReason, Prompt, SamplingParams, Trajectory

EXAMPLES = Path(__file__).parent
MAX_ANSWER_TOKENS = 4096
AGENT_TIMEOUT_S = 240.0

Script = Callable[[str], str]
"""The next answer to a conversation, which is given as the text that the chat template makes of it."""


def in_turn(*answers: str) -> Script:
    """A script that says ``answers`` one after the other, and then the last one again."""

    def script(conversation: str) -> str:
        num_said = conversation.count(f"{START_TOKEN}assistant") - 1
        return answers[min(num_said, len(answers) - 1)]

    return script


def tool_call(name: str, **arguments: object) -> str:
    """A call as the scripted policy's chat template has it."""
    return f"{CALL_START}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CALL_END}"


class ScriptedSampler:
    """Implements ``skyrl_async.rollout.sampler.Sampler``: certain of each token (log-prob 0.0), and deaf to stop strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script, *, max_model_len: int = 32768) -> None:
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._script = script

    async def generate_tokens(
        self,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        """The script's answer, cut to ``sampling.max_tokens``."""
        prompt = token_ids(prompt_token_ids)
        said = self._script(self._tokenizer.decode(prompt.tolist()))
        answer = [*self._tokenizer.encode(said), self._tokenizer.eos_token_id]
        kept = answer[: sampling.max_tokens]
        return Completion(
            prompt_token_ids=prompt,
            token_ids=token_ids(kept),
            logprobs=np.zeros(len(kept), np.float32),
            versions=VersionSpans.constant(0, len(kept)),
            text=self._tokenizer.decode(kept, skip_special_tokens=True),
            finish_reason=FinishReason.STOP if kept == answer else FinishReason.LENGTH,
        )

    async def stream_tokens(
        self,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[CompletionDelta]:
        """The same in one block."""
        answer = await self.generate_tokens(prompt_token_ids, sampling)
        yield CompletionDelta(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            text=answer.text,
            finish_reason=answer.finish_reason,
        )


def make_app(script: Script, *, controller_key: str, session_settings: SessionSettings | None = None) -> Starlette:
    """The endpoint's application over a scripted policy. Its tokenizer, trained on the spot, can spell any text."""
    tokenizer = train_tokenizer([])
    return create_app(
        ScriptedSampler(tokenizer, script),
        ChatRenderer(tokenizer),
        api_keys=[],
        controller_keys=[controller_key],
        parser=AnswerParser.of(tokenizer),
        session_settings=session_settings,
    )


def load_example(name: str) -> tuple[Prompt, ...]:
    """The tasks of an example."""
    (prompts,) = load_sources([EXAMPLES / name / "train.jsonl"], default_env_class="none")
    return prompts


async def play(
    prompt: Prompt, *, url: str, controller_key: str, command: str, reward: str, num_samples: int = 1
) -> tuple[Trajectory, ...]:
    """The training rows of ``num_samples`` runs of a harness: what a training run does with ``generator=agent``.

    Args:
        url: of the endpoint, without ``/v1``.
        command: ``generator.command``.
        reward: ``generator.reward``.

    Raises ``GenerationError`` when too few of them come to an end.
    """
    settings = GeneratorConfig(command=command, reward=reward, max_turns=1, agent_timeout_s=AGENT_TIMEOUT_S)
    generator = make_agent_generator(
        settings, urls=[url], controller_key=controller_key, make_environment=make_environment
    )
    sampling = SamplingParams(max_tokens=MAX_ANSWER_TOKENS)
    try:
        return await generator.generate(GroupRequest(prompt=prompt, num_samples=num_samples, sampling=sampling))
    finally:
        await generator.close()


async def show(name: str) -> None:
    """Play an example's first task with its script, and print the training rows."""
    task = importlib.import_module(f"examples.{name}.task")
    script = importlib.import_module(f"examples.{name}.script").script
    key = secrets.token_urlsafe()
    async with start_server(make_app(script, controller_key=key)) as (host, port):
        rows = await play(
            load_example(name)[0],
            url=f"http://{host}:{port}",
            controller_key=key,
            command=task.COMMAND,
            reward=f"{task.__name__}:reward",
        )
    for row in rows:
        print(
            f"reward {row.reward:g}, {row.num_turns} turns, {len(row.prompt_token_ids)} prompt tokens, "
            f"{len(row.response_token_ids)} response tokens, {row.num_sampled_tokens} of them sampled and trained"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Play an example's first task with a scripted policy.")
    parser.add_argument("example", choices=sorted(path.parent.name for path in EXAMPLES.glob("*/script.py")))
    asyncio.run(show(parser.parse_args().example))
