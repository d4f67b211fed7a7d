"""What clients may ask of the endpoint, and what every route is given to answer with.

Flows in: request bodies. Flows out: checked requests. Fields that are not here are ignored, never refused: every
harness sends some of its own. Does not know HTTP.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints

from skyrl_async.chat import ChatRenderer
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What the routes of one endpoint share."""

    sampler: Sampler
    renderer: ChatRenderer
    model_name: str
    keepalive_interval_s: float
    """Seconds of silence after which a stream sends a comment."""


class StreamOptions(BaseModel):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = False


StopString = Annotated[str, StringConstraints(min_length=1)]


class ChatCompletionRequest(BaseModel):
    """A body of ``POST /v1/chat/completions``: OpenAI's fields, vLLM's additions, and this package's.

    Null means the default everywhere.
    """

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    n: int | None = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=1.0, ge=0)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    stop: StopString | list[StopString] | None = None
    seed: int | None = None
    logprobs: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    top_k: int | None = Field(default=0, ge=-1)
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    ignore_eos: bool | None = False
    priority: int | None = 0
    return_token_ids: bool | None = False
    """Answer with ``prompt_token_ids`` and, per choice, ``token_ids``, ``token_logprobs``, ``policy_versions``; whole
    replies also with ``text_ends`` and ``num_aborts``."""
    session_id: str | None = None
    """Requests of one session go to one engine while it lives. A label, never authority."""
    prefix_token_ids: list[int] | None = Field(default=None, min_length=1)
    """Exact ids (prompt and completion) of the conversation up to and including the last assistant message: only what
    follows is rendered, and nothing sampled is tokenized again."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and completion together."""

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """A stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, choice_index: int, room: int) -> SamplingParams:
        """Parameters of one choice, with ``room`` (>= 1) tokens left."""
        asked = self.max_completion_tokens or self.max_tokens or room
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=min(asked, room),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            stop=stop,
            ignore_eos=bool(self.ignore_eos),
            seed=None if self.seed is None else self.seed + choice_index,
        )
