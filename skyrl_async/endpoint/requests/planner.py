"""Turns a request into a prompt: renders it, finds the turn that it continues, and applies the session's sampling.

    GenerationRequest ──Planner──> Planned
                           └─ the session's turn tree: exact ids of earlier turns

Does not know wire formats, HTTP or engines.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from skyrl_async.columns import NO_TOKENS, TokenIds, begins_with
from skyrl_async.config.schema.server import ReasoningPolicy
from skyrl_async.endpoint.parsing.output_parser import forced_call
from skyrl_async.endpoint.requests.fields import known_ids, refuse_inexact, refused, refused_values
from skyrl_async.endpoint.requests.generation import GenerationContext, GenerationRequest, Planned
from skyrl_async.endpoint.requests.long_work import LONG_TEXT, LongWork, text_length
from skyrl_async.endpoint.sessions.tree import Match
from skyrl_async.errors import PromptTooLongError


class Planner:
    """Plans the generations of one HTTP request.

    Args:
        long_work: renders and tokenizes long prompts.
    """

    def __init__(self, context: GenerationContext, reasoning_policy: ReasoningPolicy, long_work: LongWork) -> None:
        self._context = context
        self._session, self._renderer = context.session, context.renderer
        self._max_model_len = context.sampler.max_model_len
        self._reasoning_policy = reasoning_policy
        self._long_work = long_work

    async def plan(self, requests: Sequence[GenerationRequest]) -> list[Planned]:
        """Render the prompts and check that they fit.

        Raises ``ApiError`` if messages cannot be rendered or ``max_total_tokens`` leaves no room for an answer, ``PromptTooLongError`` if
        the model's context leaves none.
        """
        length = text_length(
            [(one.messages, one.raw_prompt, one.prefix_token_ids, one.tools, one.bad_words) for one in requests]
        )

        def planned() -> list[Planned]:
            return [self._planned(one) for one in requests]

        try:
            return await self._long_work.tokenize(self._session, planned, is_long=length > LONG_TEXT)
        except PromptTooLongError as error:
            num_tokens, limit = error.num_prompt_tokens, self._max_model_len
            if num_tokens < limit:
                message = f"is {error.max_model_len} tokens, but the prompt has at least {num_tokens} (context_length_exceeded)"
                advice = "shorten the prompt or raise max_total_tokens"
                raise refused("max_total_tokens", f"{message}; {advice}", code="context_length_exceeded") from None
            if self._session is not None:
                self._session.count_overflow()
            raise PromptTooLongError(num_tokens, limit, error.num_characters) from None

    def _planned(self, request: GenerationRequest) -> Planned:
        limit = min(self._max_model_len, request.max_total_tokens or self._max_model_len)
        ready = self._with_forced_call(self._with_session_sampling(self._with_tokens(request)))
        prompt, match = self._prompt(ready, limit)
        if len(prompt) >= limit:
            raise PromptTooLongError(len(prompt), limit)
        return Planned(self._context, ready, prompt, match, room=limit - len(prompt))

    def _with_tokens(self, request: GenerationRequest) -> GenerationRequest:
        """Check the token ids that the request names, and encode its bad words."""
        sampling = request.sampling
        self._known(sampling.stop_token_ids, "stop_token_ids")
        self._known(sampling.allowed_token_ids, "allowed_token_ids")
        self._known([token_id for token_id, _ in sampling.logit_bias], "logit_bias")
        bad_words = _bad_word_ids(request.bad_words, self._renderer.encode)
        return replace(request, sampling=replace(sampling, bad_words=bad_words))

    def _with_forced_call(self, request: GenerationRequest) -> GenerationRequest:
        """Constrain sampling to a call if one is demanded; drop other constraints if one is possible."""
        with refused_values("tools"):
            forced = forced_call(request.tools, request.tool_choice) if request.messages else None
        if forced is None and (not request.tools or request.tool_choice != "auto"):
            return request
        # The request's own schema would make an optional call impossible.
        return replace(request, sampling=replace(request.sampling, structured=forced))

    def _with_session_sampling(self, request: GenerationRequest) -> GenerationRequest:
        """Apply the session's sampling: behavior log-probs must be those of the trainer's distribution."""
        session = self._session
        if session is None:
            return request
        sampling = request.sampling
        if session.sampling is not None:
            refuse_inexact(sampling)
            sampling = session.sampling.applied_to(sampling)
        sampling = replace(sampling, reports_logprobs=True)
        return replace(request, sampling=sampling, priority=session.priority, session_label=session.id)

    def _prompt(self, request: GenerationRequest, limit: int) -> tuple[TokenIds, Match]:
        """Prompt ids, and the session's turn that they continue."""
        nothing = Match(turn=None, num_messages=0)
        if not request.messages:
            raw = request.raw_prompt
            prompt = self._renderer.encode(raw, limit=limit) if isinstance(raw, str) else self._known(raw, "prompt")
            if not len(prompt):
                raise refused("prompt", "must hold at least one token, got none")
            return prompt, nothing
        render = partial(self._renderer.render, request.messages, tools=request.tools, limit=limit)
        render_next = partial(self._renderer.render_next, request.messages, tools=request.tools, limit=limit)
        with refused_values("messages"):
            if request.prefix_token_ids is not None:
                return render_next(self._known(request.prefix_token_ids, "prefix_token_ids")), nothing
            if self._session is None:
                return render(), nothing
            match = self._session.tree.match(request.messages, tools=request.tools)
            known = NO_TOKENS if match.turn is None else match.turn.token_ids
            if len(known) and self._reasoning_policy is ReasoningPolicy.keep:
                return render_next(known, num_covered=match.num_messages), match
            rendered = render()
            return rendered, match if begins_with(rendered, known) else nothing

    def _known(self, token_ids: Sequence[int], param: str) -> TokenIds:
        return known_ids(token_ids, self._renderer.vocab_size, param=param)


def _bad_word_ids(words: Sequence[str], encode: Callable[[str], TokenIds]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell ``words`` at the beginning and in the middle of a text, as in vLLM."""
    found: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = (tuple(encode(text).tolist()) for text in (word.lstrip(), f" {word.lstrip()}"))
        if not bare:
            raise refused("bad_words", f"must hold words, got {word!r}")
        found.append(bare)
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    return tuple(found)
