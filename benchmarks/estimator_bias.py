"""Bias and variance of advantage estimators, for a policy that decides how many turns it takes.

Every episode of the policy (``turn_policy``) can be enumerated, so that the mean of an estimator's gradient and its variance are exact. The
same is measured with sampled groups, through the columns that the trainer computes.

Every group of three samples is enumerated, and where a row says so every mini-batch of two such groups. An estimator with a baseline of
earlier steps gets every series of four visits to the prompt, one sample and one step each: the first visit makes the baseline, the other
three count. ``KEYS`` says what the numbers of a row are.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np

from benchmarks.estimator_figures import draw, table
from benchmarks.report import arguments, conditions, file_to_write, report
from benchmarks.turn_policy import EPISODES, Episode, Floats, TurnPolicy, make_policy
from skyrl_async.algorithms.advantages import AdvantageEstimator, make_advantage_estimator, with_advantages
from skyrl_async.algorithms.credit import GroupRewards, SampleCredit
from skyrl_async.algorithms.history import PromptRewards
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.columns import Advantages
from skyrl_async.registries import Unit
from skyrl_async.types import Group, Trajectory, TurnSpan

GROUP_SIZE = 3
NUM_ESTIMATES = 20_000
DECAY = 0.9
"""That of ``running_mean``."""
KEYS = {
    "bias": "exact: distance of the estimate's mean from the gradient of the expected reward, over the gradient's length",
    "cosine": "exact: of the angle between the two; 1 where only the length differs",
    "turns_bias": "exact: how much of the bias leads towards more turns (negative: towards fewer), over the gradient's length",
    "measured_bias": "from sampled groups, through the trainer's columns: the part in the direction of the exact bias, so that its mean is "
    "`bias`; where there is none, towards more turns",
    "standard_error": "of measured_bias",
    "num_groups": "of three samples that an estimate is of",
    "variance": "exact: of an estimate, summed over parameters, over the square of its own mean's length",
    "measured_variance": "from the same sampled estimates as measured_bias: `variance`, over the square of the exact mean's length",
    "variance_error": "standard error of measured_variance",
    "is_unbiased": "what the estimator's docstring claims",
}
_OBSERVATION = 2
"""Tokens between turns."""

Drawn = tuple[tuple[int, ...], ...]
"""Groups, each by the indices of its episodes."""
Critic = Callable[[Episode], Floats]
"""An episode's value before each token, (N,)."""


def draws(group_size: int, num_groups: int, *, is_series: bool) -> Iterator[tuple[Drawn, int]]:
    """The groups of every mini-batch, with the number of orders in which they can be drawn.

    A series is of 1 + ``group_size`` groups of one sample each, whose order counts.
    """
    episodes = range(len(EPISODES))
    if is_series:
        yield from ((tuple((i,) for i in indices), 1) for indices in product(episodes, repeat=1 + group_size))
        return
    of_group = {group: num_orders(group) for group in combinations_with_replacement(episodes, group_size)}
    for groups in combinations_with_replacement(of_group, num_groups):
        yield groups, num_orders(groups) * math.prod(of_group[group] for group in groups)


def num_orders(drawn: tuple[Any, ...]) -> int:
    return math.factorial(len(drawn)) // math.prod(math.factorial(drawn.count(one)) for one in set(drawn))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """An estimator as it is compared."""

    name: str
    """That in the table."""
    estimator: AdvantageEstimator
    critic: Critic | None = None
    """Whose values it reads."""
    num_groups: int = 1
    """Of its mini-batch."""


def turn_advantages(
    estimator: AdvantageEstimator, groups: Sequence[Sequence[Episode]], critic: Critic | None = None
) -> list[Floats]:
    """(K,) per episode of a mini-batch; of a series per visit but the first. A turn's first token has its whole score."""
    if estimator.needs_baseline:
        return visit_advantages(estimator, groups)
    if estimator.unit is Unit.SAMPLE:
        of_groups = estimator([rewards_of(group) for group in groups])
        return [
            np.full(len(episode.states), advantage)
            for group, found in zip(groups, of_groups, strict=True)
            for episode, advantage in zip(group, found, strict=True)
        ]
    credits = [tuple(credit_of(episode, critic) for episode in group) for group in groups]
    is_by_token = estimator.unit is Unit.TOKEN
    return [
        np.asarray(of_sample)[credit.first_tokens] if is_by_token else np.asarray(of_sample)
        for group, found in zip(credits, estimator(credits), strict=True)
        for of_sample, credit in zip(found, group, strict=True)
    ]


def visit_advantages(estimator: AdvantageEstimator, visits: Sequence[Sequence[Episode]]) -> list[Floats]:
    """(K,) per visit to a prompt but the first. Each is a step of one sample, so that its baseline is that of the visits before it."""
    history, found = PromptRewards(decay=DECAY), []
    for number, visit in enumerate(visits):
        seen = rewards_of(visit, history.baseline("a"))
        ((advantage,),) = estimator([seen])
        found.append(np.full(len(visit[0].states), advantage))
        history.add(number, "a", seen.rewards)
        history.end_step()
    return found[1:]


def rewards_of(group: Sequence[Episode], baseline: float | None = None) -> GroupRewards:
    rewards, num_tokens = zip(*((sum(e.rewards), sum(e.num_tokens)) for e in group), strict=True)
    return GroupRewards(rewards=rewards, num_tokens=num_tokens, baseline=baseline)


def credit_of(episode: Episode, critic: Critic | None) -> SampleCredit:
    credit = episode.credit
    if critic is None:
        return credit
    return replace(credit, values=critic(episode), log_ratios=np.zeros(sum(credit.num_tokens), np.float32))


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


def moments(policy: TurnPolicy, one: Compared, group_size: int) -> tuple[Floats, float]:
    """The mean, (9,), of an estimate, and its variance, summed over parameters; over everything that can be drawn."""
    chances, scores = [policy.chance_of(e) for e in EPISODES], [policy.scores(e) for e in EPISODES]
    mean, square = np.zeros(9), 0.0
    for groups, num_orders in draws(group_size, one.num_groups, is_series=one.estimator.needs_baseline):
        indices = [i for group in groups for i in group]
        chance = num_orders * math.prod(chances[i] for i in indices)
        turns = turn_advantages(one.estimator, [[EPISODES[i] for i in group] for group in groups], one.critic)
        indices = indices[-len(turns) :]
        estimate = sum(a @ scores[i] for a, i in zip(turns, indices, strict=True)) / len(turns)
        mean += chance * estimate
        square += chance * float(estimate @ estimate)
    return mean, square - float(mean @ mean)


def sampled_estimates(policy: TurnPolicy, one: Compared, num_estimates: int, seed: int) -> Floats:
    """(num_estimates, 9): gradients of sampled groups, from the columns of their rows."""
    rng = np.random.default_rng(seed)
    chances = np.array([policy.chance_of(episode) for episode in EPISODES])
    scores = [policy.scores(episode) for episode in EPISODES]
    is_series, num_samples = one.estimator.needs_baseline, one.num_groups * GROUP_SIZE
    drawn = rng.choice(len(EPISODES), (num_estimates, num_samples + is_series), p=chances / chances.sum())
    estimates = np.zeros((num_estimates, 9))
    for estimate, indices in zip(estimates, drawn.tolist(), strict=True):
        rows = [trajectory(EPISODES[i], one.critic) for i in indices]
        columns = columns_of_rows(one.estimator, rows, group_size=1 if is_series else GROUP_SIZE)
        for i, row, column in list(zip(indices, rows, columns, strict=True))[-num_samples:]:
            estimate += column[[span.start for span in row.turn_spans]] @ scores[i]
    return estimates / num_samples


def columns_of_rows(estimator: AdvantageEstimator, rows: Sequence[Trajectory], group_size: int) -> list[Advantages]:
    """The advantages of each row: of the groups of one step, or of a series, in which each group is a step."""
    groups = [
        Group(uid="a", admission_index=start, scheduled_version=0, trajectories=tuple(rows[start : start + group_size]))
        for start in range(0, len(rows), group_size)
    ]
    history, found = PromptRewards(decay=DECAY), []
    for of_step in [[group] for group in groups] if estimator.needs_baseline else [groups]:
        found += with_advantages(of_step, estimator, history=history)
        history.end_step()
    return [column for group in found for column in group.advantages]


def sampled_variance_of(estimates: Floats) -> tuple[float, float]:
    """The variance of (num_estimates, 9), summed over parameters, and its standard error."""
    num = len(estimates)
    squares = ((estimates - estimates.mean(0)) ** 2).sum(1)
    return float(squares.sum() / (num - 1)), float(squares.std(ddof=1) / np.sqrt(num))


def measured(policy: TurnPolicy, one: Compared, num_estimates: int, seed: int) -> dict[str, Any]:
    """The row of one estimator, with the ``KEYS``."""
    gradient = policy.gradient_of(lambda episode: sum(episode.rewards))
    towards_turns = policy.gradient_of(lambda episode: len(episode.states))
    length, unit = np.linalg.norm(gradient), towards_turns / np.linalg.norm(towards_turns)
    mean, variance = moments(policy, one, GROUP_SIZE)
    bias = float(np.linalg.norm(mean - gradient))
    direction = (mean - gradient) / bias if bias > 1e-9 * length else unit
    estimates = sampled_estimates(policy, one, num_estimates, seed)
    along = (estimates - gradient) @ direction / length
    sampled_variance, variance_error = sampled_variance_of(estimates)
    return {
        "estimator": one.name,
        "bias": bias / float(length),
        "cosine": float(mean @ gradient / length / np.linalg.norm(mean)),
        "turns_bias": float((mean - gradient) @ unit / length),
        "measured_bias": float(along.mean()),
        "standard_error": float(along.std(ddof=1) / np.sqrt(num_estimates)),
        "num_groups": one.num_groups,
        "variance": variance / float(mean @ mean),
        "measured_variance": sampled_variance / float(mean @ mean),
        "variance_error": variance_error / float(mean @ mean),
        "is_unbiased": one.name in UNBIASED,
    }


UNBIASED = (
    *("rloo", "turn_rloo", "running_mean"),
    *("turn_gae, values of 1", "turn_gae", "turn_gae, lambd=0.5", "gae, values of 1", "gae", "gae, lambd=0.5"),
)


def compared(policy: TurnPolicy) -> dict[str, Compared]:
    """Every estimator by its name. Where it reads values, those of a perfect critic, or of one that says 1 of everything."""

    def ones(episode: Episode) -> Floats:
        return np.ones(sum(episode.num_tokens))

    perfect = {episode: policy.token_values(episode) for episode in EPISODES}.__getitem__
    make, half, names = make_advantage_estimator, AdvantageConstants(lambd=0.5), ("rloo", "turn_rloo", "running_mean")
    found = [
        *(Compared(name=name, estimator=make(name)) for name in (*names, "dr_grpo", "grpo", "maxrl")),
        Compared(name="reinforce++", estimator=make("reinforce++")),
        *(
            Compared(name=f"{name}, two groups", estimator=make(name), num_groups=2)
            for name in ("reinforce++", "reinforce++_baseline")
        ),
        Compared(name="gigpo", estimator=make("gigpo")),
        Compared(name="gigpo, norm_by_std=false", estimator=make("gigpo", AdvantageConstants(norm_by_std=False))),
        Compared(name="turn_credit", estimator=make("turn_credit")),
        Compared(
            name="turn_rloo, turn_discount=0.9", estimator=make("turn_rloo", AdvantageConstants(turn_discount=0.9))
        ),
        Compared(name="mt_grpo", estimator=AdvantageEstimator(compute=mt_grpo_advantages, unit=Unit.TURN)),
        Compared(name="turn_gae, values of 1", estimator=make("turn_gae"), critic=ones),
        Compared(name="turn_gae, values of 1, lambd=0.5", estimator=make("turn_gae", half), critic=ones),
        Compared(name="turn_gae", estimator=make("turn_gae"), critic=perfect),
        Compared(name="turn_gae, lambd=0.5", estimator=make("turn_gae", half), critic=perfect),
        Compared(name="gae, values of 1", estimator=make("gae"), critic=ones),
        Compared(name="gae", estimator=make("gae"), critic=perfect),
        Compared(name="gae, lambd=0.5", estimator=make("gae", half), critic=perfect),
    ]
    return {one.name: one for one in found}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--plot", type=file_to_write, help="draw bias and variance to this picture")
    options = parser.parse_args()
    under, policy = conditions(seed=options.seed), make_policy(options.seed)
    num_estimates = NUM_ESTIMATES // 10 if options.quick else NUM_ESTIMATES
    rows = [measured(policy, one, num_estimates, options.seed) for one in compared(policy).values()]
    figures = {"num_sampled_estimates": num_estimates, "conditions": under}
    if options.plot is not None:
        draw(rows, options.plot)
    report("advantage estimators against the enumerated gradient", figures, rows, options.json, written={"keys": KEYS})
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
