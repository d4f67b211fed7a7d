"""Keys by which a message that a harness sends back is recognised as the one it was sent.

Harnesses change messages: content becomes null, empty, absent or parts, arguments are serialised anew, ids and reasoning are dropped.
Equal messages have equal keys in spite of that. Tool-call ids and reasoning are compared separately, because they may be missing.
Nothing here raises: a message that no template can render has a key too. Does not know sessions or templates.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NewType

from skyrl_async.types import Message

MessageKey = NewType("MessageKey", bytes)
"""Digest of a normalised message."""

RAW_PROMPT_ROLE = "prompt"
"""Role of the message that stands for a prompt of text or token ids in a session's tree, where no chat message can equal it."""
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_NO_ARGUMENTS = ("", "null")
_NO_JSON = (ValueError, TypeError, RecursionError)
"""Raised for a value that is no JSON, too deep or cyclic."""


def message_key(message: Message) -> MessageKey:
    """Equal for messages that say the same.

    Part of the key are the role (``developer`` is ``system``), the content (null, absent and empty are equal; parts are joined by line
    breaks; white space around it is dropped), an assistant's tool calls by name and canonical arguments, and the ``name`` of other roles:
    an assistant's name is the harness's addition. Tool-call ids, reasoning and all other fields are not: a tool result is known by its
    place and content.
    """
    role = str(message.get("role"))
    role = "system" if role == "developer" else role
    content = text_of(message.get("content")).strip()
    if role != "assistant":
        return MessageKey(_digest((role, content, str(message.get("name") or ""))))
    return MessageKey(_digest((role, content, *(field for call in _calls(message) for field in _call_fields(call)))))


def tools_key(tools: Sequence[dict[str, Any]] | None) -> str:
    """Canonical digest of a request's tools; empty without tools."""
    return _digest((_canonical(list(tools)),)).hex() if tools else ""


def call_ids(message: Message) -> tuple[str, ...]:
    """The ids of an assistant's tool calls in order; an empty one for a call without."""
    return tuple(str(call.get("id") or "") if isinstance(call, dict) else "" for call in _calls(message))


def reasoning_of(message: Message) -> str:
    """The reasoning of a message, without white space around it; empty without reasoning."""
    found = (message.get(field) for field in _REASONING_FIELDS)
    return next((text.strip() for text in found if isinstance(text, str) and text.strip()), "")


def text_of(content: Any) -> str:
    """The text of a message's content, parts joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return _canonical(content)
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else _canonical(part)


def _calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not calls:
        return ()
    return calls if isinstance(calls, list | tuple) else (calls,)


def _call_fields(call: Any) -> tuple[str, str]:
    """Name and canonical arguments of a tool call."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        return str(function.get("name")), _canonical_arguments(function.get("arguments"))
    if isinstance(call, dict):
        return "", _canonical({name: value for name, value in call.items() if name != "id"})
    return "", _canonical(call)


def _canonical_arguments(arguments: Any) -> str:
    """Arguments in one JSON form; nothing, null and ``{}`` are equal. Text that is no JSON stays as it is."""
    text = arguments.strip() if isinstance(arguments, str) else _canonical(arguments)
    if text in _NO_ARGUMENTS:
        return "{}"
    with suppress(*_NO_JSON):
        return _canonical(_decoder.decode(text)) or text
    return text


def _canonical(value: Any) -> str:
    """``value`` in one JSON form; empty if it has none."""
    with suppress(*_NO_JSON):
        return _encoder.encode(value)
    return ""


def _digest(fields: Iterable[str]) -> bytes:
    """Digest of fields, each with its length before it."""
    digest = blake2b(digest_size=16)
    for field in fields:
        encoded = field.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.digest()


def _number(text: str) -> float | int:
    """JavaScript writes 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


_decoder = json.JSONDecoder(parse_float=_number)
_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str)
