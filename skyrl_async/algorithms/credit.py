"""What advantage estimators see of samples, and how advantages of turns and tokens become columns of training rows.

    row:    prompt | turn 0 | observation | turn 1 | observation | turn 2        turn: what the policy sampled in one reply
    turns:             r_0                    r_1                    r_2         rewards in
    column:           A A A        -          A A         -        A A A A       one advantage per trained token out

A sample whose history was rewritten has several rows. Its turns are in the order in which they were sampled, whatever row trains them.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_async.columns import NO_LOGPROBS, Logprobs, Rewards, Values, at_last, repeated
from skyrl_async.errors import TrainingError
from skyrl_async.registries import Unit
from skyrl_async.samples import Sample
from skyrl_async.types import Trajectory, TurnSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """One group as an estimator of samples over a mini-batch sees it: its samples without abandoned ones."""

    rewards: tuple[float, ...]
    """One finite reward per sample."""
    num_tokens: tuple[int, ...]
    """Trained tokens per sample, >= 0."""
    baseline: float | None = None
    """Mean of what earlier samples of its prompt earned; None unless the estimator asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedAdvantages:
    """What an estimator may return for a sample in place of its advantages alone."""

    advantages: Any
    """As it would return them alone: one number, or (K,) of turns, or (N,) of trained tokens."""
    weights: Any
    """As many, finite and >= 0: what the losses of the tokens are multiplied by, divergences and entropy included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCredit:
    """One sample as an estimator of turns or tokens sees it: K >= 1 turns in the order in which they were sampled, N trained tokens."""

    rewards: tuple[float, ...]
    """(K,) finite: what each turn earned. The last one has what is known of the whole sample only: a reward without turns, shaping, the
    divergence from a reference."""
    num_tokens: tuple[int, ...]
    """(K,) trained tokens per turn, N in all; 0 for a turn that no row trains."""
    token_rewards: Rewards | None = None
    """(N,) float32: what each trained token earned of its turn's reward; the turn's last trained token has the rest. None: all of it."""
    observations: tuple[bytes, ...] = ()
    """(K,) the tokens between a turn and the trained turn before it in its row, or all tokens before it: equal where the policy was shown
    the same. Empty for a turn that no row trains."""
    logprobs: Logprobs = field(default_factory=lambda: NO_LOGPROBS)
    """(N,) float32: behavior log-probs of the trained tokens, nats."""
    log_ratios: Logprobs | None = None
    """(N,) float32, nats: recomputed log-probs of the trained tokens less the behavior ones; exactly 0 for tokens that the recomputed
    policy has sampled itself. None unless the estimator asks for recomputed log-probs, or V-trace does for one that reads values."""
    values: Values | None = None
    """(N,) float32: a critic's values of what is before each trained token; None unless the estimator asks for them."""

    @property
    def reward(self) -> float:
        """What the whole sample earned."""
        return math.fsum(self.rewards)

    def returns(self, discount: float = 1.0) -> list[float]:
        """(K,) ``G_k = r_k + discount G_(k+1)``: what turn k and those after it earned."""
        found, following = [], 0.0
        for reward in reversed(self.rewards):
            following = reward + discount * following
            found.append(following)
        return found[::-1]

    @property
    def first_tokens(self) -> NDArray[np.int64]:
        """(J,) ascending: the first trained token of each of the J turns that are trained, counted in N."""
        num_tokens = np.array(self.num_tokens)
        return (np.cumsum(num_tokens) - num_tokens)[num_tokens > 0]

    @property
    def earned_before(self) -> NDArray[np.float64]:
        """(N,) what the tokens before each trained one earned in its turn; zeros unless rewards are known by token."""
        if self.token_rewards is None:
            return np.zeros(sum(self.num_tokens))
        before = np.cumsum(self.token_rewards, dtype=np.float64) - self.token_rewards
        num_tokens = np.array(self.num_tokens)
        return before - np.repeat(before[self.first_tokens], num_tokens[num_tokens > 0])

    def weights(self, unit: Unit, largest: float | None) -> NDArray[np.float64]:
        """(N,) per trained token, or (J,) per trained turn: importance weights ``pi / mu``, at most ``largest``; None: 1."""
        if self.log_ratios is None:
            raise TrainingError("an estimator that weighs tokens must be registered with needs_old_logprobs=True")
        log_ratios = self.log_ratios.astype(np.float64)
        if unit is Unit.TURN and len(log_ratios):
            log_ratios = np.add.reduceat(log_ratios, self.first_tokens)
        return np.ones_like(log_ratios) if largest is None else np.exp(np.minimum(log_ratios, math.log(largest)))

    def action_rewards(self, unit: Unit) -> NDArray[np.float64]:
        """(N,) per trained token, or (J,) per trained turn: what was earned from it on until the next one.

        A turn's reward is that of its last token, but for what is known of the others (``token_rewards``). A turn that is not trained earns
        for the one before it; before the first, for nobody.
        """
        of_turns = np.array(self.rewards)
        num_before = np.cumsum(np.array(self.num_tokens) > 0) if unit is Unit.TURN else np.cumsum(self.num_tokens)
        found = np.zeros(num_before[-1])
        is_after = num_before > 0
        if unit is Unit.TOKEN and self.token_rewards is not None:
            turns: NDArray[np.int64] = np.repeat(np.arange(len(of_turns)), self.num_tokens)
            found += self.token_rewards
            of_turns -= np.bincount(turns, self.token_rewards, minlength=len(of_turns))
        np.add.at(found, num_before[is_after] - 1, of_turns[is_after])
        return found


def credit_of(whole: Sample, trained: Sample, reward: float) -> SampleCredit:
    """A sample as an estimator sees it.

    Args:
        whole: the sample.
        trained: the same sample without the tokens that the step masks.
        reward: what it earned, shaping and penalties included.

    Raises:
        TrainingError: a trained token is in no turn.
    """
    turns = _turns_of(trained)
    row = whole.rows[0]
    rewards = list(row.turn_rewards)
    rewards += [0.0] * (max((1, *(span.index + 1 for _, span in turns))) - len(rewards))
    rewards[-1] += reward - row.reward if row.turn_rewards else reward
    num_tokens, observations = [0] * len(rewards), [b""] * len(rewards)
    logprobs, log_ratios, values, token_rewards = [NO_LOGPROBS], [NO_LOGPROBS], [NO_LOGPROBS], [NO_LOGPROBS]
    has_values = all(row.values is not None for row in trained.rows)
    is_known_by_token = any(row.token_rewards is not None for row in trained.rows)
    end_of_row: dict[int, int] = {}
    for row, span in turns:
        mask = row.loss_mask[span.start : span.end]
        num_tokens[span.index] = int(np.count_nonzero(mask))
        logprobs.append(row.logprobs[span.start : span.end][mask])
        log_ratios.append(_log_ratios(row, span)[mask])
        if is_known_by_token:
            of_turn = None if row.token_rewards is None else row.token_rewards[span.start : span.end]
            token_rewards.append((at_last(rewards[span.index], len(mask)) if of_turn is None else of_turn)[mask])
        if row.values is not None:
            values.append(row.values[span.start : span.end][mask])
        shown = row.response_token_ids[end_of_row.get(id(row), 0) : span.start].tobytes()
        observations[span.index] = shown if id(row) in end_of_row else row.prompt_token_ids.tobytes() + shown
        end_of_row[id(row)] = span.end
    if sum(num_tokens) != trained.num_sampled_tokens:
        raise TrainingError(
            f"trajectory.turn_spans must hold every trained token, got turns of {num_tokens} tokens for "
            f"{trained.num_sampled_tokens} trained ones; correct the generator"
        )
    return SampleCredit(
        rewards=tuple(rewards),
        num_tokens=tuple(num_tokens),
        observations=tuple(observations),
        logprobs=np.concatenate(logprobs),
        log_ratios=None if all(row.old_logprobs is None for row in trained.rows) else np.concatenate(log_ratios),
        values=np.concatenate(values) if has_values else None,
        token_rewards=np.concatenate(token_rewards) if is_known_by_token else None,
    )


def with_log_ratios(sample: SampleCredit) -> SampleCredit:
    """The sample with log-ratios of 0 where nothing was recomputed, because no returns of stale tokens are to be weighted."""
    if sample.log_ratios is not None:
        return sample
    return replace(sample, log_ratios=np.zeros(sum(sample.num_tokens), np.float32))


def _log_ratios(row: Trajectory, span: TurnSpan) -> Logprobs:
    """(end - start,) float32, as ``SampleCredit.log_ratios``; 0 in a row of which nothing was recomputed."""
    if row.old_logprobs is None or row.old_version is None:
        return repeated(0.0, span.end - span.start)
    versions = np.asarray(row.versions[span.start : span.end])
    difference = row.old_logprobs[span.start : span.end] - row.logprobs[span.start : span.end]
    return np.where(versions == row.old_version, np.float32(0), difference)


def columns_of(
    trained: Sample, unit: Unit, given: NDArray[np.float64], elsewhere: float = 0.0
) -> list[NDArray[np.float32]]:
    """A column per row, (T,) float32.

    Args:
        trained: as in ``credit_of``.
        unit: turn or token.
        given: (K,) of its turns, or (N,) of its trained tokens in the order of turns.
        elsewhere: for all other tokens.
    """
    found: dict[int, NDArray[np.float32]] = {
        id(row): np.full(len(row.response_token_ids), elsewhere, np.float32) for row in trained.rows
    }
    num_before = 0
    for row, span in _turns_of(trained):
        of_turn, mask = found[id(row)][span.start : span.end], row.loss_mask[span.start : span.end]
        if unit is Unit.TURN:
            of_turn[mask] = given[span.index]
        else:
            num = int(np.count_nonzero(mask))
            of_turn[mask] = given[num_before : num_before + num]
            num_before += num
    for column in found.values():
        column.flags.writeable = False
    return list(found.values())


def returns_of(
    sample: SampleCredit, unit: Unit, advantages: NDArray[np.float64], largest_weight: float | None
) -> NDArray[np.float64]:
    """(N,) what a critic's values of a sample are trained towards: ``V + w A``, the targets of V-trace (``estimators.gae``).

    NaN where no value is trained: at all tokens of a turn but its first, where advantages are of turns.

    Args:
        sample: with ``values``.
        unit: turn or token.
        advantages: (K,) or (N,), what was earned less the value.
        largest_weight: of ``SampleCredit.weights``.
    """
    assert sample.values is not None, "the estimator has asked for them"
    values, weights = sample.values.astype(np.float64), with_log_ratios(sample).weights(unit, largest_weight)
    if unit is Unit.TOKEN:
        return values + weights * advantages
    found, first = np.full(len(values), np.nan), sample.first_tokens
    found[first] = values[first] + weights * advantages[np.array(sample.num_tokens) > 0]
    return found


def constant_column(row: Trajectory, value: float) -> NDArray[np.float32]:
    """(T,) float32: one advantage or weight for all of a row's tokens."""
    return repeated(value, len(row.response_token_ids))


def _turns_of(sample: Sample) -> list[tuple[Trajectory, TurnSpan]]:
    """The turns that are trained, each with its row, in the order in which they were sampled. A row without turns is one."""
    turns = [
        (row, span)
        for index, row in enumerate(sample.rows)
        for span in row.turn_spans or (TurnSpan(index=index, start=0, end=len(row.response_token_ids)),)
    ]
    return sorted(turns, key=lambda turn: turn[1].index)
