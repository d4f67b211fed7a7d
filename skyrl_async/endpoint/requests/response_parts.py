"""Pieces of replies that several surfaces have in common.

Flows in: completions and blocks of them. Flows out: parts of JSON bodies. Does not know requests.
"""

from typing import Any

from skyrl_async.chat import ChatRenderer
from skyrl_async.types import Completion, CompletionDelta
from skyrl_async.version_spans import spans_of

_LEAST_LOGPROB = -9999.0
"""OpenAI's and vLLM's word for impossible: JSON has no infinity."""


def provenance(block: Completion | CompletionDelta) -> dict[str, Any]:
    """Exact tokens of a choice or block; spans count from its first token."""
    return {
        "token_ids": block.token_ids,
        "token_logprobs": block.logprobs,
        "policy_versions": spans_of(block.versions),
    }


def usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def chat_logprobs(block: Completion | CompletionDelta, renderer: ChatRenderer) -> dict[str, Any]:
    """``logprobs`` of a chat choice or chunk."""
    alternatives = block.top_logprobs or ((),) * len(block.token_ids)
    content = [
        _spelled(token_id, logprob, renderer)
        | {"top_logprobs": [_spelled(other, value, renderer) for other, value in likeliest]}
        for token_id, logprob, likeliest in zip(block.token_ids, block.logprobs, alternatives, strict=True)
    ]
    return {"content": content, "refusal": None}


def _spelled(token_id: int, logprob: float, renderer: ChatRenderer) -> dict[str, Any]:
    raw = renderer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(raw)}


def completion_logprobs(block: Completion | CompletionDelta, renderer: ChatRenderer, offset: int) -> dict[str, Any]:
    """``logprobs`` of a text completion's choice or chunk; ``offset`` is of its text, in characters."""
    tokens = [renderer.token_bytes(i).decode(errors="replace") for i in block.token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    likeliest = [
        {renderer.token_bytes(i).decode(errors="replace"): max(value, _LEAST_LOGPROB) for i, value in position}
        for position in block.top_logprobs
    ]
    return {
        "tokens": tokens,
        "token_logprobs": block.logprobs,
        "top_logprobs": likeliest or None,
        "text_offset": offsets,
    }
