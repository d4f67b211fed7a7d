"""Reading the parts of a body that are told apart by a ``type``: items, content blocks, tools.

Flows in: JSON values and where in the body they stood. Flows out: text, chat content and chat tools, or a refusal that
names the place, what was found and what is served. Does not know which surface asks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_async.chat import Tool
from skyrl_async.endpoint.requests.errors import ApiError


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
