"""Log-probs of rows from a model behind an OpenAI-compatible server that scores prompts, such as vLLM's. It is another run's or nobody's.

stage ──rows──> POST /completions {prompt: token ids, prompt_logprobs: 0} ──> log-prob of each token given those before it
"""

import asyncio
import bisect
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np

from skyrl_async.columns import Logprobs
from skyrl_async.errors import ConfigError, InferenceError
from skyrl_async.runtime.outages import Backoff
from skyrl_async.runtime.tasks import task_group
from skyrl_async.types import RowLogprobs, Trajectory

logger = logging.getLogger(__name__)

_PAUSES = Backoff(base_s=0.5, max_s=10.0)
_MAX_REQUESTS = 32
"""At once: a server batches them."""
_REQUEST_TIMEOUT_S = 300.0
_NUM_PROBE_TOKENS = 16
_UNDECODABLE = "\ufffd"
"""In the text of a token that is a part of a character."""
_OTHER_ANSWERS = (json.JSONDecodeError, LookupError, TypeError)
"""Raised by answers of a server of another kind, such as a proxy while the teacher is gone."""
Decode = Callable[[Sequence[int]], str]


class _NoScoresError(InferenceError):
    """An answer without scores: the server gives none, or ends and has aborted the request."""


def _told(error: Exception) -> str:
    """Why a check failed, in words."""
    if isinstance(error, httpx.HTTPStatusError):
        code = error.response.status_code
        is_refused = code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
        hint = ", see trainer.algorithm.distillation.api_key" if is_refused else ""
        return f"{error.request.url} answers {code}{hint}"
    if isinstance(error, httpx.HTTPError):
        return f"nobody answers there ({type(error).__name__}: {error})"
    return str(error) if isinstance(error, InferenceError) else "what answers there is another kind of server"


class ServedTeacher:
    """One server. ``close`` last.

    Args:
        name: of the teacher, for messages.
        url: its address, with ``/v1``.
        api_key: sent with each request; None sends none.
        timeout_s: how long requests that fail are sent again.
    """

    def __init__(self, name: str, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._label = f"teacher {name} at {url}"
        self._key = f"trainer.algorithm.distillation.teachers.{name}={url}"
        self._timeout_s = timeout_s
        self._requests = asyncio.Semaphore(_MAX_REQUESTS)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._detokenize_url = f"{url.rstrip('/').removesuffix('/v1')}/detokenize"
        self._http = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=_REQUEST_TIMEOUT_S)
        self._model: str | None = None
        self._context: int | None = None
        """Most tokens of prompt and answer, where the server says; each request asks for one token beside its prompt."""

    async def check(self, token_ids: Sequence[int], decode: Decode) -> None:
        """Score a few tokens and compare all with the policy's, before a run needs it.

        Parts of characters look alike, and are not told apart. Of a server without vLLM's ``/detokenize`` the scored tokens are compared
        alone, and the log says so.

        Args:
            token_ids: the policy's, ascending, at least two.
            decode: their text in the policy's vocabulary.

        Raises:
            ConfigError: nobody answers, it gives no prompt log-probs, or its tokens are others.
        """
        probe = [*token_ids[:: -(-len(token_ids) // _NUM_PROBE_TOKENS)], token_ids[-1]]
        try:
            are_compared = await self._are_compared(token_ids, decode)
            found = await self._scored(probe)
        except (httpx.HTTPError, InferenceError, *_OTHER_ANSWERS) as error:
            raise ConfigError(
                f"{self._key} must be the address, with /v1, of an OpenAI-compatible server that gives prompt log-probs, as vLLM's does: "
                f"{_told(error)}"
            ) from error
        if are_compared:
            return
        logger.warning(
            "%s does not tell its tokens, as vLLM does at /detokenize: %d of the policy's %d are compared",
            *(self._label, len(probe) - 1, len(token_ids)),
        )
        for token, entry in zip(probe, found, strict=True):
            text, said = decode([token]), entry.get(str(token), {}).get("decoded_token")
            if said is not None and _UNDECODABLE not in text and said != text:
                raise self._has_another(token, said, text)

    async def _are_compared(self, token_ids: Sequence[int], decode: Decode) -> bool:
        """Compare all tokens; False where the server does not tell them. Raises ``ConfigError`` with the first that differs.

        Each token stands before the first one, so that no two tokens pass for two others with the same text.
        """
        tokens = [each for token in token_ids for each in (token, token_ids[0])]
        there = await self._text(tokens)
        if there is not None and there != decode(tokens):
            ends = range(2, len(tokens), 2)
            index = bisect.bisect_left(ends, True, key=lambda end: not there.startswith(decode(tokens[:end])))
            token = token_ids[index]
            raise self._has_another(token, await self._text([token]), decode([token]))
        return there is not None

    def _has_another(self, token: int, there: str | None, here: str) -> ConfigError:
        return ConfigError(f"{self._key} must have the policy's tokens: {token} is {there!r} there and {here!r} here")

    async def _text(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of tokens; None where the server does not tell it. Raises ``httpx.HTTPError``."""
        answer = await self._http.post(self._detokenize_url, json={"tokens": list(token_ids)})
        if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            return None
        answer.raise_for_status()
        return str(answer.json()["prompt"])

    async def logprobs_of(self, trajectories: Sequence[Trajectory]) -> RowLogprobs:
        """Log-probs of the trajectories' sampled tokens at temperature 1; waits while the server is gone.

        Raises ``InferenceError`` once it has been for ``timeout_s``, or for rows that it refuses.
        """
        async with task_group() as tasks:
            asked = [tasks.create_task(self._of_row(row), name="teacher") for row in trajectories]
        return RowLogprobs(values=tuple(task.result() for task in asked), version=0)

    async def _of_row(self, row: Trajectory) -> Logprobs:
        column: Logprobs = np.zeros(len(row.response_token_ids), np.float32)
        if not row.num_sampled_tokens:
            return column
        token_ids = [*row.prompt_token_ids.tolist(), *row.response_token_ids.tolist()]
        found = await self._until_scored(token_ids)
        first = len(row.prompt_token_ids)
        for place in np.flatnonzero(row.loss_mask).tolist():
            column[place] = found[first + place][str(token_ids[first + place])]["logprob"]
        return column

    async def _until_scored(self, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        clock = asyncio.get_running_loop().time
        deadline, num_failures = 0.0, 0
        while True:
            try:
                async with self._requests:
                    return await self._scored(token_ids)
            except (httpx.HTTPError, _NoScoresError, *_OTHER_ANSWERS) as error:
                if not num_failures:
                    deadline = clock() + self._timeout_s
                if clock() >= deadline:
                    raise InferenceError(
                        f"{self._label} has not answered for {self._timeout_s:g} s "
                        f"(trainer.algorithm.distillation.timeout_s): {error!r}"
                    ) from error
                if not num_failures:
                    logger.warning("%s does not answer, and is asked again: %r", self._label, error)
            await asyncio.sleep(_PAUSES.seconds(num_failures, seed=len(token_ids)))
            num_failures += 1

    async def _scored(self, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Per token, token id -> its score; empty for the first, which nothing predicts.

        Raises ``httpx.HTTPError`` and ``_NoScoresError`` where the server may answer later, and ``InferenceError``.
        """
        if self._model is None:
            models = await self._http.get("/models")
            models.raise_for_status()
            first = models.json()["data"][0]
            self._context, self._model = first.get("max_model_len"), str(first["id"])
        if self._context is not None and len(token_ids) >= self._context:
            raise InferenceError(
                f"{self._label} has a context of {self._context} tokens (max_model_len), and a prompt with its answer has "
                f"{len(token_ids)}: set engine.max_model_len={self._context - 1}, or start it with a longer --max-model-len"
            )
        body = {"model": self._model, "prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._http.post("/completions", json=body)
        if answer.is_client_error and answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
            raise InferenceError(f"{self._label} refuses {len(token_ids)} tokens: {answer.text[:500]}")
        answer.raise_for_status()
        scores = answer.json()["choices"][0].get("prompt_logprobs")
        if not isinstance(scores, list) or len(scores) != len(token_ids):
            raise _NoScoresError(f"{self._label} gives no prompt log-probs, as vLLM's prompt_logprobs=0 does")
        return [entry or {} for entry in scores]

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()
