"""Values that several rooms share: prompts, sampling parameters, tokens with their policy versions, trajectories, groups.

Everything here is plain, frozen and free of torch, ray and vllm, so that any process can hold it. What has one value per token is a
read-only numpy column, or ``VersionSpans``; constructors take any sequence of such values too, and copy no array of the right dtype.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from skyrl_async.columns import (
    NO_LOGPROBS,
    NO_TOKENS,
    Advantages,
    Logprobs,
    Mask,
    Rewards,
    TokenIds,
    TopTokens,
    Values,
    VersionSpans,
    Weights,
    column,
    fields_of,
    have_equal_fields,
)

Message = dict[str, Any]
"""One chat message in OpenAI form: at least ``role`` and ``content``."""

ENVIRONMENT_VERSION = -1
"""Policy version of tokens that were not sampled (prompts, observations, tokens of the chat template)."""


class FinishReason(StrEnum):
    """Reason for the end of a generation: OpenAI's values, and ``abort``, which never leaves the client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """Treatment of requests in flight during a pause."""

    ABORT = "abort"
    """Requests return with their tokens so far, and the client continues them from those tokens."""
    KEEP = "keep"
    """Requests freeze inside the engine, which recomputes their KV cache with the new weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The constraint of a generation; exactly one field is set."""

    json_schema: str | None = None
    """A JSON schema, as JSON text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the text matches."""
    choice: tuple[str, ...] | None = None
    """The allowed texts."""
    grammar: str | None = None
    """A context-free grammar, in vLLM's forms."""


TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, log-prob in nats) of the likeliest tokens at one position, likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with OpenAI's and vLLM's names and meanings."""

    max_tokens: int
    """Most new tokens, >= 1."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass, in (0, 1]."""
    top_k: int = 0
    """Highest-probability tokens kept; 0 keeps all."""
    min_p: float = 0.0
    """Smallest probability relative to the likeliest token, in [0, 1]."""
    stop: tuple[str, ...] = ()
    """Strings that end the text. The text lacks them; their tokens are kept."""
    includes_stop: bool = False
    """Keep the stop string in the text, or the stop token unless ``skip_special_tokens`` removes it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, beside the end-of-sequence tokens. ``token_ids`` ends with the stop token; the text lacks it."""
    min_tokens: int = 0
    """Fewest new tokens, <= ``max_tokens``. Before them no stop token is sampled and stop strings are ignored."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that never occur: the last token is not sampled after the others."""
    ignore_eos: bool = False
    """Sample past the end-of-sequence token (benchmarks and tests)."""
    seed: int | None = None
    """Honoured by the deterministic engine only: vLLM cannot continue a seeded request exactly (and on CPU dies of one)."""
    presence_penalty: float = 0.0
    """In [-2, 2]; applies to sampled tokens."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; applies to sampled tokens."""
    repetition_penalty: float = 1.0
    """> 0; applies to prompt and sampled tokens."""
    structured: StructuredOutput | None = None
    """Constrains the answer. Log-probs are normalised over the tokens that the grammar allows; 0.0 if it allows only one."""
    num_top_logprobs: int = 0
    """Number of likeliest tokens reported for each sampled token, in [0, 20]."""
    reports_logprobs: bool = True
    """Return behavior log-probs. False saves an engine a fifth of its time, for answers that are not trained."""
    skip_special_tokens: bool = True
    """Remove special tokens from the text. The token that ended the answer is never in it."""

    @property
    def is_resumable(self) -> bool:
        """Whether a new request with prompt plus tokens so far continues the generation exactly.

        A grammar would restart, and penalties and bad words of several tokens would count the tokens so far as prompt.
        """
        is_penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return self.structured is None and not is_penalised and all(len(word) == 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRequest:
    """One generation request to one engine, in tokens."""

    request_id: str
    """Unique among the engine's requests in flight."""
    prompt_token_ids: TokenIds
    """(T,) int32: prompt, and the tokens already sampled if this continues an aborted request."""
    sampling: SamplingParams
    """``max_tokens`` is the rest of the budget. Engines ignore ``stop``: the client applies it."""
    num_sampled_tokens: int = 0
    """Tokens at the end of ``prompt_token_ids`` that earlier segments of the same generation sampled."""
    priority: int = 0
    """Smaller is served first, if the engine schedules by priority."""
    stream_interval: int | None = None
    """Tokens per block of a stream; None: the engine's default."""

    def __post_init__(self) -> None:
        _set_columns(self)

    __eq__ = have_equal_fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineOutput:
    """Sampled tokens: of an engine's answer to a request, or of one block of a stream. Every column has one entry per token."""

    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    """(T,) int32."""
    logprobs: Logprobs = field(default_factory=lambda: NO_LOGPROBS)
    """(T,) float32: behavior log-probs in nats, after temperature and truncation; (0,) if not requested."""
    versions: VersionSpans = field(default_factory=VersionSpans)
    """Policy version of each token, as the engine reports it."""
    finish_reason: FinishReason | None
    """None only in a block before the last one of a stream."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One entry per token if ``sampling.num_top_logprobs`` > 0, else empty."""
    num_aborts: int = 0
    """How often the generation was aborted (or lost its engine) and continued. An engine counts what its process continued by itself."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the (first) engine's prefix cache; the same in every block of a stream."""

    def __post_init__(self) -> None:
        _set_columns(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles columns as bytes: arrays of a few tokens each would take longer than all else in a block, and arrays of many tokens
        would stay in Ray's object store, which has little memory."""
        values = fields_of(self) | {"versions": self.versions.spans}
        return _from_bytes, (type(self), {n: v.tobytes() if n in _COLUMNS else v for n, v in values.items()})

    __eq__ = have_equal_fields


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion(EngineOutput):
    """A finished generation, joined from its segments."""

    prompt_token_ids: TokenIds
    """(P,) int32."""
    text: str
    """Text of all ``token_ids``, decoded at once and cut before a stop string."""
    finish_reason: FinishReason
    """``stop`` or ``length``."""
    engines: tuple[str, ...] = field(default=(), compare=False)
    """Engines that sampled it, in order of their first call; empty where unknown."""
    engine_seconds: float | None = field(default=None, compare=False)
    """Seconds of its engine calls, and of waiting for an engine where there was none, added up; None where unknown."""
    asked_at: float | None = field(default=None, compare=False)
    """When it was asked for, Unix time; None where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletionDelta(EngineOutput):
    """A block of a streamed generation. The joined texts of all blocks are the completion's text.

    ``finish_reason`` is ``stop`` or ``length`` in the last block, which alone has ``num_aborts``, ``engines``, ``engine_seconds`` and
    ``asked_at``, of the whole generation.
    """

    text: str
    """New text, without incomplete characters and possible beginnings of a stop string."""
    engines: tuple[str, ...] = field(default=(), compare=False)
    engine_seconds: float | None = field(default=None, compare=False)
    asked_at: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a dataset."""

    uid: str
    """Unique in its dataset, and stable across runs."""
    messages: tuple[Message, ...]
    env_class: str
    """Name of its environment in the skyrl_gym registry."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment (``reward_spec``, ``max_turns``, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the policy asks for."""

    id: str = ""
    """Unique; made by the endpoint, not by the policy. Empty where calls have no ids."""
    name: str
    arguments: str
    """JSON text, or the tool's input as the policy wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMessage:
    """One message of a row's conversation: what its tokens do not say."""

    role: str
    start: int
    """Counted from the beginning of the prompt: a reply's first sampled token; of another message the token after the reply before it."""
    is_reply: bool = False
    """Whether the policy sampled it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The call that an observation answers."""
    name: str | None = None
    """The tool whose observation it is."""
    engines: tuple[str, ...] = field(default=(), compare=False)
    """Engines that sampled a reply, in order of their first call."""
    engine_seconds: float | None = field(default=None, compare=False)
    """Seconds of a reply's engine calls, and of waiting for an engine where there was none."""
    asked_at: float | None = field(default=None, compare=False)
    """When a reply was asked for, Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """Where a turn of the policy stands in a row that trains it."""

    index: int
    """Place among all turns of the sample, in the order in which they were sampled, from 0."""
    start: int
    """First sampled token, counted in the response."""
    end: int
    """After the last one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One sample of a prompt, single- or multi-turn, as a training row. T is the number of response tokens."""

    prompt_token_ids: TokenIds
    """(P,) int32."""
    response_token_ids: TokenIds
    """(T,) int32: sampled tokens, with the environment's tokens between turns."""
    loss_mask: Mask
    """(T,) bool: the tokens that the policy sampled and that are trained; the environment's are not."""
    logprobs: Logprobs
    """(T,) float32: behavior log-probs in nats; 0.0 for the environment's tokens."""
    versions: VersionSpans
    """(T,) policy version per token, trained or not; ``ENVIRONMENT_VERSION`` for the environment's."""
    reward: float
    """Sum of the environment's rewards."""
    shaped_reward: float | None = None
    """Reward after shaping, from which advantages are computed; None: not shaped."""
    turn_rewards: tuple[float, ...] = ()
    """What each turn of the sample earned, in the order of turns; they sum to ``reward``, and are the same in all rows of the sample. Empty
    if only the whole reward is known: the last turn has earned it."""
    token_rewards: Rewards | None = None
    """(T,) float32: what each sampled token earned; over a turn that this row trains they sum to its reward. None: not known by token, and
    the last token of a turn has earned what the turn did."""
    turn_spans: tuple[TurnSpan, ...] = ()
    """The turns that this row trains, in order. Empty: the row is one turn, the first."""
    num_turns: int = 1
    is_truncated: bool = False
    """Ended by the token budget, not by the policy."""
    num_aborts: int = 0
    """How often its generations were aborted and continued: by weight updates, moves to another engine and deaths of engines."""
    sample_index: int | None = None
    """Index of the sample in the group; None if each sample is one row, in order. A session with a rewritten history has a row per
    branch, all with the session's reward."""
    weight: float = 1.0
    """The row's share of its sample, in (0, 1]; the shares of a sample's rows sum to 1. After ``algorithms.aggregation`` it is the weight
    of the row's tokens in the loss."""
    is_abandoned: bool = False
    """The harness ended without a reward: the loss mask is 0 and the reward is ignored."""
    is_overlong: bool = False
    """The sample is masked because a length limit cut it: the loss mask is 0, and the group's baseline excludes its reward."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's figures of this episode."""
    logs: dict[str, str] = field(default_factory=dict)
    """What its harness left to read: name -> text. ``failure`` is why it failed."""
    messages: tuple[RowMessage, ...] = ()
    """Its conversation in order, as far as the generator tells: replies, tool calls and observations."""
    ref_logprobs: Logprobs | None = None
    """(T,) float32: log-probs in nats under the frozen reference, at the sampling temperature; 0.0 outside the mask. None: not computed."""
    old_logprobs: Logprobs | None = None
    """(T,) float32: log-probs in nats under the policy, recomputed after generation; 0.0 outside the mask. None: not computed."""
    old_version: int | None = None
    """Policy version of ``old_logprobs``."""
    teacher_logprobs: Logprobs | None = None
    """(T,) float32: log-probs in nats under the prompt's teacher, at the sampling temperature; 0.0 outside the mask. None: not computed."""
    teacher_top: TopTokens | None = None
    """The teacher's likeliest tokens in the place of each response token, with their log-probs at the sampling temperature; zeros outside
    the mask. None: not computed. Not part of a checkpoint."""
    values: Values | None = None
    """(T,) float32: the critic's value of what is before each sampled token; 0.0 outside the mask. None: not computed."""
    marks: Mask | None = None
    """(T,) bool: sampled tokens that the policy loss treats specially, chosen among all tokens of the step; None: none were chosen.
    Not part of a checkpoint."""
    token_weights: Weights | None = None
    """(T,) float32, >= 0: what the advantage estimator multiplies the losses of sampled tokens by, beside ``weight``; None: by 1. Not part
    of a checkpoint."""

    def __post_init__(self) -> None:
        _set_columns(self)
        num_tokens = len(self.response_token_ids)
        for name in (
            "loss_mask",
            "logprobs",
            "versions",
            "token_rewards",
            "ref_logprobs",
            "old_logprobs",
            "teacher_logprobs",
            "teacher_top",
            "values",
            "marks",
            "token_weights",
        ):
            values = getattr(self, name)
            if values is not None and len(values) != num_tokens:
                raise ValueError(
                    f"trajectory.{name} has {len(values)} entries for {num_tokens} response tokens; "
                    "a generator must return one per response token"
                )
        if self.turn_spans or self.turn_rewards:
            self._check_turns(num_tokens)
        if self.token_rewards is not None:
            self._check_token_rewards(self.token_rewards)

    def _check_turns(self, num_tokens: int) -> None:
        end = 0
        for span in self.turn_spans:
            if not end <= span.start <= span.end <= num_tokens:
                raise ValueError(
                    f"trajectory.turn_spans must follow each other within the {num_tokens} response tokens, got {self.turn_spans}"
                )
            end = span.end
        if not self.turn_rewards:
            return
        last = max((span.index for span in self.turn_spans), default=0)
        if last >= len(self.turn_rewards):
            raise ValueError(
                f"trajectory.turn_rewards has {len(self.turn_rewards)} entries, but turn {last} is trained"
            )
        for turn, reward in enumerate(self.turn_rewards):
            if not math.isfinite(reward):
                raise ValueError(f"trajectory.turn_rewards must be finite, got {reward} for turn {turn}")
        if not math.isclose(math.fsum(self.turn_rewards), self.reward, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(f"trajectory.turn_rewards must sum to reward ({self.reward}), got {self.turn_rewards}")

    def _check_token_rewards(self, of_tokens: Rewards) -> None:
        if not np.isfinite(of_tokens).all():
            place = int(np.flatnonzero(~np.isfinite(of_tokens))[0])
            raise ValueError(f"trajectory.token_rewards must be finite, got {of_tokens[place]} for token {place}")
        rewards = self.turn_rewards or (self.reward,)
        for span in self.turn_spans or (TurnSpan(index=0, start=0, end=len(of_tokens)),):
            if span.index >= len(rewards):
                raise ValueError("trajectory.token_rewards needs turn_rewards in a sample of several turns")
            of_turn = of_tokens[span.start : span.end].astype(np.float64)
            rounding = 1e-6 * max(1.0, float(np.abs(of_turn).sum()))
            if len(of_turn) and abs(of_turn.sum() - rewards[span.index]) > rounding:
                raise ValueError(
                    f"trajectory.token_rewards must sum to what turn {span.index} earned ({rewards[span.index]:g}), got {of_turn.sum():g}"
                )

    __eq__ = have_equal_fields

    @cached_property  # asked for some fifteen times on the way to a gradient
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled and that are trained."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_turn_tokens(self) -> int:
        """Sampled tokens of the row's own turns, trained or not."""
        if self.turn_spans:
            return sum(span.end - span.start for span in self.turn_spans)
        runs = pairwise(((0, 0), *self.versions.spans))
        return sum(end - begin for (_, begin), (version, end) in runs if version != ENVIRONMENT_VERSION)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_token_ids) + len(self.response_token_ids)

    def with_only(self, *columns: str) -> "Trajectory":
        """What a model computes with: of the columns that a row may lack those named, and neither turns nor texts nor figures."""
        made = object.__new__(Trajectory)  # without the checks of ``replace``: nothing that is kept changes
        made.__dict__.update(self.__dict__, **_NOTHING_COMPUTED_WITH)
        made.__dict__.update(dict.fromkeys(OPTIONAL_COLUMNS.difference(columns)))
        return made


_COLUMNS = {
    "token_ids": np.int32,
    "prompt_token_ids": np.int32,
    "response_token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "ref_logprobs": np.float32,
    "old_logprobs": np.float32,
    "teacher_logprobs": np.float32,
    "values": np.float32,
    "token_rewards": np.float32,
    "marks": np.bool_,
    "token_weights": np.float32,
}
OPTIONAL_COLUMNS = frozenset(
    one.name for one in fields(Trajectory) if one.default is None and one.name in {*_COLUMNS, "teacher_top"}
)
"""Columns that a row may lack."""
_NOTHING_COMPUTED_WITH: dict[str, Any] = {
    "turn_spans": (),
    "turn_rewards": (),
    "messages": (),
    "logs": {},
    "metrics": {},
}
"""Fields that no model computes with."""


def _set_columns(value: object) -> None:
    """Make columns of the fields named in ``_COLUMNS`` and of ``versions``. Raises ``ValueError`` that names the field."""
    kind: Any = type(value)
    for name, label, dtype in _columns_of(kind):
        given = getattr(value, name)
        if given is None or type(given) is VersionSpans:
            continue
        if dtype is None:
            made: Any = VersionSpans.of(given, label)
        elif type(given) is np.ndarray and given.dtype is dtype and given.ndim == 1:
            # As ``column``, for what it nearly always gets: a sample passes here some fifteen times.
            if not given.flags.writeable:
                continue
            made = given.view()
            made.flags.writeable = False
        else:
            made = column(given, dtype.type, label)
        object.__setattr__(value, name, made)


@cache
def _columns_of(kind: type) -> list[tuple[str, str, np.dtype[Any] | None]]:
    """Each column's name in a dataclass, its name in errors, and its dtype; None for ``versions``."""
    dtypes = {name: np.dtype(dtype) for name, dtype in _COLUMNS.items()} | {"versions": None}
    return [(one.name, f"{kind.__name__}.{one.name}", dtypes[one.name]) for one in fields(kind) if one.name in dtypes]


def _from_bytes(kind: type[EngineOutput], values: dict[str, Any]) -> EngineOutput:
    """What ``EngineOutput.__reduce__`` pickled."""
    made = {n: np.frombuffer(v, _COLUMNS[n]) if n in _COLUMNS else v for n, v in values.items()}
    return kind(**made | {"versions": VersionSpans(values["versions"])})


class LogprobModel(StrEnum):
    """Model whose log-probs are requested."""

    POLICY = "policy"
    """The trained policy."""
    REF = "ref"
    """The frozen reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """Log-probs of trajectories under one model, at the sampling temperature, or a critic's values of them."""

    values: tuple[Logprobs, ...]
    """One column per trajectory with one value per response token, log-probs in nats; 0.0 outside the mask."""
    version: int
    """Version of the weights; 0 for a reference."""
    top: tuple[TopTokens | None, ...] = ()
    """Per trajectory the model's likeliest tokens in the place of each response token, zeros outside the mask; None where nothing was
    sampled. Empty if none were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWork:
    """What generating one sample took."""

    seconds: float
    """Duration of its last try, environment and tools included."""
    engines: tuple[str, ...] = ()
    """Engines that sampled it, in order of their first call; empty where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one prompt, admitted together and trained together."""

    uid: str
    admission_index: int
    """Position in the order of admission, over the whole run."""
    scheduled_version: int
    """Policy version at admission, from which staleness counts."""
    trajectories: tuple[Trajectory, ...]
    epoch: int = 0
    """Pass over the dataset in which the prompt was drawn."""
    generation_seconds: float = 0.0
    advantages: tuple[Advantages, ...] = field(default=(), compare=False)
    """One column per trajectory, (T,) float32, after the reward stage: the advantage of each sampled token; other values mean nothing. A
    number that holds for a whole row is a column that repeats it without memory. Not part of a checkpoint."""
    returns: tuple[Values, ...] = field(default=(), compare=False)
    """One column per trajectory, (T,) float32: what the critic's values are trained towards, NaN where nothing is. Empty without a critic.
    Not part of a checkpoint."""
    work: Mapping[int, SampleWork] = field(default_factory=dict, compare=False)
    """By index of a sample, where the generator tells; not part of a checkpoint."""

    @property
    def num_sampled_tokens(self) -> int:
        return sum(t.num_sampled_tokens for t in self.trajectories)

    @property
    def num_wasted_tokens(self) -> int:
        """Tokens thrown away if the group is never trained: with those of samples that are masked because a length limit cut them."""
        return sum(t.num_turn_tokens if t.is_overlong else t.num_sampled_tokens for t in self.trajectories)

    def without_teacher_top(self) -> "Group":
        """The group without the teacher's likeliest tokens, which take more memory than all other columns."""
        if all(row.teacher_top is None for row in self.trajectories):
            return self
        return replace(self, trajectories=tuple(replace(row, teacher_top=None) for row in self.trajectories))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A low-rank adapter (arXiv 2106.09685): W + (alpha / rank) B A in place of each adapted weight W."""

    rank: int
    """>= 1."""
    alpha: float
    """> 0."""

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """One complete set of weights, stored where the engines can load it."""

    version: int
    path: str
    """Safetensors file; that of an adapter lies in a peft directory. It may be deleted once the update is loaded."""
    manifest: dict[str, tuple[str, tuple[int, ...]]]
    """Hugging Face parameter name (peft's for an adapter) -> (dtype name such as ``float32``, shape)."""
    num_bytes: int
    adapter: Adapter | None = None
    """The adapter that is sent; engines keep their base weights. None: all weights are sent."""
    crc32: int | None = None
    """Checksum of the file; None: unknown."""
    is_compared: bool = False
    """Whether an engine checks the file's ``crc32`` before loading. Not in a publish, because that would lengthen the pause."""
    load_bucket_bytes: int = 512 << 20
    """Most bytes of the file that an engine gives to its model, or keeps mapped, at a time; a larger tensor goes alone."""
    shared: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Copies of the tensors on devices, readable until the update is loaded: ``shared_tensor.device_key`` -> name -> handle."""
