"""What every surface samples through: a request becomes a prompt, the prompt a completion, the completion an answer.

    GenerationRequest ──Planner──> Planned ──sampler──> completion ──parser──> Answer, or blocks of one
                         │  session's turn tree: exact ids of earlier turns              │
                         └───────────────<── turns to commit once they are delivered ─<──┘

Flows in: chat messages or raw prompt ids, of a session or of none. Flows out: answers, and the turns they are. Does not
know wire formats, HTTP or engines.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from dataclasses import dataclass, replace

from skyrl_async.chat import ChatRenderer, Tool
from skyrl_async.endpoint.parsing.answers import ParsedAnswer, ToolCall
from skyrl_async.endpoint.parsing.output_parser import OutputParser, forced_call, output_parser_of
from skyrl_async.endpoint.parsing.parsing import AnswerParser
from skyrl_async.endpoint.parsing.stream_joining import joined_completion
from skyrl_async.endpoint.requests.fields import refuse_inexact
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, LongWork, text_length
from skyrl_async.endpoint.requests.pending_turns import PendingTurns, SampledTurn
from skyrl_async.endpoint.requests.validation import bad_word_ids, known_ids, refused_values
from skyrl_async.endpoint.sessions.session import Session
from skyrl_async.endpoint.sessions.settings import ReasoningPolicy
from skyrl_async.endpoint.sessions.tree import Match
from skyrl_async.errors import PromptTooLongError
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.types import Completion, CompletionDelta, FinishReason, Message, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a surface asks for."""

    messages: tuple[Message, ...] = ()
    """OpenAI's chat form, tool calls and tool results included."""
    prompt_token_ids: tuple[int, ...] | None = None
    """A raw prompt instead of messages; or, beside them, the exact ids through the last assistant message."""
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
    """Requests of one label go to one engine while it lives."""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished choice."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    completion: Completion
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    stop_reason: str | int | None
    """Which of the request's stop strings or stop tokens ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBlock:
    """One block of a streamed choice."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    """Whole calls."""
    delta: CompletionDelta
    finish_reason: str | None
    """Set in the last block only."""


Slot = Callable[[], AbstractAsyncContextManager[object]]
"""Waits until one more generation may run."""


class Planner:
    """Plans the generations of one HTTP request.

    Args:
        sampler: samples.
        renderer: turns messages into ids.
        parser: finds reasoning and tool calls in text.
        session: whose turns these will be; None outside of sessions.
        reasoning_policy: see ``ReasoningPolicy``.
        slot: entered around each generation.
        long_work: renders and tokenizes long prompts.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: ChatRenderer,
        parser: AnswerParser,
        *,
        session: Session | None,
        reasoning_policy: ReasoningPolicy,
        slot: Slot,
        long_work: LongWork,
    ) -> None:
        self.sampler = sampler
        self.renderer = renderer
        self.parser = parser
        self.slot = slot
        self._session = session
        self._reasoning_policy = reasoning_policy
        self._long_work = long_work
        self.turns = PendingTurns(session)

    async def plan(self, request: GenerationRequest) -> "Planned":
        """Render and check.

        Raises ``ApiError`` for what cannot be rendered, ``PromptTooLongError`` when no room is left for an answer.
        """
        limit = min(self.sampler.max_model_len, request.max_total_tokens or self.sampler.max_model_len)
        length = text_length((request.messages, request.tools, request.bad_words)) + len(request.prompt_token_ids or ())

        def prepared(request: GenerationRequest = request) -> tuple[GenerationRequest, tuple[int, ...], Match]:
            ready = self._with_forced_call(self._with_session_sampling(self._with_tokens(request)))
            return ready, *self._prompt(ready, limit)

        with self._overflows_counted():
            request, prompt, match = await self._long_work.tokenize(self._session, prepared, is_long=length > LONG_TEXT)
            if len(prompt) >= limit:
                raise PromptTooLongError(len(prompt), limit)
        return Planned(self, request, prompt, match, room=limit - len(prompt))

    def _with_tokens(self, request: GenerationRequest) -> GenerationRequest:
        """The tokens that the request names are the policy's, and bad words are tokens."""
        sampling = request.sampling
        self._known(sampling.stop_token_ids, "stop_token_ids")
        self._known(sampling.allowed_token_ids, "allowed_token_ids")
        self._known([token_id for token_id, _ in sampling.logit_bias], "logit_bias")
        bad_words = bad_word_ids(request.bad_words, self.renderer.encode)
        return replace(request, sampling=replace(sampling, bad_words=bad_words))

    def _with_forced_call(self, request: GenerationRequest) -> GenerationRequest:
        """Where a call is demanded sampling must make one, and where it is possible nothing may forbid it."""
        with refused_values("tools"):
            forced = forced_call(request.tools, request.tool_choice) if request.messages else None
        if forced is None and (not request.tools or request.tool_choice != "auto"):
            return request
        # Where a call is possible and not demanded, the request's own schema would make it impossible.
        return replace(request, sampling=replace(request.sampling, structured=forced))

    def _with_session_sampling(self, request: GenerationRequest) -> GenerationRequest:
        """In a session, how to sample is the trainer's choice: behavior log-probs must be those of its distribution."""
        session = self._session
        if session is None:
            return request
        asked = request.sampling
        if session.sampling is not None:
            refuse_inexact(asked)
        sampling = session.sampling.applied_to(asked) if session.sampling is not None else asked
        sampling = replace(sampling, reports_logprobs=True)
        return replace(request, sampling=sampling, priority=session.priority, session_label=session.id)

    async def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of raw prompts. Raises ``PromptTooLongError`` where one cannot fit."""
        encode, limit = self.renderer.encode, self.sampler.max_model_len
        with self._overflows_counted():
            return await self._long_work.tokenize(
                self._session,
                lambda: [encode(text, limit=limit) for text in texts],
                is_long=sum(map(len, texts)) > LONG_TEXT,
            )

    @contextmanager
    def _overflows_counted(self) -> Iterator[None]:
        try:
            yield
        except PromptTooLongError:
            if self._session is not None:
                self._session.count_overflow()
            raise

    def _prompt(self, request: GenerationRequest, limit: int) -> tuple[tuple[int, ...], Match]:
        """Prompt ids, and the turn of the session that they continue."""
        nothing = Match(turn=None, num_messages=0)
        if not request.messages:
            return self._known(request.prompt_token_ids or (), "prompt"), nothing
        with refused_values("messages"):
            if request.prompt_token_ids is not None:
                known = self._known(request.prompt_token_ids, "prefix_token_ids")
                return self.renderer.render_next(request.messages, known, tools=request.tools, limit=limit), nothing
            if self._session is None:
                return self.renderer.render(request.messages, tools=request.tools, limit=limit), nothing
            return self._session_prompt(request, self._session, limit)

    def _session_prompt(
        self, request: GenerationRequest, session: Session, limit: int
    ) -> tuple[tuple[int, ...], Match]:
        match = session.tree.match(request.messages, tools=request.tools)
        turn = match.turn
        if turn is None:
            return self.renderer.render(request.messages, tools=request.tools, limit=limit), match
        if self._reasoning_policy is ReasoningPolicy.KEEP:
            prompt = self.renderer.render_next(
                request.messages, turn.token_ids, num_covered=match.num_messages, tools=request.tools, limit=limit
            )
            return prompt, match
        rendered = self.renderer.render(request.messages, tools=request.tools, limit=limit)
        extends = rendered[: len(turn.token_ids)] == turn.token_ids
        return rendered, match if extends else Match(turn=None, num_messages=0)

    def _known(self, token_ids: Sequence[int], param: str) -> tuple[int, ...]:
        return known_ids(token_ids, self.renderer.vocab_size, param=param)


class Planned:
    """One request, rendered and known to fit; made by ``Planner.plan``."""

    def __init__(
        self, planner: Planner, request: GenerationRequest, prompt: tuple[int, ...], match: Match, *, room: int
    ) -> None:
        self._planner = planner
        self._request = request
        self._match = match
        self._room = room
        self.prompt_token_ids = prompt

    @property
    def sampling(self) -> SamplingParams:
        """How its choices are sampled, but for what differs between them and for the budget."""
        return self._request.sampling

    async def answer(self, index: int = 0) -> Answer:
        """Choice ``index``, sampled to its end."""
        reading = self._reading()
        sampling = self._sampling(index, reading)
        async with self._planner.slot():
            completion = await self._planner.sampler.generate_tokens(
                self.prompt_token_ids,
                sampling,
                session_id=self._request.session_label,
                priority=self._request.priority,
            )
        parsed = reading.whole(completion.text)
        self._keep(parsed, completion, sampling)
        return Answer(
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            completion=completion,
            finish_reason=_finish_reason(completion.finish_reason, parsed.tool_calls),
            stop_reason=stop_string(self._planner.renderer, completion, sampling) or _stop_token(completion, sampling),
        )

    async def stream(self, index: int = 0) -> AsyncGenerator[AnswerBlock, None]:
        """Choice ``index`` in blocks; joined they equal ``answer``'s."""
        reading = self._reading()
        sampling = self._sampling(index, reading)
        blocks: list[AnswerBlock] = []
        async with self._planner.slot(), aclosing(self._deltas(sampling)) as deltas:
            async for delta in deltas:
                part = reading.push(delta.text)
                if delta.finish_reason is not None:
                    part += reading.finish()
                block = AnswerBlock(
                    content=part.content,
                    reasoning=part.reasoning,
                    tool_calls=part.tool_calls,
                    delta=delta,
                    finish_reason=None,
                )
                blocks.append(block)
                if delta.finish_reason is not None:
                    calls = tuple(call for b in blocks for call in b.tool_calls)
                    block = replace(block, finish_reason=_finish_reason(delta.finish_reason, calls))
                    self._keep_streamed(blocks, sampling)
                yield block

    async def _deltas(self, sampling: SamplingParams) -> AsyncGenerator[CompletionDelta, None]:
        request = self._request
        deltas = self._planner.sampler.stream_tokens(
            self.prompt_token_ids, sampling, session_id=request.session_label, priority=request.priority
        )
        async for delta in deltas:
            yield delta

    def _reading(self) -> OutputParser:
        request, planner = self._request, self._planner
        return output_parser_of(
            planner.parser,
            tools=request.tools,
            tool_choice=request.tool_choice,
            is_chat=bool(request.messages),
            starts_in_reasoning=planner.parser.starts_in_reasoning(self.prompt_token_ids),
        )

    def _sampling(self, index: int, reading: OutputParser) -> SamplingParams:
        sampling = self._request.sampling
        return replace(
            sampling,
            max_tokens=min(sampling.max_tokens, self._room),
            seed=None if sampling.seed is None else sampling.seed + index,
            skip_special_tokens=sampling.skip_special_tokens and not reading.keeps_special_tokens,
        )

    def _keep(self, parsed: ParsedAnswer, completion: Completion, sampling: SamplingParams) -> None:
        """Keep a finished choice until its delivery is known."""
        planner, request = self._planner, self._request
        missing = None if sampling.includes_stop else stop_string(planner.renderer, completion, sampling)
        planner.turns.add(
            SampledTurn(
                match=self._match,
                messages=request.messages,
                tools=request.tools,
                reply=_reply(parsed),
                stop_string=missing,
                completion=completion,
                is_constrained=sampling.structured is not None,
            )
        )

    def _keep_streamed(self, blocks: Sequence[AnswerBlock], sampling: SamplingParams) -> None:
        completion = joined_completion(self.prompt_token_ids, [block.delta for block in blocks])
        parsed = ParsedAnswer(
            content="".join(block.content for block in blocks),
            reasoning="".join(block.reasoning for block in blocks),
            tool_calls=tuple(call for block in blocks for call in block.tool_calls),
        )
        self._keep(parsed, completion, sampling)


def stop_string(renderer: ChatRenderer, completion: Completion, sampling: SamplingParams) -> str | None:
    """Which of the request's stop strings ended ``completion``."""
    if not sampling.includes_stop:
        return renderer.stop_string(completion.token_ids, completion.text, sampling.stop)
    if completion.finish_reason is not FinishReason.STOP:
        return None
    return next((string for string in sampling.stop if completion.text.endswith(string)), None)


def _stop_token(completion: Completion, sampling: SamplingParams) -> int | None:
    last = completion.token_ids[-1:]
    is_stopped = completion.finish_reason is FinishReason.STOP and last and last[0] in sampling.stop_token_ids
    return last[0] if is_stopped else None


def _finish_reason(finish: FinishReason, tool_calls: Sequence[ToolCall]) -> str:
    return "tool_calls" if tool_calls and finish is FinishReason.STOP else str(finish)


def _reply(parsed: ParsedAnswer) -> Message:
    """An answer as the message that a client sends back."""
    message: Message = {"role": "assistant", "content": parsed.content or ""}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [chat_tool_call(call) for call in parsed.tool_calls]
    return message


def chat_tool_call(call: ToolCall) -> dict[str, object]:
    """A tool call in OpenAI's chat form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
