"""Parts of JSON replies that several surfaces share."""

from collections.abc import Sequence
from typing import Any

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.requests.fields import ignored_metadata
from skyrl_async.types import Completion, CompletionDelta
from skyrl_async.version_spans import spans_of

_LEAST_LOGPROB = -9999.0
"""OpenAI and vLLM write -inf so: JSON has no infinity."""


def provenance(block: Completion | CompletionDelta) -> dict[str, Any]:
    """Exact tokens of a choice or block. Version spans count from its first token."""
    return {
        "token_ids": block.token_ids,
        "token_logprobs": block.logprobs,
        "policy_versions": spans_of(block.versions),
    }


def extra_fields(prompt_token_ids: Sequence[int], ignored_tools: Sequence[str], *, has_ids: bool) -> dict[str, Any]:
    """Fields that the surface's own replies lack: the prompt's ids if ``has_ids``, and the ignored tools if there are any."""
    metadata = {"metadata": ignored_metadata(ignored_tools)} if ignored_tools else {}
    return ({"prompt_token_ids": prompt_token_ids} if has_ids else {}) | metadata


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def chat_logprobs(
    block: Completion | CompletionDelta, renderer: ChatRenderer, *, as_ids: bool = False
) -> dict[str, Any]:
    """``logprobs`` of a chat choice or chunk; ``as_ids`` writes tokens as ``token_id:5``."""
    alternatives = block.top_logprobs or ((),) * len(block.token_ids)
    content = [
        _spelled(token_id, logprob, renderer, as_ids)
        | {"top_logprobs": [_spelled(other, value, renderer, as_ids) for other, value in likeliest]}
        for token_id, logprob, likeliest in zip(block.token_ids, block.logprobs, alternatives, strict=True)
    ]
    return {"content": content, "refusal": None}


def _spelled(token_id: int, logprob: float, renderer: ChatRenderer, as_ids: bool) -> dict[str, Any]:
    token, raw = _token(token_id, renderer, as_ids), renderer.token_bytes(token_id)
    return {"token": token, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(raw)}


def _token(token_id: int, renderer: ChatRenderer, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else renderer.token_bytes(token_id).decode(errors="replace")


def completion_logprobs(
    block: Completion | CompletionDelta, renderer: ChatRenderer, offset: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """``logprobs`` of a text completion's choice or chunk; ``offset``: characters before its text."""
    offsets = []
    for token_id in block.token_ids:
        offsets.append(offset)
        offset += len(_token(token_id, renderer, False))
    likeliest = [
        {_token(i, renderer, as_ids): max(value, _LEAST_LOGPROB) for i, value in position}
        for position in block.top_logprobs
    ]
    return {
        "tokens": [_token(i, renderer, as_ids) for i in block.token_ids],
        "token_logprobs": block.logprobs,
        "top_logprobs": likeliest or None,
        "text_offset": offsets,
    }
