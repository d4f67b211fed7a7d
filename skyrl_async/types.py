"""The values that cross the seams: prompts, sampling parameters, tokens with their provenance, trajectories, groups.

Everything here is plain, frozen and free of torch, ray and vllm, so that any process can hold it. Sequences of one value per
token are tuples of equal length.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""One chat message in OpenAI form: at least ``role`` and ``content``."""

ENVIRONMENT_VERSION = -1
"""Policy version of tokens that no policy sampled (prompts, observations, chat-template glue)."""


class FinishReason(StrEnum):
    """Why a generation ended; the values are OpenAI's, plus ``abort``, which never leaves the client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """What a pause does to requests in flight."""

    ABORT = "abort"
    """They return with their tokens so far, and are continued in token space."""
    KEEP = "keep"
    """They freeze inside the engine, which recomputes their KV cache under the new weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the grammar of a constrained generation admits; exactly one field is set."""

    json_schema: str | None = None
    """A JSON schema, as JSON text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """What matches a regular expression."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """What a context-free grammar derives, in vLLM's forms."""


TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their log-probs in nats, likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample; names and meanings are OpenAI's and vLLM's."""

    max_tokens: int
    """Most new tokens, >= 1."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass, in (0, 1]."""
    top_k: int = 0
    """Highest-probability tokens kept; 0 keeps all."""
    min_p: float = 0.0
    """Least probability relative to the most likely token, in [0, 1]."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are left out of the text, their tokens are kept."""
    includes_stop: bool = False
    """Keep what ended the answer in the text: a stop string or, unless ``skip_special_tokens`` drops it, a stop token."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, beside the end-of-sequence tokens; the last one of ``token_ids`` then, and not in the text."""
    min_tokens: int = 0
    """Fewest new tokens, <= ``max_tokens``: until then stop tokens are impossible and stop strings are passed over."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""
    allowed_token_ids: tuple[int, ...] = ()
    """No other token is sampled; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences of which the last token is never sampled after the others."""
    ignore_eos: bool = False
    """Sample past the end-of-sequence token (benchmarks and tests)."""
    seed: int | None = None
    """Honoured by the deterministic engine only: vLLM cannot continue a seeded request exactly (and on CPU dies of one)."""
    presence_penalty: float = 0.0
    """In [-2, 2]; of sampled tokens."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; of sampled tokens."""
    repetition_penalty: float = 1.0
    """> 0; of the prompt's tokens and of sampled ones."""
    structured: StructuredOutput | None = None
    """Constrains the answer; log-probs are of the tokens that the grammar left, 0.0 where it left one."""
    num_top_logprobs: int = 0
    """Likeliest tokens reported beside each sampled one, in [0, 20]."""
    reports_logprobs: bool = True
    """Have every token bear its behavior log-prob. False saves an engine a fifth of its time, for answers that nobody trains on."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. The token that ended the answer is never in it."""

    @property
    def is_resumable(self) -> bool:
        """Whether prompt plus tokens so far continues the generation exactly. A grammar would begin again, and penalties and bad
        words of several tokens would take the tokens so far for prompt."""
        is_penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return self.structured is None and not is_penalised and all(len(word) == 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One generation asked of one engine, in tokens."""

    request_id: str
    """Unique among the engine's requests in flight."""
    prompt_token_ids: tuple[int, ...]
    """Prompt, followed by the tokens already sampled when this continues an aborted request."""
    sampling: SamplingParams
    """``max_tokens`` is what remains of the budget. ``stop`` is the client's business and ignored by engines."""
    num_sampled_tokens: int = 0
    """How many tokens at the end of ``prompt_token_ids`` were sampled by earlier segments of the same generation."""
    priority: int = 0
    """Smaller is served first where the engine schedules by priority."""
    stream_interval: int | None = None
    """Tokens per block of a stream; None takes the engine's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """Tokens an engine sampled (all of a request, or one block of a stream), each with its provenance."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behavior log-probs in nats, after temperature and truncation, one per token; none if they were not asked for."""
    versions: tuple[int, ...]
    """Policy version each token was sampled under, as the engine says it."""
    finish_reason: FinishReason | None
    """None only for a block of a stream that goes on."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One entry per token where ``sampling.num_top_logprobs`` > 0, else empty."""
    num_aborts: int = 0
    """How often weight updates cut this call, where the engine's process continued it by itself."""
    num_cached_tokens: int = 0
    """Prompt tokens that the engine had in its prefix cache; the same in every block of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished generation, joined from its segments."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    """Decoded once from all of ``token_ids``, special tokens as ``skip_special_tokens`` says, cut before a stop string."""
    finish_reason: FinishReason
    """``stop`` or ``length``."""
    num_aborts: int = 0
    """How many times it was aborted (or lost its engine) and continued."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One entry per token where ``sampling.num_top_logprobs`` > 0, else empty."""
    num_cached_tokens: int = 0
    """Prompt tokens that the first engine had in its prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a dataset."""

    uid: str
    """Unique in its dataset, and stable across runs."""
    messages: tuple[Message, ...]
    env_class: str
    """Name in the skyrl_gym registry of the environment that plays and rewards it."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What the environment is made with (``reward_spec``, ``max_turns``, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sample of a prompt, single- or multi-turn, as a training row. T is the number of response tokens."""

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    """(T,) sampled tokens, with the environment's tokens between turns."""
    loss_mask: tuple[int, ...]
    """(T,) 1 for tokens that the policy sampled, 0 for the environment's."""
    logprobs: tuple[float, ...]
    """(T,) behavior log-probs in nats; 0.0 where the mask is 0."""
    versions: tuple[int, ...]
    """(T,) policy version per token; ``ENVIRONMENT_VERSION`` where the mask is 0."""
    reward: float
    """Sum of the environment's rewards."""
    shaped_reward: float | None = None
    """What advantages are computed of instead, where rewards are shaped."""
    num_turns: int = 1
    is_truncated: bool = False
    """The token budget ended it, not the policy."""
    num_aborts: int = 0
    """How many weight updates or engine failures its generations were continued across."""
    sample_index: int | None = None
    """Which of the group's samples this row is of; None where each sample is one row, in order. A session whose history was
    rewritten has a row per branch, all with the session's reward."""
    weight: float = 1.0
    """Of the row's tokens in the loss, in (0, 1]; the weights of a sample's rows add up to 1, until ``algorithms.aggregation`` divides
    them by lengths."""
    is_abandoned: bool = False
    """Its harness left or was cut off without a reward: its loss mask is 0 and its reward counts for nothing."""
    is_overlong: bool = False
    """A length limit cut its sample, which is masked for that: its loss mask is 0, and its reward is no part of the group's baseline."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's own figures for this episode."""
    ref_logprobs: tuple[float, ...] | None = None
    """(T,) log-probs in nats under the frozen reference, at the sampling temperature; 0.0 where the mask is 0. None: not computed."""
    old_logprobs: tuple[float, ...] | None = None
    """(T,) the same under the policy itself, recomputed when the row was finished. None: not computed."""
    old_version: int | None = None
    """Policy version of ``old_logprobs``."""
    marks: tuple[int, ...] | None = None
    """(T,) 1 for sampled tokens that the policy loss treats apart, chosen among all of their step; None: nobody chose. Not part of a
    checkpoint."""

    def __post_init__(self) -> None:
        num_tokens = len(self.response_token_ids)
        for name in ("loss_mask", "logprobs", "versions", "ref_logprobs", "old_logprobs", "marks"):
            values = getattr(self, name)
            if values is not None and len(values) != num_tokens:
                raise ValueError(
                    f"trajectory.{name} has {len(values)} entries for {num_tokens} response tokens; "
                    "a generator must return one per response token"
                )

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled: those that are trained."""
        return sum(self.loss_mask)


class LogprobModel(StrEnum):
    """Whose log-probs are asked for."""

    POLICY = "policy"
    """The policy's that is trained."""
    REF = "ref"
    """The frozen reference's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """Log-probs of trajectories under one model, at the sampling temperature."""

    values: tuple[tuple[float, ...], ...]
    """Per trajectory one value per response token, in nats; 0.0 where the mask is 0."""
    version: int
    """Optimizer steps of the weights; a reference is always at 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one prompt, admitted together and trained together."""

    uid: str
    admission_index: int
    """Position in the order of admission, over the whole run."""
    scheduled_version: int
    """Policy version at admission; staleness counts from here."""
    trajectories: tuple[Trajectory, ...]
    epoch: int = 0
    """Pass over the dataset in which the prompt was drawn."""
    generation_seconds: float = 0.0
    advantages: tuple[float, ...] = ()
    """One per trajectory, once the reward stage has been at it; not part of a checkpoint."""

    @property
    def num_sampled_tokens(self) -> int:
        return sum(t.num_sampled_tokens for t in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Of low rank (arXiv 2106.09685): W + (alpha / rank) B A in place of each adapted weight W."""

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
    """One complete set of weights, already sent to where the engines can load it from."""

    version: int
    chunks: tuple[dict[str, Any], ...]
    """One ``update_info`` per bucket, in the form of vLLM's weight-transfer backend in use. An adapter is one chunk: the files of a
    peft directory, ``path`` and ``config_path``."""
    manifest: dict[str, tuple[str, tuple[int, ...]]]
    """Hugging Face parameter name -> (dtype name such as ``float32``, shape); of an adapter, peft's names."""
    num_bytes: int
    adapter: Adapter | None = None
    """What A and B are sent of, beside the weights that engines booted with; None: all weights are sent."""
    crc32: int | None = None
    """Of the bytes of the chunks' files (``path``), one after the other, as they were written; None: not known."""
    is_compared: bool = False
    """Whether an engine holds the files against ``crc32`` before it loads them: not in a publish, whose pause that would lengthen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """A block of a streamed generation; the texts of all blocks joined are the completion's text."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    """New text; characters whose bytes are incomplete and possible beginnings of a stop string are held back."""
    finish_reason: FinishReason | None
    """``stop`` or ``length`` in the last block, else None."""
    num_aborts: int = 0
    """In the last block: how many times the generation was aborted (or lost its engine) and continued."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """One entry per token where ``sampling.num_top_logprobs`` > 0, else empty."""
    num_cached_tokens: int = 0
    """Prompt tokens that the first engine had in its prefix cache; the same in every block."""
