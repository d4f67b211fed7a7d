"""Fields that the bodies of several surfaces share.

Unknown fields are ignored, never refused: every harness sends some of its own. Does not know HTTP.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints, model_validator

from skyrl_async.chat import Tool
from skyrl_async.endpoint.requests.fields import (
    chat_content,
    chat_tool,
    ignored_note,
    name_at,
    object_at,
    refuse_unserved,
    refused,
    string_at,
    tool_name,
    unsupported,
)
from skyrl_async.endpoint.requests.generation import GenerationRequest
from skyrl_async.types import Message, SamplingParams, StructuredOutput

UNBOUNDED = 2**31
"""``max_tokens`` of a request without one: the context bounds it."""


class StreamOptions(BaseModel):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    """A stream ends with a usage chunk."""


T = TypeVar("T")


class _FailFast(FailFast):
    """Pydantic's marker made hashable, so that a union may hold it."""

    __hash__ = object.__hash__


Checked = Annotated[list[T], _FailFast()]
"""A list that is checked up to its first wrong value: to report all would take seconds."""
StopString = Annotated[str, StringConstraints(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Label = Annotated[str | int, Field(union_mode="left_to_right")]
"""A session's label; a number is the same as its digits."""
_GUIDED = ("json", "regex", "choice", "grammar")
_AS_THEY_ARE = (
    *("temperature", "top_p", "min_p", "seed", "min_tokens", "ignore_eos", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields that are sampling parameters of the same name and meaning."""


class Body(BaseModel):
    """A body in which null means the default."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, body: Any) -> Any:
        """Drop nulls, except of required fields. A null ``max_tokens`` stays too: only the context bounds it."""
        if not isinstance(body, dict):
            return body
        fields = cls.model_fields

        def is_kept(name: str) -> bool:
            return name == "max_tokens" or (name in fields and fields[name].is_required())

        return {name: value for name, value in body.items() if value is not None or is_kept(name)}


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``; one field is set."""

    model_config = ConfigDict(extra="allow")

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        for name, value in (self.model_extra or {}).items():
            if value:
                raise ValueError(
                    f"{name} is not served; json, json_object, regex, choice or grammar constrain an answer"
                )
        if sum(getattr(self, name) not in (None, False) for name in type(self).model_fields) != 1:
            raise ValueError("exactly one of json, json_object, regex, choice and grammar must be set")
        return self

    @property
    def structured(self) -> StructuredOutput:
        return StructuredOutput(
            json_schema=json.dumps(self.json_) if isinstance(self.json_, dict) else self.json_,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
        )


class SamplingFields(Body):
    """Sampling parameters under the names of OpenAI and vLLM."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: StopString | Checked[StopString] = []
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    top_k: int = Field(default=0, ge=-1, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, Annotated[float, Field(allow_inf_nan=False)]] = {}
    allowed_token_ids: TokenIds | None = None
    bad_words: list[StopString] = []
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    """vLLM's older names for the fields of ``structured_outputs``."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    return_token_ids: bool = False
    """Answer with ``prompt_token_ids`` and, per choice, ``token_ids``, ``token_logprobs``, ``policy_versions``; whole
    replies also with ``text``, ``text_ends``, ``num_aborts``, ``engines``, ``engine_seconds`` and ``asked_at``."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in log-probs as ``token_id:5``."""
    session_id: Label | None = None
    """A label of the conversation, never authority. Our own engines do not need it: a request goes where its prompt is cached."""

    def to_generation(self, session_header: str | None) -> Sequence[GenerationRequest]:
        """The requests, one per prompt, without their wire format; ``ApiError`` names what is not served."""
        raise NotImplementedError

    def generation(
        self,
        session_header: str | None,
        max_tokens: int | None,
        structured: StructuredOutput | None,
        *,
        num_top_logprobs: int = 0,
        shows_logprobs: bool = False,
        **prompt: Any,
    ) -> GenerationRequest:
        """A request for ``prompt``, the fields of ``GenerationRequest`` about messages, tools and lengths.

        The context bounds a missing ``max_tokens``. ``ApiError`` names a field that is not served.
        """
        refuse_unserved(self.model_extra or {})
        if self.min_tokens > (max_tokens or UNBOUNDED):
            raise refused("min_tokens", f"must be <= max_tokens, got {self.min_tokens} > {max_tokens}")
        sampling = SamplingParams(
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            max_tokens=max_tokens or UNBOUNDED,
            top_k=max(self.top_k, 0),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            includes_stop=self.include_stop_str_in_output,
            stop_token_ids=tuple(self.stop_token_ids),
            logit_bias=tuple((i, min(100.0, max(-100.0, bias))) for i, bias in self.logit_bias.items()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            structured=self._structured(structured),
            num_top_logprobs=num_top_logprobs,
            reports_logprobs=shows_logprobs or num_top_logprobs > 0 or self.return_token_ids,
        )
        return GenerationRequest(
            sampling=sampling,
            bad_words=tuple(self.bad_words),
            session_label=session_header if self.session_id is None else str(self.session_id),
            priority=self.priority,
            **prompt,
        )

    def _structured(self, of_format: StructuredOutput | None) -> StructuredOutput | None:
        """The grammar of the answer: the surface's own format, or vLLM's fields."""
        guided = {name: value for name in _GUIDED if (value := getattr(self, f"guided_{name}")) is not None}
        asked = [] if of_format is None else [of_format]
        asked += [] if self.structured_outputs is None else [self.structured_outputs.structured]
        asked += [StructuredOutputs.model_validate({name: value}).structured for name, value in guided.items()]
        if len(asked) > 1:
            raise refused("structured_outputs", "and other formats constrain the same answer; set one of them")
        return asked[0] if asked else None


class ToolFields(Body):
    """The tools of a request. Functions are the only kind that is served; others are ignored, since clients send some by default."""

    tools: Checked[dict[str, Any]] = Field(default=[])
    tool_choice: Any = "auto"

    served_tools: ClassVar[str] = "function"
    """The type of tools that are served, and of those without a type."""

    def chat_tools(self) -> tuple[Tool, ...]:
        """The tools that are served, in chat form; ``ApiError`` names what cannot be used."""
        return tuple(
            self.chat_tool(tool, where)
            for where, tool in self.listed_tools()
            if string_at({"type": self._type(tool)}, "type", where) == self.served_tools
        )

    def listed_tools(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(place, tool) of each tool that stands in the prompt, or is ignored."""
        for i, tool in enumerate(self.tools):
            yield f"tools.{i}", tool

    def chat_tool(self, tool: Mapping[str, Any], where: str) -> Tool:
        """A served tool in chat form."""
        return chat_tool(tool, where)

    @property
    def ignored_tools(self) -> tuple[str, ...]:
        """The tools that are not served, by type and name."""
        return tuple(tool_name(tool) for _, tool in self.listed_tools() if self._type(tool) != self.served_tools)

    def choice(self) -> str:
        """``auto``, ``none``, ``required`` or a function's name."""
        choice = self.tool_choice
        if choice in ("auto", "none", "required"):
            return str(choice)
        if not isinstance(choice, dict):
            raise refused("tool_choice", f"must be auto, none, required or a function, got {choice!r}")
        if choice.get("type", "function") != "function":
            note = ignored_note(self.ignored_tools)
            raise unsupported("tool_choice", choice["type"], f"choose auto, none, required or a function{note}")
        return name_at(object_at(choice.get("function", choice), "tool_choice.function"), "name", "tool_choice")

    def tool_fields(self) -> dict[str, Any]:
        """The fields of ``GenerationRequest`` about tools; ``ApiError`` if the tools cannot satisfy the choice."""
        tools, choice, note = self.chat_tools(), self.choice(), ignored_note(self.ignored_tools)
        names = [tool["function"]["name"] for tool in tools]
        if choice == "required" and not names:
            raise refused("tool_choice", f"asks for a call, but tools holds no function{note}")
        if choice not in ("auto", "none", "required", *names):
            raise refused("tool_choice", f"names the function {choice!r}, which is not among the tools {names}{note}")
        return {"tools": tools or None, "tool_choice": choice}

    def _type(self, tool: Mapping[str, Any]) -> Any:
        return tool.get("type") or self.served_tools


class ChatToolFields(ToolFields):
    """Tools in OpenAI's chat form. Templates get them as the client sent them."""

    def chat_tool(self, tool: Mapping[str, Any], where: str) -> Tool:
        chat_tool(object_at(tool.get("function"), f"{where}.function"), f"{where}.function")
        return {"type": "function"} | {key: value for key, value in tool.items() if key != "type"}


def format_of(
    form: Any,
    where: str,
    *,
    served: Sequence[str] = ("text", "json_object", "json_schema"),
    schema_in: str | None = None,
) -> StructuredOutput | None:
    """The constraint that a format asks for. ``ApiError`` if it is not served.

    Args:
        where: place of the format.
        served: types of formats.
        schema_in: the key of the object that has the schema; None: the format itself.
    """
    if form is None:
        return None
    kind = object_at(form, where).get("type")
    if kind not in served:
        raise unsupported(where, kind, f"choose {' or '.join(served)}")
    if kind == "json_schema":
        if schema_in is not None:
            form, where = object_at(form.get(schema_in), f"{where}.{schema_in}"), f"{where}.{schema_in}"
        return StructuredOutput(json_schema=json.dumps(object_at(form.get("schema"), f"{where}.schema")))
    return StructuredOutput(json_object=True) if kind == "json_object" else None


def assistant_message(texts: Sequence[str], reasoning: Sequence[str], calls: Sequence[dict[str, Any]]) -> Message:
    """One turn of the assistant, as a chat client would have sent it."""
    message: Message = {"role": "assistant", "content": chat_content(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = list(calls)
    return message
