"""What clients may ask of ``POST /v1/responses``: the stateless subset of OpenAI's Responses API.

Flows in: bodies. Flows out: generation requests, or refusals of what needs a store. Fields that are not here and tools that are
no functions are ignored. Does not know HTTP.
"""

import json
from typing import Any

from pydantic import BaseModel, Field

from skyrl_async.endpoint.requests.body_fields import (
    but_ignored,
    chat_tool,
    checked_choice,
    name_at,
    object_at,
    refused,
    string_at,
    tool_name,
    unsupported,
)
from skyrl_async.endpoint.requests.generation import GenerationRequest
from skyrl_async.endpoint.routes.responses_input import chat_messages
from skyrl_async.endpoint.routes.schema import Checked, SamplingFields
from skyrl_async.types import StructuredOutput

_LOGPROBS = "message.output_text.logprobs"
_STATEFUL = {
    "previous_response_id": "nothing is stored here: send the earlier items in input",
    "conversation": "nothing is stored here: send the earlier items in input",
    "background": "a response is not kept for later: leave it out",
    "prompt": "there are no prompt templates here: send the text in input",
}


class TextConfig(BaseModel):
    """OpenAI's ``text``."""

    format: dict[str, Any] | None = None


class ResponsesRequest(SamplingFields):
    """A body of ``POST /v1/responses``: OpenAI's fields and those of ``SamplingFields``. Null means the default everywhere.

    ``return_token_ids`` answers with ``prompt_token_ids``, ``token_ids``, ``token_logprobs`` and ``policy_versions`` in the
    response.
    """

    input: Any
    """A string, or items."""
    instructions: str | None = None
    tools: Checked[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    text: TextConfig | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: Checked[str] | None = None
    parallel_tool_calls: bool | None = True
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None

    @property
    def has_logprobs(self) -> bool:
        """Text comes with the log-probs of the answer's tokens."""
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def ignored_tools(self) -> tuple[str, ...]:
        """The tools that are no functions, by type and name: nothing else is run here, and clients send some by default."""
        return tuple(tool_name(tool) for tool in self.tools or () if tool["type"] != "function")

    def to_generation(self, session_label: str | None) -> GenerationRequest:
        """The request without its wire format; ``ApiError`` names what is not served."""
        for name, advice in _STATEFUL.items():
            if getattr(self, name):
                raise refused(name, f"is not supported; {advice}", code="unsupported_parameter")
        tools = tuple(
            chat_tool(tool, f"tools.{i}", parameters="parameters")
            for i, tool in enumerate(self.tools or ())
            if string_at(tool, "type", f"tools.{i}") == "function"
        )
        return GenerationRequest(
            messages=chat_messages(self.input, self.instructions),
            tools=tools or None,
            tool_choice=checked_choice(self._choice(), tools, self.ignored_tools),
            sampling=self.sampling(
                self.max_output_tokens,
                self._format(),
                self.top_logprobs or 0,
                shows_logprobs=self.has_logprobs,
            ),
            bad_words=tuple(self.bad_words or ()),
            session_label=self.label(session_label),
            priority=self.priority or 0,
        )

    def _choice(self) -> str:
        match self.tool_choice:
            case None:
                return "auto"
            case "auto" | "none" | "required":
                return str(self.tool_choice)
            case {"type": "function"}:
                return name_at(self.tool_choice, "name", "tool_choice")
            case {"type": kind}:
                ignored = but_ignored(self.ignored_tools)
                raise unsupported("tool_choice", kind, f"choose auto, none, required or a function{ignored}")
        raise refused("tool_choice", f"must be auto, none, required or a function, got {self.tool_choice!r}")

    def _format(self) -> StructuredOutput | None:
        form = (self.text and self.text.format) or {"type": "text"}
        match form.get("type"):
            case "text":
                return None
            case "json_object":
                return StructuredOutput(json_object=True)
            case "json_schema":
                schema = object_at(form.get("schema"), "text.format.schema")
                return StructuredOutput(json_schema=json.dumps(schema))
        raise unsupported("text.format", form.get("type"), "choose text, json_object or json_schema")
