"""What the sessions of one front end may do and what becomes of them; plain values, so that they can be sent to its process."""

from dataclasses import dataclass, field
from enum import StrEnum

from skyrl_async.endpoint.sessions.rows import BranchPolicy
from skyrl_async.endpoint.sessions.session import SessionLimits


class ReasoningPolicy(StrEnum):
    """What a later turn of a session sees of earlier turns."""

    KEEP = "keep"
    """The tokens as they were sampled."""
    TEMPLATE = "template"
    """What the chat template makes of the messages; where that changes earlier tokens, a branch begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """See ``config.schema.ServerConfig``."""

    limits: SessionLimits = field(default_factory=SessionLimits)
    """Of sessions that bring none of their own."""
    branches: BranchPolicy = BranchPolicy.ALL
    """Which branches of a session are trained."""
    trains_constrained: bool = False
    """Train tokens that were sampled under a grammar, where it left a choice: of losses for which its log-probs will do."""
    trains_side_requests: bool = False
    reasoning_policy: ReasoningPolicy = ReasoningPolicy.KEEP
    front_end: int = 0
    """Index of the process among those that serve; part of every session's key."""
