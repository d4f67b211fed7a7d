"""What sessions may do, how they are sampled, how they end, and what becomes of them: plain values.

``SessionSampling`` and ``SessionOutcome`` are also parts of the bodies that a controller sends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationInfo, field_validator, model_validator

from skyrl_async.columns import Rewards, at_last
from skyrl_async.config.schema.server import BranchPolicyName, ReasoningPolicy
from skyrl_async.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one session may use. All are > 0; whoever makes them from a user's values has checked that."""

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


class SessionSampling(BaseModel):
    """The trainer's sampling of a session, whatever its harness asks. ``ValueError`` for a value out of range."""

    model_config = ConfigDict(frozen=True)

    temperature: FiniteFloat = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**63)
    """Most new tokens of a turn; a request may ask for fewer. None: what the request asks."""

    def applied_to(self, asked: SamplingParams) -> SamplingParams:
        """The request's parameters with the trainer's distribution in place of the harness's.

        Penalties are off, because the trainer recomputes log-probs without them. The seed is off too: harnesses that all send the same one
        would make a group of equal samples.
        """
        return replace(
            asked,
            **self.model_dump(exclude={"max_tokens"}),
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            ignore_eos=False,
            seed=None,
            max_tokens=asked.max_tokens if self.max_tokens is None else min(asked.max_tokens, self.max_tokens),
        )


_MAX_REWARD = 1e30
"""Largest reward of a session, turn or token: the sum of many is finite in 32 bits too."""


class TurnReward(BaseModel):
    """What one turn of a session earned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turn: int = Field(ge=0)
    """Which of the session's replies, in the order in which they were finished, from 0. Side requests count."""
    value: float | tuple[float, ...]
    """The reward of the whole turn, or one of each of its sampled tokens."""

    @field_validator("value")
    @classmethod
    def _check_value(cls, value: float | tuple[float, ...], info: ValidationInfo) -> float | tuple[float, ...]:
        for token, one in enumerate(_listed(value)):
            if not math.isfinite(one):
                place = f", token {token}" if isinstance(value, tuple) else ""
                raise ValueError(f"rewards must be finite, got {one} for turn {info.data.get('turn')}{place}")
        if largest := next((one for one in _listed(value) if abs(one) > _MAX_REWARD), 0.0):
            raise ValueError(f"rewards are too large: each must be between -1e30 and 1e30, got {largest:g}")
        return value

    @property
    def total(self) -> float:
        return math.fsum(_listed(self.value))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


class SessionOutcome(BaseModel):
    """How a session ended. ``ValueError`` for a reward or a figure that is no finite number, or rewards that are not ``reward``."""

    model_config = ConfigDict(frozen=True)

    reward: float
    """What the whole session earned; may be left out beside ``rewards``, whose sum it is."""
    rewards: tuple[TurnReward, ...] = ()
    """What single turns earned; a turn that is not named earned nothing, one that is named twice both."""
    metrics: dict[str, FiniteFloat] | None = None
    is_truncated: bool = False
    is_abandoned: bool = False
    """Its rows are kept and train nothing."""

    @model_validator(mode="before")
    @classmethod
    def _sum_up(cls, given: Any) -> Any:
        """The reward that is left out."""
        if not isinstance(given, dict) or "reward" in given or "rewards" not in given:
            return given
        try:
            values = [one["value"] if isinstance(one, dict) else one.value for one in given["rewards"]]
            total = math.fsum(math.fsum(map(float, _listed(value))) for value in values)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            total = 0.0  # the checks of rewards name what is wrong
        return given | {"reward": total if math.isfinite(total) else 0.0}

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, reward: float) -> float:
        if not math.isfinite(reward):
            raise ValueError(f"reward must be a finite number, got {reward}")
        return reward

    @model_validator(mode="after")
    def _check_sum(self) -> Self:
        if abs(self.reward) > _MAX_REWARD:
            raise ValueError(f"reward is too large: it must be between -1e30 and 1e30, got {self.reward:g}")
        total = math.fsum(one.total for one in self.rewards)
        if self.rewards and not math.isclose(total, self.reward, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(f"reward must be the sum of rewards ({total:g}), or be left out, got {self.reward:g}")
        return self

    def turn_rewards(self, num_tokens: Sequence[int]) -> tuple[float, ...]:
        """What each turn earned; empty without ``rewards``.

        Args:
            num_tokens: sampled tokens of each turn.

        Raises:
            ValueError: a turn does not exist, or has another number of tokens than rewards.
        """
        found = [0.0] * len(num_tokens)
        for one in self.rewards:
            if one.turn >= len(num_tokens):
                raise ValueError(
                    f"rewards name turn {one.turn}, but the session has {len(num_tokens)} turns, counted from 0"
                )
            if isinstance(one.value, tuple) and len(one.value) != num_tokens[one.turn]:
                raise ValueError(
                    f"rewards have {len(one.value)} values for turn {one.turn}, but it has {num_tokens[one.turn]} sampled tokens"
                )
            found[one.turn] += one.total
        return tuple(found) if self.rewards else ()

    def token_rewards(self, num_tokens: Sequence[int]) -> list[Rewards]:
        """For each turn (T,) float32: what its sampled tokens earned; the last one has what is known of the turn only.

        Empty where no single token is rewarded. ``num_tokens`` as ``turn_rewards``, which checks it.
        """
        if not any(isinstance(one.value, tuple) for one in self.rewards):
            return []
        found: list[Rewards] = [np.zeros(num, np.float32) for num in num_tokens]
        for one in self.rewards:
            of_turn = found[one.turn]
            of_turn += one.value if isinstance(one.value, tuple) else at_last(one.value, len(of_turn))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How one front end treats its sessions; sent to its process. The keys of ``ServerConfig`` say more."""

    limits: SessionLimits = field(default_factory=SessionLimits)
    """Defaults for sessions that bring none of their own."""
    branches: BranchPolicyName = BranchPolicyName.all
    """Which branches of a session become rows."""
    trains_constrained: bool = False
    """Train tokens sampled under a grammar, where it left a choice. The loss must accept the grammar's log-probs."""
    trains_side_requests: bool = False
    """Train side requests too; see ``side_requests``."""
    reasoning_policy: ReasoningPolicy = ReasoningPolicy.keep
    """How earlier turns of a session appear in the prompts of later ones."""
    front_end: int = 0
    """Index of the process among those that serve, >= 0; part of every session's key."""
