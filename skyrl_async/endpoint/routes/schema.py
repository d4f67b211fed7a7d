"""Fields that the bodies of several surfaces share.

Unknown fields are ignored, never refused: every harness sends some of its own. Does not know HTTP.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from skyrl_async.chat import Tool
from skyrl_async.endpoint.requests.fields import chat_content, refuse_unserved, refused
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


class SamplingFields(BaseModel):
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
    replies also with ``text_ends`` and ``num_aborts``."""
    return_tokens_as_token_ids: bool = False
    """Write tokens in log-probs as ``token_id:5``."""
    session_id: Label | None = None
    """Requests of one label go to one engine while it lives. A label, never authority."""

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

    def to_generation(self, session_header: str | None) -> Sequence[GenerationRequest]:
        """The requests, one per prompt, without their wire format; ``ApiError`` names what is not served."""
        raise NotImplementedError

    def generation(self, session_header: str | None, sampling: SamplingParams, **prompt: Any) -> GenerationRequest:
        """A request for ``prompt``, the fields of ``GenerationRequest`` about messages, tools and lengths."""
        return GenerationRequest(
            sampling=sampling,
            bad_words=tuple(self.bad_words),
            session_label=session_header if self.session_id is None else str(self.session_id),
            priority=self.priority,
            **prompt,
        )

    def sampling(
        self,
        max_tokens: int | None,
        structured: StructuredOutput | None,
        num_top_logprobs: int,
        *,
        shows_logprobs: bool = False,
    ) -> SamplingParams:
        """The sampling parameters; the context bounds a missing ``max_tokens``. ``ApiError`` names a field that is not served."""
        refuse_unserved(self.model_extra or {})
        if self.min_tokens > (max_tokens or UNBOUNDED):
            raise refused("min_tokens", f"must be <= max_tokens, got {self.min_tokens} > {max_tokens}")
        return SamplingParams(
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

    def _structured(self, of_format: StructuredOutput | None) -> StructuredOutput | None:
        """The grammar of the answer: the surface's own format, or vLLM's fields."""
        guided = {name: value for name in _GUIDED if (value := getattr(self, f"guided_{name}")) is not None}
        asked = [] if of_format is None else [of_format]
        asked += [] if self.structured_outputs is None else [self.structured_outputs.structured]
        asked += [StructuredOutputs.model_validate({name: value}).structured for name, value in guided.items()]
        if len(asked) > 1:
            raise refused("structured_outputs", "and other formats constrain the same answer; set one of them")
        return asked[0] if asked else None


class JsonSchema(BaseModel):
    """OpenAI's ``response_format.json_schema``."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("response_format.json_schema must be set with type json_schema, got none")
        return self

    @property
    def structured(self) -> StructuredOutput | None:
        if self.type == "json_schema" and self.json_schema is not None:
            return StructuredOutput(json_schema=json.dumps(self.json_schema.schema_))
        return StructuredOutput(json_object=True) if self.type == "json_object" else None


class FunctionDefinition(BaseModel):
    """OpenAI's ``function`` of a tool."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, StringConstraints(min_length=1)]
    parameters: dict[str, Any] | None = None


class ToolDefinition(BaseModel):
    """OpenAI's tool. Functions are the only kind that is served; others are ignored, since clients send some by default."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    function: FunctionDefinition | None = Field(default=None, validate_default=True)
    """Set if ``type`` is ``function``, and only then."""

    @field_validator("function", mode="before")
    @classmethod
    def _is_of_a_function(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("type") != "function":
            return None
        if value is None:
            raise ValueError("a tool of type function must have a function, got none")
        return value

    def to_tool(self) -> Tool:
        """The tool as the client sent it, for templates."""
        return {"type": "function", **self.model_dump(exclude_unset=True)}


def assistant_message(texts: Sequence[str], reasoning: Sequence[str], calls: Sequence[dict[str, Any]]) -> Message:
    """One turn of the assistant, as a chat client would have sent it."""
    message: Message = {"role": "assistant", "content": chat_content(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = list(calls)
    return message


def functions_of(tools: "Sequence[ToolDefinition] | None") -> tuple[Tool, ...]:
    """The tools that are functions, for templates."""
    return tuple(tool.to_tool() for tool in tools or () if tool.function is not None)
