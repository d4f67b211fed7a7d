"""What clients may ask of ``/v1/chat/completions`` and ``/v1/completions``.

Flows in: request bodies. Flows out: checked requests, as ``GenerationRequest``. Fields that neither these schemas nor ``fields`` know
are ignored, never refused: every harness sends some of its own. Does not know HTTP.
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
from skyrl_async.endpoint.requests.body_fields import but_ignored, refused, tool_name
from skyrl_async.endpoint.requests.fields import refuse_unserved
from skyrl_async.endpoint.requests.generation import GenerationRequest
from skyrl_async.types import SamplingParams, StructuredOutput

UNBOUNDED = 2**31
"""``max_tokens`` of a request that names none: the context bounds it."""


class StreamOptions(BaseModel):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = False


T = TypeVar("T")


class _FailFast(FailFast):
    """Pydantic's, which cannot be hashed and so not stand in a union."""

    __hash__ = object.__hash__


Checked = Annotated[list[T], _FailFast()]
"""A list whose first wrong value is told: to tell all of them would take seconds."""
StopString = Annotated[str, StringConstraints(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Label = Annotated[str | int, Field(union_mode="left_to_right")]
"""A session's label; a number is the same as its digits."""
_GUIDED = ("json", "regex", "choice", "grammar")


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
        asked = [name for name, value in (self.model_extra or {}).items() if value]
        if asked:
            raise ValueError(
                f"{asked[0]} is not served; json, json_object, regex, choice or grammar constrain an answer"
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
    """How to sample, in the names of OpenAI and vLLM. Null means the default everywhere."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int | None = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    stop: StopString | Checked[StopString] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    top_k: int | None = Field(default=0, ge=-1, lt=2**31)
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=1.0, gt=0, le=10)
    min_tokens: int | None = Field(default=0, ge=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    include_stop_str_in_output: bool | None = False
    logit_bias: dict[int, Annotated[float, Field(allow_inf_nan=False)]] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[StopString] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    """The four are older names of ``structured_outputs``' fields."""
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    priority: int | None = Field(default=0, ge=-(2**31), lt=2**31)
    return_token_ids: bool | None = False
    """Answer with ``prompt_token_ids`` and, per choice, ``token_ids``, ``token_logprobs``, ``policy_versions``; whole
    replies also with ``text_ends`` and ``num_aborts``."""
    return_tokens_as_token_ids: bool | None = False
    """Write tokens in log-probs as ``token_id:5``."""
    session_id: Label | None = None
    """Requests of one label go to one engine while it lives. A label, never authority."""

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """A stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def label(self, header: str | None) -> str | None:
        """The session's label: of the body, else of the header."""
        return header if self.session_id is None else str(self.session_id)

    def sampling(
        self,
        max_tokens: int | None,
        structured: StructuredOutput | None,
        num_top_logprobs: int,
        *,
        shows_logprobs: bool = False,
    ) -> SamplingParams:
        """These fields as a value; a missing ``max_tokens`` is bounded by the context. ``ApiError`` names what is not served."""
        refuse_unserved(self.model_extra or {})
        if (self.min_tokens or 0) > (max_tokens or UNBOUNDED):
            raise refused("min_tokens", f"must be <= max_tokens, got {self.min_tokens} > {max_tokens}")
        return SamplingParams(
            max_tokens=max_tokens or UNBOUNDED,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            includes_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            logit_bias=tuple((i, min(100.0, max(-100.0, bias))) for i, bias in (self.logit_bias or {}).items()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            structured=self._structured(structured),
            num_top_logprobs=num_top_logprobs,
            reports_logprobs=shows_logprobs or num_top_logprobs > 0 or bool(self.return_token_ids),
            skip_special_tokens=self.skip_special_tokens is not False,
        )

    def _structured(self, of_format: StructuredOutput | None) -> StructuredOutput | None:
        """What constrains the answer: the surface's own format, or vLLM's fields."""
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
        """The tool as templates get it: what the client sent."""
        return {"type": "function", **self.model_dump(exclude_unset=True)}


def functions_of(tools: "Sequence[ToolDefinition] | None") -> tuple[Tool, ...]:
    """The tools that are functions, as templates get them."""
    return tuple(tool.to_tool() for tool in tools or () if tool.function is not None)


class NamedFunction(BaseModel):
    name: str


class NamedToolChoice(BaseModel):
    """OpenAI's ``tool_choice`` that names a function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatCompletionRequest(SamplingFields):
    """A body of ``POST /v1/chat/completions``: OpenAI's fields, vLLM's additions, and this package's."""

    messages: Checked[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=0, ge=0, le=20)
    tools: Checked[ToolDefinition] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    response_format: ResponseFormat | None = None
    prefix_token_ids: Checked[int] | None = Field(default=None, min_length=1)
    """Exact ids (prompt and completion) of the conversation up to and including the last assistant message: only what
    follows is rendered, and nothing sampled is tokenized again."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and completion together."""

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _chooses_a_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type", "function") != "function":
            raise ValueError(f"{value['type']!r} is not supported; choose auto, none, required or a function")
        return value

    @model_validator(mode="after")
    def _tool_choice_has_tools(self) -> "ChatCompletionRequest":
        names = [tool["function"]["name"] for tool in functions_of(self.tools)]
        ignored = but_ignored(self.ignored_tools)
        if self.chosen_tool not in ("auto", "none", "required", *names):
            raise ValueError(f"tool_choice must name one of tools {names}, got {self.chosen_tool!r}{ignored}")
        if self.chosen_tool == "required" and not names:
            raise ValueError(f"tools must hold at least one function when tool_choice is required, got none{ignored}")
        return self

    @property
    def ignored_tools(self) -> tuple[str, ...]:
        """The tools that are no functions, by type and name."""
        return tuple(tool_name(tool.model_dump()) for tool in self.tools or () if tool.function is None)

    @property
    def chosen_tool(self) -> str:
        """``auto``, ``none``, ``required`` or a function's name."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return self.tool_choice.function.name
        return self.tool_choice or "auto"

    def to_generation(self, session_label: str | None) -> GenerationRequest:
        """The request without its wire format."""
        return GenerationRequest(
            messages=tuple(self.messages),
            prompt_token_ids=None if self.prefix_token_ids is None else tuple(self.prefix_token_ids),
            tools=functions_of(self.tools) or None,
            tool_choice=self.chosen_tool,
            sampling=self.sampling(
                self.max_completion_tokens or self.max_tokens,
                self.response_format.structured if self.response_format else None,
                (self.top_logprobs or 0) if self.logprobs else 0,
                shows_logprobs=bool(self.logprobs),
            ),
            max_total_tokens=self.max_total_tokens,
            bad_words=tuple(self.bad_words or ()),
            session_label=self.label(session_label),
            priority=self.priority or 0,
        )


class CompletionRequest(SamplingFields):
    """A body of ``POST /v1/completions``: OpenAI's fields, vLLM's additions, and this package's."""

    prompt: str | Checked[int] | Checked[str] | Checked[Checked[int]]
    session_id: Label | list[Label] | None = None  # type: ignore[assignment]
    """One for all prompts, or one for each."""
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = False
    suffix: str | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _is_served(self) -> "CompletionRequest":
        if self.suffix:
            raise ValueError("suffix is not served; leave it out")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not served: log-probs are of sampled tokens; leave one of them out")
        return self

    @property
    def prompts(self) -> "list[str] | list[list[int]]":
        """One prompt or several, as a list of them."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts: list[str] | list[list[int]] = [prompt] if is_one else prompt
        return prompts

    def labels(self, header: str | None) -> list[str | None]:
        """The session's label of each prompt. ``ApiError`` where prompts and labels are not equally many."""
        num_prompts = len(self.prompts)
        if not isinstance(self.session_id, list):
            return [self.label(header)] * num_prompts
        if len(self.session_id) != num_prompts:
            message = f"must be one label, or one for each of {num_prompts} prompts, got {len(self.session_id)}"
            raise refused("session_id", message)
        return [str(label) for label in self.session_id]

    def to_generation(self, prompt_token_ids: tuple[int, ...], session_label: str | None) -> GenerationRequest:
        """One prompt's request without its wire format."""
        structured = self.response_format.structured if self.response_format else None
        return GenerationRequest(
            prompt_token_ids=prompt_token_ids,
            sampling=self.sampling(
                self.max_tokens, structured, self.logprobs or 0, shows_logprobs=self.logprobs is not None
            ),
            bad_words=tuple(self.bad_words or ()),
            session_label=session_label,
            priority=self.priority or 0,
        )
