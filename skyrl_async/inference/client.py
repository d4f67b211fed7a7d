"""One sampling interface over many engines, exact across weight updates and engine failures.

    generate / stream ──> Router ──> engine.generate ──abort or death──┐
          ^                  ^                                         │
          │                  └── prompt + tokens so far, rest of budget┘
          └── tokens with log-probs and versions; text decoded once

Flows in: token ids or messages. Flows out: completions in which every token bears its behavior log-prob and the policy version
it was sampled under. Knows nothing of groups, staleness or training, and does not pause engines: a paused engine holds what it
is sent, so any number of clients (the trainer's, the endpoint's) can share engines without agreeing on anything.
"""

import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from skyrl_async.chat import ChatRenderer
from skyrl_async.concurrency import run_together
from skyrl_async.errors import EngineDeadError, InferenceError, PromptTooLongError
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.inference.router import Router
from skyrl_async.inference.text import CompletionText, Tokenizer
from skyrl_async.types import (
    Completion,
    CompletionDelta,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Message,
    SamplingParams,
)

logger = logging.getLogger(__name__)

_client_ids = itertools.count()


class InferenceEngineClient:
    """Routes generations to engines and continues what a weight update or a failure cut off.

    Args:
        engines: the replicas, all serving the same policy.
        tokenizer: decodes completions.
        max_model_len: longest prompt plus answer in tokens, the same in every engine.
        renderer: turns messages into token ids; without it only token ids can be given.
        name: prefix of request ids, unique among the clients of these engines.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        tokenizer: Tokenizer,
        max_model_len: int,
        renderer: ChatRenderer | None = None,
        name: str = "trainer",
    ) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._router = Router(tuple(self._engines))
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._name = f"{name}-{next(_client_ids)}"
        self._request_numbers = itertools.count()
        self.policy_version = 0
        self._counts = {"requests": 0, "tokens": 0, "aborts": 0, "engine_failures": 0}

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._max_model_len

    @property
    def engines(self) -> tuple[InferenceEngine, ...]:
        """The engines alive, as far as this client knows."""
        return tuple(self._engines[name] for name in self._router.engine_names)

    def drop_engine(self, name: str, reason: BaseException) -> None:
        """Send nothing more to a dead engine."""
        if name in self._router.engine_names:
            logger.warning("%s is dead, its requests continue elsewhere: %s", name, reason)
            self._counts["engine_failures"] += 1
            self._router.remove(name)

    async def generate(
        self,
        *,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        session_id: str | None = None,
    ) -> Completion:
        """Sample one completion of token ids or of chat messages (exactly one of the two).

        Raises ``PromptTooLongError``, ``NoEngineError``, and ``ValueError`` for neither or both inputs.
        """
        ids = self._prompt_ids(prompt_token_ids, messages)
        return await self.generate_tokens(ids, sampling, session_id=session_id)

    async def generate_batch(
        self,
        *,
        sampling: SamplingParams,
        prompts_token_ids: Sequence[Sequence[int]] | None = None,
        conversations: Sequence[Sequence[Message]] | None = None,
    ) -> list[Completion]:
        """Sample one completion for each prompt at once, in the order given. Raises what ``generate`` raises."""
        ids = [self._prompt_ids(p, None) for p in prompts_token_ids or ()]
        ids += [self._prompt_ids(None, messages) for messages in conversations or ()]
        batch = {f"generate-{i}": self.generate_tokens(prompt, sampling) for i, prompt in enumerate(ids)}
        return list(await run_together(batch))

    async def generate_tokens(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        """Sample one completion; see ``rollout.sampler.Sampler``."""
        joined = _Joined()
        text = CompletionText(self._tokenizer, sampling.stop)
        blocks = self._blocks(
            tuple(prompt_token_ids), sampling, joined, session_id, priority, streaming=bool(sampling.stop)
        )
        num_kept = None
        async with aclosing(blocks):
            async for block in blocks:
                num_kept = text.push(block.token_ids)
                if num_kept is not None:
                    joined.cut(num_kept)
                    break
        whole, _ = text.finish(is_stopped=num_kept is not None)
        self._counts["tokens"] += len(joined.token_ids)
        return Completion(
            prompt_token_ids=tuple(prompt_token_ids),
            token_ids=tuple(joined.token_ids),
            logprobs=tuple(joined.logprobs),
            versions=tuple(joined.versions),
            text=whole,
            finish_reason=FinishReason.STOP if num_kept is not None else joined.finish_reason,
            num_aborts=joined.num_aborts,
        )

    async def stream_tokens(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[CompletionDelta]:
        """Sample one completion in blocks; see ``rollout.sampler.Sampler``."""
        joined = _Joined()
        text = CompletionText(self._tokenizer, sampling.stop)
        blocks = self._blocks(tuple(prompt_token_ids), sampling, joined, session_id, priority, streaming=True)
        async with aclosing(blocks):
            async for block in blocks:
                num_before = len(joined.token_ids) - len(block.token_ids)
                num_kept = text.push(block.token_ids)
                if num_kept is not None:
                    block = _head(block, max(0, num_kept - num_before))
                is_last = num_kept is not None or block.finish_reason is not None
                new_text = text.finish(is_stopped=num_kept is not None)[1] if is_last else text.take()
                self._counts["tokens"] += len(block.token_ids)
                yield CompletionDelta(
                    token_ids=block.token_ids,
                    logprobs=block.logprobs,
                    versions=block.versions,
                    text=new_text,
                    finish_reason=FinishReason.STOP if num_kept is not None else block.finish_reason,
                )
                if is_last:
                    return

    def statistics(self) -> dict[str, float]:
        """Requests, tokens, aborts and engine failures so far, and the load now."""
        counts = {f"{name}_total": float(count) for name, count in self._counts.items()}
        return counts | self._router.statistics() | {"policy_version": float(self.policy_version)}

    def _prompt_ids(self, token_ids: Sequence[int] | None, messages: Sequence[Message] | None) -> tuple[int, ...]:
        if (token_ids is None) == (messages is None):
            raise ValueError("give either prompt_token_ids or messages, not both and not neither")
        if token_ids is not None:
            return tuple(token_ids)
        if self._renderer is None:
            raise InferenceError(
                "this client was made without a chat renderer: give prompt_token_ids instead of messages"
            )
        return self._renderer.render(list(messages or ()))

    async def _blocks(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        joined: "_Joined",
        session_id: str | None,
        priority: int,
        *,
        streaming: bool,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the tokens of one generation, from as many engine calls as it takes; ``abort`` never comes out."""
        budget = min(sampling.max_tokens, self._max_model_len - len(prompt))
        if budget < 1:
            raise PromptTooLongError(len(prompt), self._max_model_len)
        self._counts["requests"] += 1
        while True:
            request = EngineRequest(
                request_id=f"{self._name}-{next(self._request_numbers)}",
                prompt_token_ids=prompt + tuple(joined.token_ids),
                sampling=replace(sampling, max_tokens=budget - len(joined.token_ids), stop=()),
                num_sampled_tokens=len(joined.token_ids),
                priority=priority,
            )
            name = self._router.start(session_id)
            try:
                outputs = self._call(self._engines[name], request, streaming)
                async with aclosing(outputs):
                    async for output in outputs:
                        joined.add(output)
                        self.policy_version = max(self.policy_version, *output.versions, 0)
                        yield _without_abort(output)
            except EngineDeadError as error:
                self.drop_engine(name, error)
                joined.finish_reason = FinishReason.ABORT
            finally:
                self._router.end(name)
            if joined.finish_reason is not FinishReason.ABORT:
                return
            self._counts["aborts"] += 1
            joined.num_aborts += 1
            if len(joined.token_ids) >= budget:
                joined.finish_reason = FinishReason.LENGTH
                yield EngineOutput(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.LENGTH)
                return

    async def _call(
        self, engine: InferenceEngine, request: EngineRequest, streaming: bool
    ) -> AsyncGenerator[EngineOutput, None]:
        if not streaming:
            yield await engine.generate(request)
            return
        blocks = engine.stream(request)
        try:
            async for block in blocks:
                yield block
        finally:
            closing = getattr(blocks, "aclose", None)
            if closing is not None:
                await closing()


class _Joined:
    """The segments of one generation, as one sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason = FinishReason.ABORT
        self.num_aborts = 0

    def add(self, output: EngineOutput) -> None:
        if not len(output.token_ids) == len(output.logprobs) == len(output.versions):
            raise InferenceError(
                f"an engine returned {len(output.token_ids)} tokens with {len(output.logprobs)} log-probs and "
                f"{len(output.versions)} versions; every token needs one of each"
            )
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.versions.extend(output.versions)
        self.finish_reason = output.finish_reason or FinishReason.ABORT

    def cut(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:], self.versions[num_tokens:]


def _head(output: EngineOutput, num_tokens: int) -> EngineOutput:
    return EngineOutput(
        token_ids=output.token_ids[:num_tokens],
        logprobs=output.logprobs[:num_tokens],
        versions=output.versions[:num_tokens],
        finish_reason=output.finish_reason,
    )


def _without_abort(output: EngineOutput) -> EngineOutput:
    return replace(output, finish_reason=None) if output.finish_reason is FinishReason.ABORT else output
