"""A policy that says what a script tells it, behind the real endpoint: shows the plumbing of a harness without a model.

Flows in: scripts. Flows out: an endpoint's application. Does not know harnesses.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from skyrl_async.chat import ChatRenderer
from skyrl_async.columns import TokenIds, VersionSpans, token_ids
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.sessions.settings import SessionSettings
from skyrl_async.rollout.sampler import OpenGeneration
from skyrl_async.tasks.tokenizer import START_TOKEN, train_tokenizer
from skyrl_async.types import Completion, CompletionDelta, FinishReason, SamplingParams

Script = Callable[[str], str]
"""The next answer to a conversation, which is given as the text that the chat template makes of it."""


def in_turn(*answers: str) -> Script:
    """A script that says ``answers`` one after the other, and then the last one again."""

    def script(conversation: str) -> str:
        num_said = conversation.count(f"{START_TOKEN}assistant") - 1
        return answers[min(num_said, len(answers) - 1)]

    return script


class ScriptedSampler:
    """Implements ``skyrl_async.rollout.sampler.Sampler``: certain of each token (log-prob 0.0), and deaf to stop strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script, *, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.num_sampled_tokens = 0
        self._tokenizer = tokenizer
        self._script = script

    async def generate_tokens(
        self,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
        generation: OpenGeneration | None = None,
    ) -> Completion:
        """The script's answer, cut to ``sampling.max_tokens``."""
        prompt = token_ids(prompt_token_ids)
        said = self._script(self._tokenizer.decode(prompt.tolist()))
        answer = [*self._tokenizer.encode(said), self._tokenizer.eos_token_id]
        kept = answer[: sampling.max_tokens]
        self.num_sampled_tokens += len(kept)
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
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The same in one block."""
        answer = await self.generate_tokens(prompt_token_ids, sampling)
        yield CompletionDelta(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            text=answer.text,
            finish_reason=answer.finish_reason,
        )


def make_app(
    script: Script,
    *,
    controller_key: str,
    session_settings: SessionSettings | None = None,
    max_model_len: int = 32_768,
) -> Any:
    """The endpoint's application (ASGI) over a scripted policy. Its tokenizer, trained on the spot, can spell any text."""
    tokenizer = train_tokenizer([])
    return create_app(
        ScriptedSampler(tokenizer, script, max_model_len=max_model_len),
        ChatRenderer(tokenizer),
        api_keys=[],
        controller_keys=[controller_key],
        parser=AnswerParser.of(tokenizer),
        session_settings=session_settings,
    )
