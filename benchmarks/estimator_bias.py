"""Bias and variance of advantage estimators, for a policy that decides how many turns it takes.

The policy is small enough that every episode can be enumerated, so that the mean of an estimator's gradient and its variance are exact. The
same is measured with sampled groups, through the columns that the trainer computes.

An episode has at most three turns. In each the policy sees one of three states and stops, or takes one of two other actions, which lead to
other states or back to the same one. Each turn earns a reward of its own.

Keys of a row: ``bias``, the distance of the mean from the gradient of the expected reward; ``cosine`` of the angle between both, 1 where
only the length differs; ``turns_bias``, how much of the bias leads towards more turns (towards fewer, if negative);
``measured_turns_bias`` with its ``standard_error``, from sampled groups; all but the cosine are relative to the length of the gradient.
``variance`` is of one group's estimate, summed over parameters, relative to the square of its own mean's length: estimators that differ by
a factor have the same. ``is_unbiased`` is what the estimator's docstring claims. Estimators that read values get those of a perfect
critic, or 1 everywhere.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.report import arguments, conditions, report
from skyrl_async.algorithms.advantages import AdvantageEstimator, make_advantage_estimator, with_advantages
from skyrl_async.algorithms.credit import GroupRewards, SampleCredit
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.registries import Unit
from skyrl_async.types import Group, Trajectory, TurnSpan

Floats = NDArray[np.float64]
MAX_TURNS, STOP, LONG = 3, 0, 2
NEXT_STATE = ((0, 0, 1), (0, 1, 2), (0, 0, 2))
"""By state and action; there is none after STOP."""
REWARDS = ((0.9, 0.5, 0.2), (1.0, 0.3, 0.6), (0.7, 0.8, 0.1))
"""What a turn earns, by state and action."""
GROUP_SIZE = 3
NUM_GROUPS = 20_000
_OBSERVATION = 2
"""Tokens between turns."""


class Episode(NamedTuple):
    """States and actions by turn."""

    states: tuple[int, ...]
    actions: tuple[int, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(REWARDS[state][action] for state, action in zip(self.states, self.actions, strict=True))

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """The action LONG takes two tokens, the second of which is certain."""
        return tuple(2 if action == LONG else 1 for action in self.actions)

    @property
    def credit(self) -> SampleCredit:
        return SampleCredit(
            rewards=self.rewards, num_tokens=self.num_tokens, observations=tuple(bytes([s]) for s in self.states)
        )


def episodes(states: tuple[int, ...] = (0,), actions: tuple[int, ...] = ()) -> Iterator[Episode]:
    """Every episode that begins so."""
    for action in range(3):
        taken = (*actions, action)
        if action == STOP or len(taken) == MAX_TURNS:
            yield Episode(states, taken)
        else:
            yield from episodes((*states, NEXT_STATE[states[-1]][action]), taken)


EPISODES = tuple(episodes())


@dataclass(frozen=True)
class TurnPolicy:
    """A softmax policy over actions by state."""

    logits: Floats
    """(3, 3)."""

    @cached_property
    def chances(self) -> Floats:
        """(3, 3): of each action, by state."""
        exps = np.exp(self.logits - self.logits.max(1, keepdims=True))
        return exps / exps.sum(1, keepdims=True)

    def chance_of(self, episode: Episode) -> float:
        return float(np.prod([self.chances[s, a] for s, a in zip(*episode, strict=True)]))

    def scores(self, episode: Episode) -> Floats:
        """(K, 9): the gradient of each turn's log-probability."""
        found = np.zeros((len(episode.states), 3, 3))
        for turn, (state, action) in enumerate(zip(*episode, strict=True)):
            found[turn, state] = -self.chances[state]
            found[turn, state, action] += 1
        return found.reshape(-1, 9)

    def gradient_of(self, value: Callable[[Episode], float]) -> Floats:
        """(9,): of the mean of ``value``."""
        total = np.zeros(9)
        for episode in EPISODES:
            total += self.chance_of(episode) * value(episode) * self.scores(episode).sum(0)
        return total

    def value(self, turn: int, state: int) -> float:
        """What is earned in the mean from this turn on."""
        return float(sum(self.chances[state, action] * self.action_value(turn, state, action) for action in range(3)))

    def action_value(self, turn: int, state: int, action: int) -> float:
        """The same once the action is known."""
        is_last = action == STOP or turn == MAX_TURNS - 1
        return REWARDS[state][action] + (0.0 if is_last else self.value(turn + 1, NEXT_STATE[state][action]))

    def token_values(self, episode: Episode) -> Floats:
        """(N,): the values of a perfect critic; after the first token of LONG the action is known."""
        found: list[float] = []
        for turn, (state, action) in enumerate(zip(*episode, strict=True)):
            found.append(self.value(turn, state))
            found += [self.action_value(turn, state, action)] * (action == LONG)
        return np.array(found)

    def moments(
        self, estimator: AdvantageEstimator, group_size: int, critic: "Critic | None" = None
    ) -> tuple[Floats, float]:
        """The mean, (9,), of a group's gradient, and its variance, summed over parameters; over every group that there can be."""
        chances, scores = [self.chance_of(e) for e in EPISODES], [self.scores(e) for e in EPISODES]
        mean, square = np.zeros(9), 0.0
        for indices in product(range(len(EPISODES)), repeat=group_size):
            chance = float(np.prod([chances[i] for i in indices]))
            turns = turn_advantages(estimator, [EPISODES[i] for i in indices], critic)
            estimate = sum(a @ scores[i] for a, i in zip(turns, indices, strict=True)) / group_size
            mean += chance * estimate
            square += chance * float(estimate @ estimate)
        return mean, square - float(mean @ mean)


Critic = Callable[[Episode], Floats]
"""An episode's value before each token, (N,)."""


def turn_advantages(
    estimator: AdvantageEstimator, group: Sequence[Episode], critic: Critic | None = None
) -> list[Floats]:
    """(K,) per episode. A turn's first token has its whole score."""
    if estimator.unit is Unit.SAMPLE:
        rewards, num_tokens = zip(*((sum(e.rewards), sum(e.num_tokens)) for e in group), strict=True)
        (found,) = estimator([GroupRewards(rewards=rewards, num_tokens=num_tokens)])
        return [np.full(len(e.states), advantage) for e, advantage in zip(group, found, strict=True)]
    credits = tuple(episode.credit for episode in group)
    if critic is not None:
        credits = tuple(
            replace(credit, values=critic(episode), log_ratios=np.zeros(sum(credit.num_tokens), np.float32))
            for credit, episode in zip(credits, group, strict=True)
        )
    (found,) = estimator([credits])
    is_by_token = estimator.unit is Unit.TOKEN
    return [
        np.asarray(of_sample)[credit.first_tokens] if is_by_token else np.asarray(of_sample)
        for of_sample, credit in zip(found, credits, strict=True)
    ]


def mt_grpo_advantages(samples: Sequence[SampleCredit], constants: AdvantageConstants) -> list[list[float]]:
    """``A_ik = sum over l >= k of (r_il - mean over j != i that take turn l of r_jl)``: turns normalised by their place.

    MT-GRPO's construction (arXiv 2505.11821) for more than two turns, without standard deviations and with the mean of the others. The
    baseline of a turn has a term for every turn that the sample still takes, so that it depends on what the turn does. With ``m_l`` the
    mean for turn l its bias is ``- sum over l >= 1 of E[m_l] grad P(turn l is taken)`` (verl issue 7244).
    """
    found = []
    for i, one in enumerate(samples):
        others = [other.rewards for j, other in enumerate(samples) if j != i]
        means = [place_mean(others, turn) for turn in range(len(one.rewards))]
        centred = [reward - mean for reward, mean in zip(one.rewards, means, strict=True)]
        found.append([sum(centred[k:]) for k in range(len(centred))])
    return found


def place_mean(rewards: Sequence[Sequence[float]], turn: int) -> float:
    """Mean over those that take the turn; 0 without any."""
    taken = [of[turn] for of in rewards if len(of) > turn]
    return sum(taken) / len(taken) if taken else 0.0


def trajectory(episode: Episode, critic: Critic | None = None) -> Trajectory:
    """The episode as a training row."""
    spans: list[TurnSpan] = []
    mask: list[bool] = []
    for index, num in enumerate(episode.num_tokens):
        mask += [False] * (_OBSERVATION if index else 0)
        spans.append(TurnSpan(index=index, start=len(mask), end=len(mask) + num))
        mask += [True] * num
    shown = np.concatenate([np.full(_OBSERVATION, state, np.int32) for state in episode.states])
    ids = np.zeros(len(mask), np.int32)
    ids[~np.array(mask)] = shown[_OBSERVATION:]
    values = None
    if critic is not None:
        values = np.zeros(len(mask), np.float32)
        values[np.array(mask)] = critic(episode)
    return Trajectory(
        prompt_token_ids=shown[:_OBSERVATION],
        response_token_ids=ids,
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, -1),
        reward=sum(episode.rewards),
        turn_rewards=episode.rewards,
        turn_spans=tuple(spans),
        num_turns=len(spans),
        values=values,
    )


def sampled_estimates(
    policy: TurnPolicy, estimator: AdvantageEstimator, critic: Critic | None, num_groups: int, seed: int
) -> Floats:
    """(num_groups, 9): gradients of sampled groups, from the columns of their rows."""
    rng = np.random.default_rng(seed)
    chances = np.array([policy.chance_of(episode) for episode in EPISODES])
    rows = [trajectory(episode, critic) for episode in EPISODES]
    scores = [policy.scores(episode) for episode in EPISODES]
    drawn = rng.choice(len(EPISODES), (num_groups, GROUP_SIZE), p=chances / chances.sum())
    estimates = np.zeros((num_groups, 9))
    for number, indices in enumerate(drawn.tolist()):
        # A row of its own for each sample, because rows are told apart by identity.
        of_group = tuple(trajectory(EPISODES[i], critic) if indices.count(i) > 1 else rows[i] for i in indices)
        group = Group(uid="", admission_index=number, scheduled_version=0, trajectories=of_group)
        for i, row, column in zip(indices, of_group, with_advantages([group], estimator)[0].advantages, strict=True):
            estimates[number] += column[[span.start for span in row.turn_spans]] @ scores[i]
    return estimates / GROUP_SIZE


def measured(
    name: str, policy: TurnPolicy, estimator: AdvantageEstimator, critic: Critic | None, num_groups: int, seed: int
) -> dict[str, Any]:
    """The row of one estimator."""
    gradient = policy.gradient_of(lambda episode: sum(episode.rewards))
    towards_turns = policy.gradient_of(lambda episode: len(episode.states))
    length, unit = np.linalg.norm(gradient), towards_turns / np.linalg.norm(towards_turns)
    mean, variance = policy.moments(estimator, GROUP_SIZE, critic)
    along = (sampled_estimates(policy, estimator, critic, num_groups, seed) - gradient) @ unit / length
    return {
        "estimator": name,
        "bias": float(np.linalg.norm(mean - gradient) / length),
        "cosine": float(mean @ gradient / length / np.linalg.norm(mean)),
        "turns_bias": float((mean - gradient) @ unit / length),
        "measured_turns_bias": float(along.mean()),
        "standard_error": float(along.std(ddof=1) / np.sqrt(num_groups)),
        "variance": variance / float(mean @ mean),
        "is_unbiased": name in UNBIASED,
    }


UNBIASED = ("rloo", "turn_rloo", "turn_gae, values of 1", "turn_gae", "turn_gae, lambd=0.5", "gae, lambd=0.5")


def compared(policy: TurnPolicy) -> dict[str, tuple[AdvantageEstimator, Critic | None]]:
    """Every estimator by the name in the table, with the critic whose values it reads: a perfect one, or one that says 1 of everything."""

    def ones(episode: Episode) -> Floats:
        return np.ones(sum(episode.num_tokens))

    perfect = {episode: policy.token_values(episode) for episode in EPISODES}.__getitem__
    half = AdvantageConstants(lambd=0.5)
    return {
        **{name: (each, None) for name, each in estimators().items()},
        "turn_gae, values of 1": (make_advantage_estimator("turn_gae"), ones),
        "turn_gae, values of 1, lambd=0.5": (make_advantage_estimator("turn_gae", half), ones),
        "turn_gae": (make_advantage_estimator("turn_gae"), perfect),
        "turn_gae, lambd=0.5": (make_advantage_estimator("turn_gae", half), perfect),
        "gae, lambd=0.5": (make_advantage_estimator("gae", half), perfect),
    }


def estimators() -> dict[str, AdvantageEstimator]:
    """Those of groups, by the name in the table."""
    unscaled = AdvantageConstants(norm_by_std=False)
    return {
        **{name: make_advantage_estimator(name) for name in ("rloo", "turn_rloo", "dr_grpo", "grpo", "gigpo")},
        "gigpo, norm_by_std=false": make_advantage_estimator("gigpo", unscaled),
        "turn_credit": make_advantage_estimator("turn_credit"),
        "turn_rloo, turn_discount=0.9": make_advantage_estimator("turn_rloo", AdvantageConstants(turn_discount=0.9)),
        "mt_grpo": AdvantageEstimator(compute=mt_grpo_advantages, unit=Unit.TURN),
    }


def draw(rows: Sequence[dict[str, Any]], png: Path) -> None:
    """Draw each estimator's angle to the gradient, and its variance."""
    figure = Figure(figsize=(9.2, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    names = [row["estimator"] for row in rows]
    angles = [math.degrees(math.acos(min(1.0, row["cosine"]))) for row in rows]
    drawn = (
        ("degrees between the mean and the gradient", angles),
        ("variance over squared length", [r["variance"] for r in rows]),
    )
    colors = ["#3d9a6d" if row["is_unbiased"] else "#c8504b" for row in rows]
    for axes, (title, values) in zip(panels, drawn, strict=True):
        axes.barh(names, values, color=colors, height=0.62)
        axes.bar_label(
            axes.containers[0],
            labels=[f"{value:.3g}" if value > 0.01 else "0" for value in values],
            padding=3,
            fontsize=8.5,
        )
        axes.set_title(title, loc="left", fontsize=10)
        axes.margins(x=0.14)
        axes.grid(axis="x", color="#e8eaed", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(png)


def make_policy(seed: int) -> TurnPolicy:
    return TurnPolicy(np.random.default_rng(seed).normal(0.0, 0.7, (3, 3)))


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--plot", type=Path, help="draw bias and variance to this picture")
    options = parser.parse_args()
    under, policy = conditions(seed=options.seed), make_policy(options.seed)
    num_groups = NUM_GROUPS // 10 if options.quick else NUM_GROUPS
    rows = [measured(name, policy, *each, num_groups, options.seed) for name, each in compared(policy).items()]
    figures = {"group_size": GROUP_SIZE, "num_groups": num_groups, "conditions": under}
    if options.plot is not None:
        draw(rows, options.plot)
    report("advantage estimators against the enumerated gradient", figures, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
