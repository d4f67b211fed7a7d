"""What sessions may do, how they are sampled, how they end, and what becomes of them: plain values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from skyrl_async.types import SamplingParams


class BranchPolicy(StrEnum):
    """Which branches of a session become rows; a branch is the path to a turn that no other turn continues."""

    ALL = "all"
    """Each, in the order in which their last turns were sampled."""
    LONGEST = "longest"
    """The one with the most sampled tokens, the newest of several."""
    LAST = "last"
    """That of the turn sampled last."""


class ReasoningPolicy(StrEnum):
    """How earlier turns of a session appear in the prompts of later ones."""

    KEEP = "keep"
    """The tokens as they were sampled."""
    TEMPLATE = "template"
    """As the chat template renders them; a branch begins if that changes earlier tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one session may use; ``ValueError`` names a field that is no positive number."""

    max_turns: int = 1000
    """Turns sampled; the next request is refused. Requests in flight at that moment still count."""
    max_tokens: int = 1_000_000
    """Tokens sampled in all turns."""
    idle_timeout_s: float = 600.0
    """Time without an open request after which the session expires."""
    lifetime_s: float = 7200.0
    """Age at which it expires, open requests or not."""
    max_overflows: int = 3
    """Prompts too long for the model's context; the next request is refused."""
    max_concurrent_requests: int = 16
    """Requests sampled at once; more wait in line."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_overflows", "max_concurrent_requests"):
            _require(_is_number(getattr(self, name), int) and getattr(self, name) >= 1, name, "an integer >= 1", self)
        for name in ("idle_timeout_s", "lifetime_s"):
            _require(_is_number(getattr(self, name), int, float) and getattr(self, name) > 0, name, "> 0 seconds", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSampling:
    """The trainer's sampling of a session, whatever the harness asks. Ranges are those of ``SamplingParams``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    """Most new tokens of a turn; a request may ask for fewer. None: what the request asks."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            _require(_is_number(getattr(self, name), int, float), name, "a number", self)
        _require(self.temperature >= 0, "temperature", ">= 0", self)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self)
        _require(_is_number(self.top_k, int) and self.top_k >= 0, "top_k", "an integer >= 0", self)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self)
        is_fine = self.max_tokens is None or (_is_number(self.max_tokens, int) and self.max_tokens >= 1)
        _require(is_fine, "max_tokens", "an integer >= 1 or null", self)

    def applied_to(self, asked: SamplingParams) -> SamplingParams:
        """The request's parameters with the trainer's distribution in place of the harness's.

        Penalties are off, because the trainer recomputes log-probs without them. The seed is off too: harnesses that all send the same one
        would make a group of equal samples.
        """
        return replace(
            asked,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            ignore_eos=False,
            seed=None,
            max_tokens=asked.max_tokens if self.max_tokens is None else min(asked.max_tokens, self.max_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """How a session ended; ``ValueError`` for a reward that is no finite number."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_truncated: bool = False
    is_abandoned: bool = False
    """Its rows are kept and train nothing."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward must be a finite number, got {self.reward!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How one front end treats its sessions; sent to its process. The keys of ``config.schema.ServerConfig`` say more."""

    limits: SessionLimits = field(default_factory=SessionLimits)
    """Defaults for sessions that bring none of their own."""
    branches: BranchPolicy = BranchPolicy.ALL
    """Which branches of a session become rows."""
    trains_constrained: bool = False
    """Train tokens sampled under a grammar, where it left a choice. The loss must accept the grammar's log-probs."""
    trains_side_requests: bool = False
    """Train side requests too; see ``side_requests``."""
    reasoning_policy: ReasoningPolicy = ReasoningPolicy.KEEP
    front_end: int = 0
    """Index of the process among those that serve, >= 0; part of every session's key."""


def _is_number(value: object, *kinds: type) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return isinstance(value, kinds) and not isinstance(value, bool) and not is_nan


def _require(is_fine: bool, name: str, expected: str, owner: object) -> None:
    if not is_fine:
        raise ValueError(f"{name} must be {expected}, got {getattr(owner, name)!r}")
