"""What clients may ask of ``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API with text and tools.

Flows in: bodies. Flows out: generation requests. Fields that are not here and server tools are ignored. Does not know HTTP.
"""

import json
from typing import Any

from pydantic import BaseModel, Field

from skyrl_async.chat import Tool
from skyrl_async.endpoint.requests.body_fields import (
    chat_tool,
    checked_choice,
    name_at,
    object_at,
    string_at,
    tool_name,
    unsupported,
)
from skyrl_async.endpoint.requests.generation import GenerationRequest
from skyrl_async.endpoint.routes.messages_input import chat_messages
from skyrl_async.endpoint.routes.schema import Checked, SamplingFields, StopString
from skyrl_async.types import Message, StructuredOutput


class Conversation(BaseModel):
    """What makes a prompt: all there is in a body of ``POST /v1/messages/count_tokens``."""

    messages: Checked[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    system: Any = None
    """A string, or text blocks."""
    tools: Checked[dict[str, Any]] | None = None

    def chat_messages(self) -> tuple[Message, ...]:
        """The messages in chat form; ``ApiError`` names what is not served."""
        return chat_messages(self.messages, self.system)

    def chat_tools(self) -> tuple[Tool, ...]:
        """The tools in chat form; ``ApiError`` names what is not served."""
        return tuple(
            chat_tool(tool, f"tools.{i}", parameters="input_schema")
            for i, tool in enumerate(self.tools or ())
            if not _is_ignored(tool)
        )

    @property
    def ignored_tools(self) -> tuple[str, ...]:
        """The tools that Anthropic's servers run or have a schema for, by type and name."""
        return tuple(tool_name(tool) for tool in self.tools or () if _is_ignored(tool))


class ThinkingConfig(BaseModel):
    """Anthropic's ``thinking``; how much is thought is the policy's affair."""

    type: str | None = None


class OutputConfig(BaseModel):
    """Anthropic's ``output_config``."""

    format: dict[str, Any] | None = None


class MessagesRequest(Conversation, SamplingFields):
    """A body of ``POST /v1/messages``: Anthropic's fields and those of ``SamplingFields``. Null means the default everywhere.

    ``return_token_ids`` answers with ``prompt_token_ids``, ``token_ids``, ``token_logprobs`` and ``policy_versions`` beside
    the content; a stream has the first in ``message_start.message`` and the others in ``message_delta``.
    """

    stop: Checked[StopString] | None = Field(default=None, validation_alias="stop_sequences")
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    @property
    def shows_thinking(self) -> bool:
        """Reasoning is part of the content, unless switched off."""
        return self.thinking is None or self.thinking.type != "disabled"

    def to_generation(self, session_label: str | None) -> GenerationRequest:
        """The request without its wire format; ``ApiError`` names what is not served."""
        tools = self.chat_tools()
        return GenerationRequest(
            messages=self.chat_messages(),
            tools=tools or None,
            tool_choice=checked_choice(self._choice(), tools, self.ignored_tools),
            sampling=self.sampling(self.max_tokens, self._format(), 0),
            bad_words=tuple(self.bad_words or ()),
            session_label=self.label(session_label),
            priority=self.priority or 0,
        )

    def _choice(self) -> str:
        match self.tool_choice:
            case None | {"type": "auto"}:
                return "auto"
            case {"type": "any"}:
                return "required"
            case {"type": "none"}:
                return "none"
            case {"type": "tool"}:
                return name_at(self.tool_choice, "name", "tool_choice")
        raise unsupported("tool_choice", self.tool_choice.get("type"), "choose auto, any, tool or none")

    def _format(self) -> StructuredOutput | None:
        form = self.output_config.format if self.output_config else None
        if form is None:
            return None
        if form.get("type") != "json_schema":
            raise unsupported("output_config.format", form.get("type"), "the only format is json_schema")
        return StructuredOutput(json_schema=json.dumps(object_at(form.get("schema"), "output_config.format.schema")))


def _is_ignored(tool: dict[str, Any]) -> bool:
    """Whether it is no tool that the client describes and runs (``custom``)."""
    return tool.get("type") is not None and string_at(tool, "type", "tools") != "custom"
