"""``POST /v1/completions``: raw prompts, as text or as token ids.

In a session each one is a turn without parent. Does not know engines or sessions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator

from skyrl_async.endpoint.requests.fields import refused
from skyrl_async.endpoint.requests.generation import Answer, AnswerBlock, GenerationRequest, Planned
from skyrl_async.endpoint.routes.schema import Checked, Label, SamplingFields, format_of
from skyrl_async.endpoint.routes.surface import ChoicesCall, Written, completion_logprobs
from skyrl_async.types import Completion, CompletionDelta

_MAX_CHOICES = 1024


class CompletionRequest(SamplingFields):
    """A body of ``POST /v1/completions``: OpenAI's fields, vLLM's additions, and this package's."""

    prompt: str | Checked[int] | Checked[str] | Checked[Checked[int]]
    session_id: Label | list[Label] | None = None  # type: ignore[assignment]
    """One label for all prompts, or one for each."""
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_served(self) -> "CompletionRequest":
        if self.suffix:
            raise ValueError("suffix is not served; leave it out")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not served: log-probs are of sampled tokens; leave one of them out")
        return self

    def to_generation(self, session_header: str | None) -> list[GenerationRequest]:
        asked: Any = self.prompt
        prompts = [asked] if isinstance(asked, str) or (asked and isinstance(asked[0], int)) else asked
        if not 0 < len(prompts) * self.n <= _MAX_CHOICES:
            found = f"{len(prompts)} prompts times n={self.n}"
            raise refused("prompt", f"must ask for one choice to {_MAX_CHOICES}, got {found}")
        request = self.generation(
            session_header,
            self.max_tokens,
            format_of(self.response_format, "response_format", schema_in="json_schema"),
            num_top_logprobs=self.logprobs or 0,
            shows_logprobs=self.logprobs is not None,
        )
        labels: Sequence[str | None] = [request.session_label] * len(prompts)
        if isinstance(self.session_id, list):
            labels = [str(label) for label in self.session_id]
        if len(labels) != len(prompts):
            message = f"must be one label, or one for each of {len(prompts)} prompts, got {len(labels)}"
            raise refused("session_id", message)
        pairs = zip(prompts, labels, strict=True)
        return [replace(request, raw_prompt=prompt, session_label=label) for prompt, label in pairs]


class CompletionCall(ChoicesCall[CompletionRequest]):
    """One request in OpenAI's completions format."""

    id_prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    def whole(self, plan: Planned, answer: Answer) -> dict[str, Any]:
        return {"text": self._echo(plan) + answer.parts.content} | self._origin(plan)

    def piece(self, plan: Planned, block: AnswerBlock, written: Written) -> dict[str, Any]:
        if written.num_blocks:
            return {"text": block.parts.content}
        return {"text": self._echo(plan) + block.parts.content} | self._origin(plan)

    def logprobs(self, tokens: Completion | CompletionDelta, written: Written) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        return completion_logprobs(tokens, self._renderer, written, as_ids=self._body.return_tokens_as_token_ids)

    def _origin(self, plan: Planned) -> dict[str, Any]:
        return {"prompt_token_ids": plan.prompt_token_ids} if self._body.return_token_ids else {}

    def _echo(self, plan: Planned) -> str:
        return self._renderer.decode(plan.prompt_token_ids) if self._body.echo else ""
