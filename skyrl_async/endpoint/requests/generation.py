"""One planned request: samples its choices and reads them into answers, which become turns once they are delivered.

    Planned ──sampler──> completion ──output parser──> Answer, or blocks of one
                             └──> GenerationContext ──the client has it──> the session's turn tree

Does not know wire formats, HTTP or engines.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from skyrl_async.chat import ChatRenderer, Tool
from skyrl_async.columns import TokenIds, fields_of
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.endpoint.parsing.answers import AnswerParts
from skyrl_async.endpoint.parsing.output_parser import OutputParser, output_parser_of
from skyrl_async.endpoint.sessions.message_key import RAW_PROMPT_ROLE
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.endpoint.sessions.tree import Match, Turn, TurnTree
from skyrl_async.inference.generation import joined
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.types import Completion, CompletionDelta, FinishReason, Message, SamplingParams, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a surface asks for."""

    messages: tuple[Message, ...] = ()
    """OpenAI's chat form, tool calls and tool results included."""
    raw_prompt: str | Sequence[int] = ()
    """Text or ids, instead of messages. Ids are the client's: the planner checks them."""
    prefix_token_ids: Sequence[int] | None = None
    """The client's exact ids of the messages through the last one of the assistant."""
    tools: tuple[Tool, ...] | None = None
    """OpenAI's chat form of function tools."""
    tool_choice: str = "auto"
    """``auto``, ``none``, ``required`` or the name of a function."""
    sampling: SamplingParams
    """``max_tokens`` may exceed what the context has left."""
    max_total_tokens: int | None = None
    """Most tokens of prompt and completion together."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not sampled."""
    session_label: str | None = None
    """The conversation's, for samplers that route by it."""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished choice."""

    parts: AnswerParts
    completion: Completion
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    stop_reason: str | int | None
    """The request's stop string or stop token that ended it."""
    skips_special_tokens: bool
    """Whether the completion's text lacks special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBlock:
    """One block of a streamed choice. Calls are whole."""

    parts: AnswerParts
    delta: CompletionDelta
    answer: Answer | None
    """All blocks joined; set in the last block only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationContext:
    """What the generations of one HTTP request share. Their finished choices are kept here until a client has them."""

    sampler: Sampler
    renderer: ChatRenderer
    parser: AnswerParser
    session: Session | None
    """Gets the turns; None outside of sessions."""
    limits: tuple[asyncio.Semaphore, ...]
    """How many generations may run at once, overall and in the session; more wait in line."""
    finished: list[Callable[[TurnTree], Turn]] = field(default_factory=list)
    """For each finished choice, the call that adds its turn to a tree."""

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until one more generation may run."""
        async with AsyncExitStack() as stack:
            for limit in self.limits:
                await stack.enter_async_context(limit)
            yield

    def commit_turns(self) -> None:
        """Add the finished choices to the session, unless it has ended. Further calls do nothing."""
        commits = self.finished.copy()
        self.finished.clear()
        if self.session is not None and self.session.is_open:
            for commit in commits:
                commit(self.session.tree)


@dataclass(frozen=True, slots=True)
class Planned:
    """One request, rendered and known to fit; made by ``Planner.plan``."""

    context: GenerationContext
    request: GenerationRequest
    prompt_token_ids: TokenIds
    match: Match
    """The turn of the session that the prompt continues."""
    room: int
    """Tokens left in the context for each choice, >= 1."""

    async def answer(self, index: int = 0) -> Answer:
        """Choice ``index``, sampled to its end."""
        request, parser = self.request, self._output_parser()
        sampling = self._sampling(index, parser)
        async with self.context.slot():
            completion = await self.context.sampler.generate_tokens(
                self.prompt_token_ids, sampling, session_id=request.session_label, priority=request.priority
            )
        return self._finish([parser.push(completion.text), parser.finish()], completion, sampling)

    async def stream(self, index: int = 0) -> AsyncGenerator[AnswerBlock, None]:
        """Choice ``index`` in blocks; joined they equal ``answer``'s."""
        parser = self._output_parser()
        request, sampling = self.request, self._sampling(index, parser)
        sampled = self.context.sampler.stream_tokens(
            self.prompt_token_ids, sampling, session_id=request.session_label, priority=request.priority
        )
        parts: list[AnswerParts] = []
        deltas: list[CompletionDelta] = []
        async with self.context.slot(), aclosing(sampled) as stream:
            async for delta in stream:
                is_last = delta.finish_reason is not None
                part = parser.push(delta.text)
                if is_last:
                    part += parser.finish()
                parts.append(part)
                deltas.append(delta)
                whole = self._finish(parts, _joined(self.prompt_token_ids, deltas), sampling) if is_last else None
                yield AnswerBlock(parts=part, delta=delta, answer=whole)

    def _output_parser(self) -> OutputParser:
        request, parser = self.request, self.context.parser
        return output_parser_of(
            parser,
            tools=request.tools,
            tool_choice=request.tool_choice,
            is_chat=bool(request.messages),
            starts_in_reasoning=parser.starts_in_reasoning(self.prompt_token_ids),
        )

    def _sampling(self, index: int, parser: OutputParser) -> SamplingParams:
        sampling = self.request.sampling
        max_tokens = min(sampling.max_tokens, self.room)
        return replace(
            sampling,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            seed=None if sampling.seed is None else sampling.seed + index,
            skip_special_tokens=sampling.skip_special_tokens and not parser.keeps_special_tokens,
        )

    def _finish(self, parts: Sequence[AnswerParts], completion: Completion, sampling: SamplingParams) -> Answer:
        """The answer that ``parts`` add up to, kept until its delivery is known."""
        said = AnswerParts.joined(parts)
        request, match, reply = self.request, self.match, _reply(said)
        stop_string = _stop_string(self.context.renderer, completion, sampling)
        is_missing = stop_string is not None and not sampling.includes_stop
        self.context.finished.append(
            lambda tree: tree.commit(
                match,
                request.messages or (_raw_prompt(completion.prompt_token_ids),),
                reply,
                completion,
                tools=request.tools,
                is_constrained=sampling.structured is not None,
                # Some clients put the stop string back.
                other_forms=(reply | {"content": f"{reply['content']}{stop_string}"},) if is_missing else (),
            )
        )
        is_stop = completion.finish_reason is FinishReason.STOP
        return Answer(
            parts=said,
            completion=completion,
            finish_reason="tool_calls" if said.tool_calls and is_stop else str(completion.finish_reason),
            stop_reason=stop_string or _stop_token(completion, sampling),
            skips_special_tokens=sampling.skip_special_tokens,
        )


def _joined(prompt_token_ids: TokenIds, deltas: Sequence[CompletionDelta]) -> Completion:
    """The completion that ``deltas``, at least one, are the blocks of."""
    text, last = "".join(delta.text for delta in deltas), deltas[-1]
    return Completion(
        prompt_token_ids=prompt_token_ids,
        text=text,
        engines=last.engines,
        engine_seconds=last.engine_seconds,
        asked_at=last.asked_at,
        **fields_of(joined(deltas)),
    )


def _stop_string(renderer: ChatRenderer, completion: Completion, sampling: SamplingParams) -> str | None:
    """The request's stop string that ended ``completion``."""
    if not sampling.includes_stop:
        return renderer.stop_string(completion.token_ids, completion.text, sampling.stop)
    if completion.finish_reason is not FinishReason.STOP:
        return None
    return next((string for string in sampling.stop if completion.text.endswith(string)), None)


def _stop_token(completion: Completion, sampling: SamplingParams) -> int | None:
    last = completion.token_ids[-1:].tolist()
    is_stopped = completion.finish_reason is FinishReason.STOP and last and last[0] in sampling.stop_token_ids
    return last[0] if is_stopped else None


def _reply(said: AnswerParts) -> Message:
    """An answer as the message that a client sends back."""
    message: Message = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = [chat_tool_call(call) for call in said.tool_calls]
    return message


def _raw_prompt(token_ids: TokenIds) -> Message:
    return {"role": RAW_PROMPT_ROLE, "content": " ".join(map(str, token_ids.tolist()))}


def chat_tool_call(call: ToolCall) -> dict[str, object]:
    """A tool call in OpenAI's chat form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
