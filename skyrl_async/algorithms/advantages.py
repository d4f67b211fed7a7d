"""Groups with advantages: rewards in, one advantage per trained token out, as a column of each row.

An estimator (``estimators``) sees neither token ids nor tensors, only a handful of numbers per sample (``credit``), either of one group or
of all groups of a mini-batch. It gives a number per sample, per turn or per token; the configuration names it.

The reward stage computes advantages that depend on one group alone (``rollout.preparation``), ``step_advantages`` the others.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from skyrl_async.algorithms.credit import (
    GroupRewards,
    SampleCredit,
    WeightedAdvantages,
    columns_of,
    constant_column,
    credit_of,
    returns_of,
)
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.columns import Advantages, Values, Weights
from skyrl_async.errors import ConfigError, TrainingError
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, AdvantageEntry, Unit, path_of
from skyrl_async.samples import Sample, samples_of
from skyrl_async.types import Group

if TYPE_CHECKING:
    from skyrl_async.algorithms.history import PromptRewards

_KEY = "trainer.algorithm.advantage_estimator"

GroupCredit = GroupRewards | tuple[SampleCredit, ...]
"""One group as an estimator sees it: of samples, or of turns and tokens."""


@dataclass(slots=True, kw_only=True)
class _Columns:
    """What the rows of a group get: ``id`` of a row -> (T,) float32."""

    advantages: dict[int, Advantages] = field(default_factory=dict)
    returns: dict[int, Values] = field(default_factory=dict)
    weights: dict[int, Weights] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """An estimator: the groups of a mini-batch -> per group and sample a number, or one per turn or token.

    What ``compute`` is called with:

        unit            a group alone                        all groups of a mini-batch (``needs_mini_batch``)
        sample          rewards, and baseline if needed      ``GroupRewards`` of each
        turn, token     ``SampleCredit`` of each, constants  the same of each group, constants

    It returns an advantage per sample; with a unit of turn or token a sequence per sample, (K,) or (N,) as ``SampleCredit`` has them. A
    mini-batch gets this per group. Each group has at least one sample. ``WeightedAdvantages`` in place of a sample's advantages weighs its
    tokens, too.
    """

    compute: Callable[..., Sequence[Any]]
    unit: Unit = Unit.SAMPLE
    needs_mini_batch: bool = False
    needs_values: bool = False
    """Whether it reads a critic's values; groups then get ``returns`` beside advantages."""
    needs_baseline: bool = False
    """Whether it reads what earlier samples of the prompt earned."""
    needs_old_logprobs: bool = False
    """Whether it reads recomputed log-probs; with values it also gets those that V-trace asks for."""
    constants: AdvantageConstants = field(default_factory=AdvantageConstants)

    def __call__(self, groups: Sequence[GroupCredit]) -> Sequence[Sequence[Any]]:
        """Return per group and sample what ``compute`` gives."""
        constants = () if self.unit is Unit.SAMPLE else (self.constants,)
        if self.needs_mini_batch:
            return self.compute(groups, *constants) if groups else ()
        return [self.compute(*self._arguments(group), *constants) for group in groups]

    def _arguments(self, group: GroupCredit) -> tuple[Any, ...]:
        if not isinstance(group, GroupRewards):
            return (group,)
        return (group.rewards, group.baseline) if self.needs_baseline else (group.rewards,)

    def sees(
        self, samples: Sequence[tuple[Sample, Sample]], rewards: Sequence[float], baseline: float = 0.0
    ) -> GroupCredit:
        """A group as the estimator sees it: its samples, whole and as they are trained, what each earned, and the prompt's baseline."""
        if self.unit is Unit.SAMPLE:
            num_tokens = tuple(trained.num_sampled_tokens for _, trained in samples)
            given = baseline if self.needs_baseline else None
            return GroupRewards(rewards=tuple(rewards), num_tokens=num_tokens, baseline=given)
        found = tuple(credit_of(*pair, reward) for pair, reward in zip(samples, rewards, strict=True))
        if self.needs_values and any(one.values is None for one in found):
            raise TrainingError(f"{_KEY} needs trajectories with values, which a critic computes; some have none")
        if self.needs_old_logprobs and any(one.log_ratios is None for one in found):
            raise TrainingError(
                f"{_KEY} needs trajectories with old_logprobs, which the stage logp computes; some have none"
            )
        if self.needs_values:
            return found
        unasked: dict[str, Any] = {"values": None} if self.needs_old_logprobs else {"values": None, "log_ratios": None}
        return tuple(replace(one, **unasked) for one in found)

    def columns(self, samples: Sequence[tuple[Sample, Sample]], seen: GroupCredit, found: Sequence[Any]) -> _Columns:
        """The columns of the rows of a group's samples, from what ``compute`` gives for ``seen``.

        Returns are empty unless values are read. Raises ``TrainingError`` as ``check``.
        """
        made = _Columns()
        given = self.check(seen, found)
        for index, ((whole, trained), (advantages, weights)) in enumerate(zip(samples, given, strict=True)):
            made.advantages |= self._by_row(whole, trained, advantages)
            if weights is not None:
                made.weights |= self._by_row(whole, trained, weights)
            if self.needs_values:
                assert not isinstance(seen, GroupRewards), "values are of tokens"
                towards = returns_of(seen[index], self.unit, advantages, self.constants.vtrace_clip)
                columns = columns_of(trained, Unit.TOKEN, towards, math.nan)
                made.returns |= dict(zip(map(id, whole.rows), columns, strict=True))
        return made

    def _by_row(self, whole: Sample, trained: Sample, given: NDArray[np.float64]) -> dict[int, NDArray[np.float32]]:
        """``id`` of each row of a sample -> its column, from a number per unit."""
        if self.unit is Unit.SAMPLE:
            return {id(row): constant_column(row, given.item()) for row in whole.rows}
        return dict(zip(map(id, whole.rows), columns_of(trained, self.unit, given), strict=True))

    def check(
        self, seen: GroupCredit, found: Sequence[Any]
    ) -> list[tuple[NDArray[np.float64], NDArray[np.float64] | None]]:
        """Advantages and weights per sample, from what ``compute`` gives for a group; None: it gives no weights.

        Raises ``TrainingError`` unless they are as many as they must be, and finite, and no weight is negative.
        """
        given = [
            (_numbers(one.advantages), _numbers(one.weights))
            if isinstance(one, WeightedAdvantages)
            else (_numbers(one), None)
            for one in found
        ]
        shapes = _shapes(seen, self.unit)
        if [one.shape for one, _ in given] != shapes or not all(np.isfinite(one).all() for one, _ in given):
            raise TrainingError(
                f"{_KEY} must return one finite advantage per {_per(seen, self.unit)}, got {list(found)}"
            )
        for (_, weights), shape in zip(given, shapes, strict=True):
            if weights is not None and not (weights.shape == shape and ((weights >= 0) & np.isfinite(weights)).all()):
                raise TrainingError(
                    f"{_KEY} must return one finite weight >= 0 per {_per(seen, self.unit)}, if any, got {list(found)}"
                )
        return given


def _numbers(given: Any) -> NDArray[np.float64]:
    return np.atleast_1d(np.asarray(given, np.float64))


def _shapes(seen: GroupCredit, unit: Unit) -> list[tuple[int]]:
    """How many advantages an estimator owes each sample."""
    if isinstance(seen, GroupRewards):
        return [(1,)] * len(seen.rewards)
    return [(len(one.rewards) if unit is Unit.TURN else sum(one.num_tokens),) for one in seen]


def _per(seen: GroupCredit, unit: Unit) -> str:
    """What an estimator owes an advantage for, in words."""
    if isinstance(seen, GroupRewards):
        return f"reward of {list(seen.rewards)}"
    return f"{unit} of samples that have {' and '.join(str(num) for (num,) in _shapes(seen, unit))}"


MaskGroup = Callable[[Group], Group]
"""A group -> the group with the tokens masked that the staleness policy leaves out."""


def with_advantages(
    groups: Sequence[Group],
    estimator: AdvantageEstimator,
    reward_of: Callable[[Sample], float] = lambda sample: sample.shaped_reward,
    masked_group: MaskGroup = lambda group: group,
    history: "PromptRewards | None" = None,
) -> list[Group]:
    """Return the groups with an advantage for every token, and a weight where the estimator gives weights.

    Abandoned and overlong samples get advantages of 0 and are in no baseline.

    Args:
        groups: all groups of a mini-batch if the estimator needs them at once.
        estimator: computes the advantages; not called if no sample is left.
        reward_of: what a sample earned.
        masked_group: leaves out tokens that are not trained.
        history: gives baselines, and gets what the groups earned; None: baselines are 0.

    Raises:
        TrainingError: the estimator does not return one finite advantage per sample, turn or token, or weights that are not as many.
    """
    lives = [_live_pairs(group, masked_group(group)) for group in groups]
    seen = []
    for group, pairs in zip(groups, lives, strict=True):
        if pairs:
            rewards = [reward_of(whole) for whole, _ in pairs]
            seen.append(estimator.sees(pairs, rewards, history.baseline(group.uid) if history else 0.0))
            if history:
                history.add(group.admission_index, group.uid, rewards)
    found = iter(zip(seen, estimator(seen), strict=True))
    return [
        _with_columns(group, estimator.columns(pairs, *next(found)) if pairs else _Columns(), estimator.needs_values)
        for group, pairs in zip(groups, lives, strict=True)
    ]


def _live_pairs(group: Group, trained: Group) -> list[tuple[Sample, Sample]]:
    """The samples that are trained and form the baseline, whole and as they are trained."""
    both = zip(samples_of(group.trajectories), samples_of(trained.trajectories), strict=True)
    return [(whole, part) for whole, part in both if whole.is_live]


def _with_columns(group: Group, made: _Columns, has_returns: bool) -> Group:
    """The group with a column per row; in rows that are not trained advantages are 0 and returns NaN, and nothing is weighed."""

    def columns(of_row: dict[int, Advantages], elsewhere: float) -> tuple[Advantages, ...]:
        rows = group.trajectories
        return tuple(of_row[id(row)] if id(row) in of_row else constant_column(row, elsewhere) for row in rows)

    weighed = [(row, made.weights.get(id(row))) for row in group.trajectories]
    return replace(
        group,
        trajectories=tuple(
            row if weights is row.token_weights else replace(row, token_weights=weights) for row, weights in weighed
        ),
        advantages=columns(made.advantages, 0.0),
        returns=columns(made.returns, math.nan) if has_returns else (),
    )


def make_advantage_estimator(name: str, constants: AdvantageConstants | None = None) -> AdvantageEstimator:
    """Return the estimator called ``name``, or at the path ``name``. Raises ``ConfigError`` with the known names.

    Our ``grpo`` without ``norm_by_std`` is ``dr_grpo``.
    """
    constants = constants or AdvantageConstants()
    is_centred_alone = name == "grpo" and ADVANTAGE_ESTIMATORS.is_builtin(name) and not constants.norm_by_std
    entry = ADVANTAGE_ESTIMATORS.entry("dr_grpo" if is_centred_alone else name)
    return AdvantageEstimator(
        compute=ADVANTAGE_ESTIMATORS.load(entry),
        unit=entry.unit,
        needs_mini_batch=entry.needs_mini_batch,
        needs_values=entry.needs_values,
        needs_baseline=entry.needs_baseline,
        needs_old_logprobs=entry.needs_old_logprobs,
        constants=constants,
    )


F = TypeVar("F", bound=Callable[..., object])


def register_advantage_estimator(
    name: str, *, unit: Unit | str = Unit.SAMPLE, needs_groups: bool = True, **needs: bool
) -> Callable[[F], F]:
    """Decorator: let ``trainer.algorithm.advantage_estimator=name`` mean the decorated function.

    ``AdvantageEstimator`` says what the function is called with, and returns.

    Args:
        name: without a colon; a known name is replaced.
        unit: what the function gives advantages for: ``sample``, ``turn`` or ``token``.
        needs_groups: a prompt's only sample has no advantage; ``generator.n_samples_per_prompt=1`` is refused.
        needs: ``needs_mini_batch``: the function takes all groups of a mini-batch, not one group. ``needs_values``: it reads a critic's
            values, and returns per token or turn what was earned from it on less the value before it; the value is trained towards itself
            plus the weight of V-trace times that advantage (``credit.returns_of``). ``needs_baseline``: it takes (rewards, baseline), the
            mean of what earlier samples of the prompt earned. ``needs_old_logprobs``: it reads ``SampleCredit.log_ratios``.

    Raises:
        ConfigError: the function is not at the top of a module that can be imported, or there is no such unit.
    """
    if unit not in list(Unit):
        raise ConfigError(f"unit must be one of {', '.join(Unit)}, got {unit!r}")
    for need, what in (("needs_values", "values"), ("needs_old_logprobs", "log-probs")):
        if unit == Unit.SAMPLE and needs.get(need):
            raise ConfigError(f"unit must be turn or token with {need}=True, got {unit!r}: {what} are of tokens")

    def register(function: F) -> F:
        entry = AdvantageEntry(path=path_of(function), unit=Unit(unit), needs_groups=needs_groups, **needs)
        ADVANTAGE_ESTIMATORS.register(name, entry)
        return function

    return register
