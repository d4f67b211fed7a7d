"""Plays skyrl_gym environments over ``/v1/chat/completions``, as an agent outside the trainer would.

Token ids, log-probs and versions of the trajectories are exact: the endpoint sends them in extensions of its replies. This module does not
know tokenizers, engines or the trainer.
"""

import re
from http import HTTPStatus
from typing import Any

import numpy as np
from openai import (
    DEFAULT_CONNECTION_LIMITS,
    APIConnectionError,
    APIError,
    APIStatusError,
    AsyncOpenAI,
    BadRequestError,
    DefaultAsyncHttpxClient,
)
from openai.types.chat import ChatCompletion

from skyrl_async.columns import VersionSpans, begins_with, column
from skyrl_async.errors import GenerationError, OutageError, PromptTooLongError
from skyrl_async.generators.gym.environment import EnvironmentFactory
from skyrl_async.generators.gym.episode_state import Turn, TurnRequest
from skyrl_async.generators.gym.generator import EpisodeGenerator
from skyrl_async.runtime.outages import Outages, Resending
from skyrl_async.runtime.progress import OnCall, report_engine
from skyrl_async.types import Completion, FinishReason

_NO_ENGINE = "no_engine"
"""Code of the endpoint's 503 when it has no engine to ask."""
_OVERFLOW = re.compile(
    r"(?:maximum context length|max_total_tokens) is (\d+) tokens, but the (?:prompt has (?:at least )?(\d+)|body)"
)


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
        outages: Outages | None = None,
        outage_timeout_s: float = 0.0,
        on_call: OnCall = lambda *_: None,
    ) -> None:
        """
        Args:
            base_url: URL of the endpoint, with ``/v1``.
            api_key: bearer key.
            model: name under which the endpoint serves the policy.
            make_environment: makes an environment from a prompt's ``env_class`` and ``extras``.
            max_turns: most turns of an episode, >= 1, whatever the environment says.
            max_trajectory_tokens: most response tokens of an episode, the environment's included; None: only the model's context is a
                bound.
            outages: waited for before a request is sent again; None: no outage is known.
            outage_timeout_s: how long a request is sent again, from the first time it was not answered; 0: never.
            on_call: told of the endpoint's engine calls.
        """
        super().__init__(make_environment, max_turns=max_turns, max_trajectory_tokens=max_trajectory_tokens)
        # The client's own connections would go through a proxy of the environment, and hold back all requests beyond a thousand.
        connections = DefaultAsyncHttpxClient(trust_env=False, limits=type(DEFAULT_CONNECTION_LIMITS)())
        # No retries: a resend would sample a second answer while the first may still be running. In an outage it cannot be.
        # No timeout: a group has a deadline, and the endpoint holds requests while weights change.
        self._client = AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=connections, timeout=None, max_retries=0
        )
        self._model = model
        self._resending = Resending(outages or Outages(), outage_timeout_s)
        self._on_call = on_call

    async def close(self, timeout_s: float = 10.0) -> None:
        """Close the connections, and wait for environments that are being closed."""
        await self._client.close()
        await super().close(timeout_s)

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
        engines, seconds = turn.completion.engines, turn.completion.engine_seconds
        for engine in engines:
            report_engine(engine)
        if len(engines) == 1 and seconds is not None:
            self._on_call(engines[0], len(turn.completion.token_ids), seconds)
        if not begins_with(turn.completion.prompt_token_ids, request.context_token_ids):
            raise GenerationError(
                f"the endpoint's prompt_token_ids must begin with the {len(request.context_token_ids)} ids of "
                "prefix_token_ids, but do not"
            )
        return turn

    async def _send(self, arguments: dict[str, Any]) -> ChatCompletion:
        """Raises ``OutageError`` if nothing answers, or nothing can be sampled there."""
        try:
            return await self._client.chat.completions.create(**arguments)
        except APIError as error:
            if _is_outage(error):
                raise OutageError(str(self._failure(error))) from error
            raise

    def _arguments(self, request: TurnRequest) -> dict[str, Any]:
        sampling = request.sampling
        extensions = {
            "return_token_ids": True,
            "prefix_token_ids": request.context_token_ids.tolist() or None,
            "max_total_tokens": request.max_total_tokens,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "ignore_eos": sampling.ignore_eos,
            "session_id": request.session_id,
            "priority": request.priority,
        }
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


def _is_outage(error: APIError) -> bool:
    if isinstance(error, APIStatusError):
        return error.status_code == HTTPStatus.SERVICE_UNAVAILABLE and error.code == _NO_ENGINE
    return isinstance(error, APIConnectionError)


def parse_reply(reply: ChatCompletion) -> Turn:
    """Return the turn in a reply; ``GenerationError`` names what is missing or does not fit."""
    if len(reply.choices) != 1:
        raise GenerationError(f"the endpoint must answer with one choice, got {len(reply.choices)}")
    choice = reply.choices[0]
    if choice.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise GenerationError(f"the reply's finish_reason must be stop or length, got {choice.finish_reason!r}")
    found = {**(reply.model_extra or {}), **(choice.model_extra or {})}
    token_ids = _extension(found, "token_ids")
    num_tokens = len(token_ids)
    try:
        completion = Completion(
            prompt_token_ids=_extension(found, "prompt_token_ids"),
            token_ids=token_ids,
            logprobs=_extension(found, "token_logprobs", num_tokens),
            versions=VersionSpans.from_json(_extension(found, "policy_versions"), num_tokens),
            text=found.get("text") or choice.message.content or "",
            finish_reason=FinishReason(choice.finish_reason),
            num_aborts=int(found.get("num_aborts") or 0),
            engines=tuple(found.get("engines") or ()),
            engine_seconds=found.get("engine_seconds"),
            asked_at=found.get("asked_at"),
        )
        text_ends = column(_extension(found, "text_ends", num_tokens), np.int32, "text_ends")
    except ValueError as error:
        raise GenerationError(f"the reply's {error}") from error
    return Turn(completion=completion, stop_string=str(found.get("stop_reason") or ""), text_ends=text_ends)


def _extension(found: dict[str, Any], name: str, num_tokens: int | None = None) -> Any:
    """Return a list of a reply, which has one entry per token if ``num_tokens`` is given."""
    value = found.get(name)
    if not isinstance(value, list):
        raise GenerationError(
            f"the reply has no {name}; base_url must be an endpoint of skyrl_async, which sends it for return_token_ids"
        )
    if num_tokens is not None and len(value) != num_tokens:
        raise GenerationError(f"the reply's {name} has {len(value)} entries for {num_tokens} token ids")
    return value
