"""The generator that plays skyrl_gym environments over ``/v1/chat/completions``, as an agent outside the trainer would.

Flows in: group requests; an endpoint's address and key. Flows out: trajectories with exact token ids, log-probs and
versions, from the endpoint's reply extensions. Does not know tokenizers, engines or the trainer.
"""

import re
from http import HTTPStatus
from typing import Any

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    BadRequestError,
)
from openai.types.chat import ChatCompletion

from skyrl_async.errors import GenerationError, OutageError, PromptTooLongError
from skyrl_async.generators.gym.environment import EnvironmentFactory
from skyrl_async.generators.gym.episode_state import Turn, TurnRequest
from skyrl_async.generators.gym.generator import EpisodeGenerator
from skyrl_async.runtime.outages import Outages, Resending
from skyrl_async.types import Completion, FinishReason, SamplingParams
from skyrl_async.version_spans import versions_of

_NO_ENGINE = "no_engine"
"""Code of the endpoint's 503 when it has no engine to ask."""
_OVERFLOW = re.compile(r"maximum context length is (\d+) tokens, but the (?:prompt has (?:at least )?(\d+)|body)")


class SkyRLGymHTTPGenerator(EpisodeGenerator):
    """A ``Generator`` over environments of the skyrl_gym protocol and an endpoint of this package.

    Single- and multi-turn, exact like ``GymGenerator``: from the second turn on the request carries the ids so far
    (``prefix_token_ids``), and the endpoint renders only what follows them. A turn that an outage cut off (a connection refused or
    broken, an endpoint without engines) is asked for again.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model: str,
        make_environment: EnvironmentFactory,
        *,
        max_turns: int = 8,
        max_trajectory_tokens: int | None = None,
        timeout_s: float = 3600.0,
        outages: Outages | None = None,
        outage_timeout_s: float = 0.0,
    ) -> None:
        """
        Args:
            base_url: Of the endpoint, with ``/v1``.
            api_key: Bearer key.
            model: Name the endpoint serves the policy under.
            make_environment: Makes an environment of a prompt's ``env_class`` and ``extras``.
            max_turns: Most turns of an episode, >= 1, whatever the environment says.
            max_trajectory_tokens: Most response tokens of an episode, the environment's included; None is bounded by
                the model's context only.
            timeout_s: Of one request; long, because the endpoint holds requests while weights change.
            outages: Waited for before a request is sent again; None: nobody tells of them.
            outage_timeout_s: How long a request is sent again, from the first time it was not answered; 0 never does.
        """
        super().__init__(make_environment, max_turns=max_turns, max_trajectory_tokens=max_trajectory_tokens)
        # No retries: a resend would sample a second answer while the first may still be running. In an outage it cannot be.
        self._client = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout_s, max_retries=0)
        self._model = model
        self._resending = Resending(outages or Outages(), outage_timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def sample_turn(self, request: TurnRequest) -> Turn:
        """Sample a turn through the openai client.

        Raises ``PromptTooLongError`` without room, ``GenerationError`` when the endpoint fails or answers what cannot be trained on, and
        ``OutageError`` or ``NoEngineError`` when an outage is too long.
        """
        arguments = self._arguments(request)
        try:
            reply = await self._resending.until_answered(lambda: self._send(arguments))
        except BadRequestError as error:
            overflow = _OVERFLOW.search(error.message)
            if error.code == "context_length_exceeded" and overflow:
                raise PromptTooLongError(int(overflow[2] or overflow[1]), int(overflow[1])) from error
            raise self._failure(error) from error
        except APIError as error:
            raise self._failure(error) from error
        turn = parse_reply(reply)
        if turn.completion.prompt_token_ids[: len(request.context_token_ids)] != request.context_token_ids:
            raise GenerationError(
                f"the endpoint's prompt_token_ids must begin with the {len(request.context_token_ids)} ids of "
                "prefix_token_ids, but do not"
            )
        return turn

    async def _send(self, arguments: dict[str, Any]) -> ChatCompletion:
        """Raises ``OutageError`` where nothing answers, or nothing can be sampled there."""
        try:
            reply: ChatCompletion = await self._client.chat.completions.create(**arguments)
        except (APIConnectionError, APIStatusError) as error:
            if _is_outage(error):
                raise OutageError(str(self._failure(error))) from error
            raise
        return reply

    def _arguments(self, request: TurnRequest) -> dict[str, Any]:
        sampling: SamplingParams = request.sampling
        extensions: dict[str, Any] = {
            "return_token_ids": True,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "ignore_eos": sampling.ignore_eos,
            "session_id": request.session_id,
            "priority": request.priority,
        }
        if request.context_token_ids:
            extensions["prefix_token_ids"] = request.context_token_ids
        if request.max_total_tokens is not None:
            extensions["max_total_tokens"] = request.max_total_tokens
        return {
            "model": self._model,
            "messages": list(request.messages),
            "max_completion_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
            "extra_body": extensions,
        }

    def _failure(self, error: APIError) -> GenerationError:
        return GenerationError(f"{self._client.base_url}chat/completions failed: {type(error).__name__}: {error}")


def _is_outage(error: APIConnectionError | APIStatusError) -> bool:
    if isinstance(error, APIStatusError):
        return error.status_code == HTTPStatus.SERVICE_UNAVAILABLE and error.code == _NO_ENGINE
    return not isinstance(error, APITimeoutError)


def parse_reply(reply: ChatCompletion) -> Turn:
    """The turn in a reply; ``GenerationError`` names what is missing or does not fit."""
    if len(reply.choices) != 1:
        raise GenerationError(f"the endpoint must answer with one choice, got {len(reply.choices)}")
    choice = reply.choices[0]
    if choice.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise GenerationError(f"the reply's finish_reason must be stop or length, got {choice.finish_reason!r}")
    extensions = choice.model_extra or {}
    token_ids = _extension(extensions, "token_ids")
    completion = Completion(
        prompt_token_ids=tuple(_extension(reply.model_extra or {}, "prompt_token_ids")),
        token_ids=tuple(token_ids),
        logprobs=_one_per_token(extensions, "token_logprobs", len(token_ids)),
        versions=_versions(_extension(extensions, "policy_versions"), len(token_ids)),
        text=choice.message.content or "",
        finish_reason=FinishReason(choice.finish_reason),
        num_aborts=int(extensions.get("num_aborts") or 0),
    )
    return Turn(
        completion=completion,
        stop_string=str(extensions.get("stop_reason") or ""),
        text_ends=_one_per_token(extensions, "text_ends", len(token_ids)),
    )


def _versions(spans: list[Any], num_tokens: int) -> tuple[int, ...]:
    try:
        return versions_of(spans, num_tokens)
    except ValueError as error:
        raise GenerationError(f"the reply's {error}") from error


def _extension(found: dict[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    if not isinstance(value, list):
        raise GenerationError(
            f"the reply has no {name}; base_url must be an endpoint of skyrl_async, which sends it for return_token_ids"
        )
    return value


def _one_per_token(found: dict[str, Any], name: str, num_tokens: int) -> tuple[Any, ...]:
    value = _extension(found, name)
    if len(value) != num_tokens:
        raise GenerationError(f"the reply's {name} has {len(value)} entries for {num_tokens} token ids")
    return tuple(value)
