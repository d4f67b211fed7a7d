"""The fields of vLLM's requests that are not served: those that would change what is sampled, and those that change nothing of it.

Flows in: the fields of a body that its schema does not have, and sampling parameters. Flows out: nothing, or a refusal by name. Does
not know which surface asks.
Together with the schemas it knows every field of the vLLM that is installed, which a test holds it to.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from skyrl_async.chat import Tool
from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.errors import ConfigError
from skyrl_async.types import SamplingParams


def refused(where: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """A 400 about the field at ``where`` (dotted, as ``input.2.content``)."""
    return ApiError(400, f"{where} {message}", code=code, param=where)


def unsupported(where: str, kind: object, served: str) -> ApiError:
    """A 400 about something whose ``type`` is not served."""
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
        where: of the parent; empty for the body.
        fields: part type -> the key of its text. Parts of another type are refused by name.
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
            raise unsupported(at, kind, f"content here may be {_listed(fields)}")
        texts.append(string_at(part, fields[kind], at))
    return texts


def chat_content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Texts as the content of a chat message: one as a string, several as parts."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def chat_tool(tool: Mapping[str, Any], where: str, *, parameters: str) -> Tool:
    """A function tool in chat form. ``parameters`` is the key of its JSON schema here; absent and null are left out."""
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
    """What a tool that is no function is called in replies and errors: its type, and its name if it has one."""
    inner = tool.get(tool["type"])
    name = tool.get("name") or (inner.get("name") if isinstance(inner, dict) else None)
    return f"{tool['type']} {name}" if isinstance(name, str) else str(tool["type"])


def ignored_metadata(ignored: Sequence[str]) -> dict[str, str]:
    """``metadata`` of a reply that says which tools were ignored; nothing where none were."""
    return {"ignored_tools": ", ".join(ignored)} if ignored else {}


def but_ignored(ignored: Sequence[str]) -> str:
    """The end of an error about tools."""
    return f"; ignored, because only functions can be called here: {', '.join(ignored)}" if ignored else ""


def checked_choice(choice: str, tools: Sequence[Tool], ignored: Sequence[str] = ()) -> str:
    """``choice`` (``auto``, ``none``, ``required`` or a name) if ``tools``, beside which others were ignored, can satisfy it."""
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and not names:
        raise refused("tool_choice", f"asks for a call, but tools holds no function{but_ignored(ignored)}")
    if choice not in ("auto", "none", "required", *names):
        message = f"names the function {choice!r}, which is not among the tools {names}{but_ignored(ignored)}"
        raise refused("tool_choice", message)
    return choice


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _listed(kinds: Mapping[str, str]) -> str:
    return "of type " + " or ".join(repr(kind) for kind in kinds)


@contextmanager
def refused_values(param: str) -> Iterator[None]:
    """A ``ValueError`` of the block refuses the request's ``param``.

    A ``ConfigError`` passes: though also a ``ValueError``, it is the chat template's fault and not the client's.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param=param) from error


def known_ids(token_ids: Sequence[int], vocab_size: int, *, param: str) -> tuple[int, ...]:
    """``token_ids``, all of them in ``[0, vocab_size)``; ``ApiError`` 400 otherwise."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        unknown = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise ApiError(
            400, f"{param} must hold ids in [0, {vocab_size}), got {unknown}", code="invalid_value", param=param
        )
    return tuple(token_ids)


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
"""What would change prompt, sampling or result -> what to do instead."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"thinking_token_budget": (-1,), "best_of": (1,)}
"""Further values that ask for nothing."""

REFUSED_UNLESS_TRUE: Mapping[str, str] = {
    "add_generation_prompt": "a prompt that ends in no turn of the assistant's can be sent to /v1/completions as tokens",
}
"""What is on unless it is switched off -> what to do instead."""

IGNORED: Mapping[str, str] = {
    "cache_salt": "prefixes are cached for all",
    "ec_transfer_params": "nothing is disaggregated",
    "enable_response_messages": "the reply has no copy of its messages",
    "guided_decoding_backend": "the engine has one",
    "include_reasoning": "reasoning stands in a field of its own",
    "kv_transfer_params": "nothing is disaggregated",
    "length_penalty": "of beam search, which is refused",
    "max_tool_calls": "of tools that the server runs",
    "media_io_kwargs": "there is text only",
    "mm_payload": "there is text only",
    "mm_processor_kwargs": "there is text only",
    "parallel_tool_calls": "the policy's calls are told as they were sampled",
    "prompt_cache_key": "prefixes are cached for all",
    "reasoning_effort": "how much is thought is the policy's affair",
    "request_id": "replies have ids of their own",
    "return_mm_kwargs": "there is text only",
    "return_prompt_text": "return_token_ids has the prompt's tokens",
    "return_token_offsets": "of surfaces that render only",
    "routed_experts_prompt_start": "experts are not reported",
    "service_tier": "there is one",
    "spaces_between_special_tokens": "nothing is put between tokens",
    "store": "nothing is stored",
    "stream_interval": "blocks of a stream are the engine's",
    "truncation": "prompts are not cut, and an overlong one is refused",
    "truncation_side": "of truncate_prompt_tokens, which is refused",
    "user": "sessions have keys",
    "vllm_xargs": "of extensions, of which there are none",
    "watermarking": "no watermark is configured",
}
"""What changes nothing that is sampled -> why."""


def refuse_unserved(fields: Mapping[str, Any]) -> None:
    """Raise ``ApiError`` for a field that asks for what is not served."""
    for name, advice in REFUSED.items():
        value = fields.get(name)
        if not any(type(value) is type(off) and value == off for off in _OFF + _NEUTRAL.get(name, ())):
            raise refused(name, f"is not served; {advice}", code="unsupported_parameter")
    for name, advice in REFUSED_UNLESS_TRUE.items():
        if fields.get(name) is False:
            raise refused(name, f"must be true, got false; {advice}", code="unsupported_parameter")


_INEXACT = ("min_tokens", "logit_bias", "allowed_token_ids", "bad_words")
"""What samples from another distribution than the one whose log-probs the trainer computes."""


def refuse_inexact(asked: SamplingParams) -> None:
    """Raise ``ApiError`` for what a session that samples for a trainer must not be asked."""
    for name in _INEXACT:
        if getattr(asked, name):
            reason = "changes the distribution that this session's trainer computes log-probs of"
            advice = "leave it out, or send a key that is no session's"
            raise refused(name, f"{reason}; {advice}", code="unsupported_parameter")
