"""Reads and refuses fields of request bodies, for any surface.

A refusal names the field, what was found and what is served. ``test_request_fields`` checks that every field of the installed vLLM's
requests is in a schema, is refused here, or changes nothing that is sampled.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from skyrl_async.chat import Tool
from skyrl_async.columns import TokenIds, token_ids
from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.errors import ConfigError
from skyrl_async.types import SamplingParams


def refused(where: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """A 400 about the field at ``where`` (dotted, as ``input.2.content``)."""
    return ApiError(400, f"{where} {message}", code=code, param=where)


def unsupported(where: str, kind: object, served: str) -> ApiError:
    """A 400 about an item whose ``type`` is not served."""
    return refused(f"{where}.type", f"{kind!r} is not supported; {served}", code="unsupported_value")


def object_at(value: object, where: str) -> Mapping[str, Any]:
    """``value`` if it is an object."""
    if not isinstance(value, dict):
        raise refused(where, f"must be an object, got {_kind(value)}")
    return value


def string_at(parent: Mapping[str, Any], key: str, where: str) -> str:
    """The string ``parent[key]``."""
    value = parent.get(key)
    if not isinstance(value, str):
        raise refused(f"{where}.{key}", f"must be a string, got {_kind(value)}")
    return value


def name_at(parent: Mapping[str, Any], key: str, where: str) -> str:
    """The string ``parent[key]``, which may not be empty."""
    value = string_at(parent, key, where)
    if not value:
        raise refused(f"{where}.{key}", "must not be empty")
    return value


def texts_at(parent: Mapping[str, Any], key: str, where: str, fields: Mapping[str, str]) -> list[str]:
    """The texts of ``parent[key]``: a string, null, or a list of text parts.

    Args:
        where: place of the parent; empty for the body.
        fields: part type -> the key of its text. Parts of other types are refused by name.
    """
    value, where = parent.get(key), f"{where}.{key}".removeprefix(".")
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise refused(where, f"must be a string or a list, got {_kind(value)}")
    texts = []
    for index, part in enumerate(value):
        at = f"{where}.{index}"
        kind = object_at(part, at).get("type")
        if not isinstance(kind, str) or kind not in fields:
            served = " or ".join(map(repr, fields))
            raise unsupported(at, kind, f"content here may be of type {served}")
        texts.append(string_at(part, fields[kind], at))
    return texts


def chat_content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Texts as the content of a chat message: one as a string, several as parts."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def chat_tool(tool: Mapping[str, Any], where: str, *, parameters: str = "parameters") -> Tool:
    """A function tool in chat form, without absent and null fields. ``parameters`` is the key of its JSON schema."""
    schema = tool.get(parameters)
    if schema is not None and not isinstance(schema, dict):
        raise refused(f"{where}.{parameters}", f"must be a JSON schema, got {_kind(schema)}")
    function = {
        "name": name_at(tool, "name", where),
        "description": tool.get("description"),
        "parameters": schema,
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def tool_name(tool: Mapping[str, Any]) -> str:
    """The name of a tool that is no function, for replies and errors: its type, and its own name if it has one."""
    inner = tool.get(tool["type"])
    name = tool.get("name") or (inner.get("name") if isinstance(inner, dict) else None)
    return f"{tool['type']} {name}" if isinstance(name, str) else str(tool["type"])


def ignored_metadata(ignored: Sequence[str]) -> dict[str, str]:
    """``metadata`` of a reply, naming the ignored tools; empty without any."""
    return {"ignored_tools": ", ".join(ignored)} if ignored else {}


def ignored_note(ignored: Sequence[str]) -> str:
    """The end of an error about tools, naming the ignored ones."""
    return f"; ignored, because only functions can be called here: {', '.join(ignored)}" if ignored else ""


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


@contextmanager
def refused_values(param: str) -> Iterator[None]:
    """Turn a ``ValueError`` of the block into a refusal of ``param``.

    A ``ConfigError``, though a ``ValueError`` too, passes: it is the chat template's fault and not the client's.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param=param) from error


def known_ids(found: Sequence[int], vocab_size: int, *, param: str) -> TokenIds:
    """A client's token ids as a column, if all are in ``[0, vocab_size)``; ``ApiError`` 400 otherwise."""
    if found and (min(found) < 0 or max(found) >= vocab_size):
        unknown = next(i for i in found if not 0 <= i < vocab_size)
        raise refused(param, f"must hold ids in [0, {vocab_size}), got {unknown}")
    return token_ids(found)


_OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values by which a field asks for nothing."""

REFUSED: Mapping[str, str] = {
    "add_special_tokens": "prompts are encoded as they stand; write special tokens into the prompt",
    "best_of": "set n and choose among the choices",
    "chat_template": "the policy's own template is used",
    "chat_template_kwargs": "the policy's template is rendered as it is; set its defaults in the policy's tokenizer",
    "continue_final_message": "an answer that is begun is not continued; send its tokens to /v1/completions",
    "documents": "write them into messages",
    "echo": "only /v1/completions echoes prompts",
    "guided_whitespace_pattern": "grammars are followed with the engine's own white space",
    "logprob_token_ids": "log-probs are of sampled tokens and of the likeliest ones; set top_logprobs",
    "previous_input_messages": "send the earlier items in input",
    "prompt_embeds": "send token ids in prompt",
    "prompt_logprobs": "log-probs are of sampled tokens",
    "repetition_detection": "set max_tokens or stop",
    "thinking_token_budget": "set max_tokens",
    "truncate_prompt_tokens": "prompts are not cut; send a shorter one",
    "use_beam_search": "answers are sampled; set n",
}
"""Fields that would change prompt, sampling or result -> advice."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"thinking_token_budget": (-1,), "best_of": (1,)}
"""Further values that ask for nothing."""


def refuse_unserved(fields: Mapping[str, Any]) -> None:
    """Raise ``ApiError`` for a field with a value that is not served."""
    for name, advice in REFUSED.items():
        value = fields.get(name)
        if not any(type(value) is type(off) and value == off for off in _OFF + _NEUTRAL.get(name, ())):
            raise refused(name, f"is not served; {advice}", code="unsupported_parameter")
    if fields.get("add_generation_prompt") is False:
        advice = "a prompt that ends in no turn of the assistant's can be sent to /v1/completions as tokens"
        raise refused("add_generation_prompt", f"must be true, got false; {advice}", code="unsupported_parameter")


_INEXACT = ("min_tokens", "logit_bias", "allowed_token_ids", "bad_words")
"""Parameters that change the distribution away from the one whose log-probs the trainer computes."""


def refuse_inexact(asked: SamplingParams) -> None:
    """Raise ``ApiError`` for parameters that a session with the trainer's sampling must not get."""
    for name in _INEXACT:
        if getattr(asked, name):
            reason = "changes the distribution that this session's trainer computes log-probs of"
            advice = "leave it out, or send a key that is no session's"
            raise refused(name, f"{reason}; {advice}", code="unsupported_parameter")
