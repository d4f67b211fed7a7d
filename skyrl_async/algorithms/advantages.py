"""Groups with advantages: rewards in, one advantage per trained token out, as a column of each row.

An estimator (``estimators``) sees neither token ids nor tensors, only a handful of numbers per sample (``credit``), either of one group or
of all groups of a mini-batch. It gives a number per sample, per turn or per token; the configuration names it.

The reward stage computes advantages that depend on one group alone (``rollout.preparation``). ``StepAdvantages`` computes the others, and
marks, when a step is put together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from skyrl_async.algorithms.credit import GroupRewards, SampleCredit, columns_of, constant_column, credit_of
from skyrl_async.algorithms.estimators.gae import returns_of
from skyrl_async.algorithms.settings import AdvantageConstants
from skyrl_async.columns import NO_LOGPROBS, Advantages, Values, is_repeated, repeated
from skyrl_async.errors import ConfigError, TrainingError
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, AdvantageEntry, Unit, path_of
from skyrl_async.samples import Sample, samples_of
from skyrl_async.types import Group

if TYPE_CHECKING:
    from skyrl_async.algorithms.kl import KlPenalty
    from skyrl_async.algorithms.policy_losses import Mark

_KEY = "trainer.algorithm.advantage_estimator"

GroupCredit = GroupRewards | tuple[SampleCredit, ...]
"""One group as an estimator sees it: of samples, or of turns and tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """An estimator: the groups of a mini-batch -> per group and sample a number, or one per turn or token.

    What ``compute`` is called with:

        unit            a group alone                        all groups of a mini-batch (``needs_mini_batch``)
        sample          rewards                              ``GroupRewards`` of each
        turn, token     ``SampleCredit`` of each, constants  the same of each group, constants

    It returns an advantage per sample; with a unit of turn or token a sequence per sample, (K,) or (N,) as ``SampleCredit`` has them. A
    mini-batch gets this per group. Each group has at least one sample.
    """

    compute: Callable[..., Sequence[Any]]
    unit: Unit = Unit.SAMPLE
    needs_mini_batch: bool = False
    needs_values: bool = False
    """Whether it reads a critic's values; groups then get ``returns`` beside advantages."""
    constants: AdvantageConstants = field(default_factory=AdvantageConstants)

    def __call__(self, groups: Sequence[GroupCredit]) -> Sequence[Sequence[Any]]:
        """Return per group and sample what ``compute`` gives."""
        constants = () if self.unit is Unit.SAMPLE else (self.constants,)
        if self.needs_mini_batch:
            return self.compute(groups, *constants) if groups else ()
        return [
            self.compute(group.rewards if isinstance(group, GroupRewards) else group, *constants) for group in groups
        ]

    def sees(self, samples: Sequence[tuple[Sample, Sample]], rewards: Sequence[float]) -> GroupCredit:
        """A group as the estimator sees it: its samples, whole and as they are trained, and what each earned."""
        if self.unit is Unit.SAMPLE:
            return GroupRewards(
                rewards=tuple(rewards), num_tokens=tuple(trained.num_sampled_tokens for _, trained in samples)
            )
        found = tuple(credit_of(*pair, reward) for pair, reward in zip(samples, rewards, strict=True))
        if self.needs_values and any(len(one.values) != sum(one.num_tokens) for one in found):
            raise TrainingError(f"{_KEY} needs trajectories with values, which a critic computes; some have none")
        return found

    def columns(
        self, samples: Sequence[tuple[Sample, Sample]], seen: GroupCredit, found: Sequence[Any]
    ) -> tuple[dict[int, Advantages], dict[int, Values]]:
        """``id`` of each row of a group's samples -> its advantages and returns, (T,) float32, from what ``compute`` gives for ``seen``.

        Returns are empty unless values are read. Raises ``TrainingError`` unless ``found`` is one finite advantage per sample, turn or
        token.
        """
        advantages: dict[int, Advantages] = {}
        returns: dict[int, Values] = {}
        given = self.check(seen, found)
        for index, ((whole, trained), of_sample) in enumerate(zip(samples, given, strict=True)):
            rows = list(map(id, whole.rows))
            if isinstance(seen, GroupRewards):
                advantages |= {id(row): constant_column(row, of_sample.item()) for row in whole.rows}
                continue
            advantages |= dict(zip(rows, columns_of(trained, self.unit, of_sample), strict=True))
            if self.needs_values:
                towards = returns_of(seen[index], self.unit, of_sample, self.constants)
                returns |= dict(zip(rows, columns_of(trained, Unit.TOKEN, towards, math.nan), strict=True))
        return advantages, returns

    def check(self, seen: GroupCredit, found: Sequence[Any]) -> list[NDArray[np.float64]]:
        """What ``compute`` gives for a group, as numbers per sample. Raises ``TrainingError`` unless they are as many as they must be."""
        given = [np.atleast_1d(np.asarray(one, np.float64)) for one in found]
        if [one.shape for one in given] != _shapes(seen, self.unit) or not all(np.isfinite(one).all() for one in given):
            raise TrainingError(
                f"{_KEY} must return one finite advantage per {_per(seen, self.unit)}, got {list(found)}"
            )
        return given


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
) -> list[Group]:
    """Return the groups with an advantage for every token. Abandoned and overlong samples get 0 and are in no baseline.

    Args:
        groups: all groups of a mini-batch if the estimator needs them at once.
        estimator: computes the advantages; not called if no sample is left.
        reward_of: what a sample earned.
        masked_group: leaves out tokens that are not trained.

    Raises:
        TrainingError: the estimator does not return one finite advantage per sample, turn or token.
    """
    lives = [_live_pairs(group, masked_group(group)) for group in groups]
    seen = [estimator.sees(pairs, [reward_of(whole) for whole, _ in pairs]) for pairs in lives if pairs]
    found = iter(zip(seen, estimator(seen), strict=True))
    return [
        _with_columns(group, *(estimator.columns(pairs, *next(found)) if pairs else ({}, {})), estimator.needs_values)
        for group, pairs in zip(groups, lives, strict=True)
    ]


def _live_pairs(group: Group, trained: Group) -> list[tuple[Sample, Sample]]:
    """The samples that are trained and form the baseline, whole and as they are trained."""
    both = zip(samples_of(group.trajectories), samples_of(trained.trajectories), strict=True)
    return [(whole, part) for whole, part in both if whole.is_live]


def _with_columns(
    group: Group, advantages: Mapping[int, Advantages], returns: Mapping[int, Values], has_returns: bool
) -> Group:
    """The group with a column per row; in rows that are not trained advantages are 0 and returns NaN."""

    def columns(of_row: Mapping[int, Advantages], elsewhere: float) -> tuple[Advantages, ...]:
        rows = group.trajectories
        return tuple(of_row[id(row)] if id(row) in of_row else constant_column(row, elsewhere) for row in rows)

    return replace(
        group, advantages=columns(advantages, 0.0), returns=columns(returns, math.nan) if has_returns else ()
    )


def normalised(groups: Sequence[Group], masked_group: MaskGroup = lambda group: group) -> list[Group]:
    """The groups of a mini-batch with advantages of mean 0 and standard deviation 1 over their trained tokens.

    SkyRL's ``advantage_batch_normalize``, and what its and verl's ``gae`` always does; of the standard deviation the unbiased estimate.
    Groups whose tokens all have one advantage get 0.
    """
    masks = [[row.loss_mask for row in masked_group(group).trajectories] for group in groups]
    pairs = [
        pair
        for group, of_group in zip(groups, masks, strict=True)
        for pair in zip(group.advantages, of_group, strict=True)
    ]
    trained = np.concatenate([NO_LOGPROBS, *(column[mask] for column, mask in pairs)]).astype(np.float64)
    if not len(trained):
        return list(groups)
    mean, std = trained.mean(), trained.std(ddof=1) if len(trained) > 1 else 0.0

    def scaled(column: Advantages) -> Advantages:
        if is_repeated(column) and len(column):
            return repeated(float((column[0] - mean) / (std + 1e-8)), len(column))
        return ((column - mean) / (std + 1e-8)).astype(np.float32)

    return [
        replace(
            group,
            advantages=tuple(
                scaled(column) if row.num_sampled_tokens else column
                for row, column in zip(group.trajectories, group.advantages, strict=True)
            ),
        )
        for group in groups
    ]


@dataclass(frozen=True)
class StepAdvantages:
    """Computes advantages that depend on the other groups of the step, or on the KL penalty of the step."""

    estimator: AdvantageEstimator | None = None
    """None if groups have their advantages from the reward stage."""
    penalty: "KlPenalty | None" = None
    """Subtracted from rewards first; None for no penalty."""
    normalises: bool = False
    """Whether advantages are normalised over the mini-batch."""
    mark: "Mark | None" = None
    """Marks tokens afterwards; None if the loss needs no marks."""

    def __call__(self, groups: Sequence[Group], masked_group: MaskGroup = lambda group: group) -> Sequence[Group]:
        """Return groups of one step with advantages and marks. Each group is passed once.

        All groups of a step must be passed in one call if the estimator or the marks depend on all of them. Rewards and the penalty cover
        whole answers; only trained tokens are counted and marked.
        """
        if self.estimator is not None:
            groups = with_advantages(groups, self.estimator, self._reward_of, masked_group)
        if self.normalises:
            groups = normalised(groups, masked_group)
        if self.mark is None:
            return groups
        marked = self.mark([masked_group(group) for group in groups])
        return [_with_marks(*pair) for pair in zip(groups, marked, strict=True)]

    def _reward_of(self, sample: Sample) -> float:
        return sample.shaped_reward if self.penalty is None else self.penalty.penalised(sample)

    def end_step(self) -> dict[str, float]:
        """Called after each optimizer step; returns the figures of its penalty."""
        return {} if self.penalty is None else self.penalty.end_step()

    @property
    def need_mini_batch(self) -> bool:
        """Whether they are computed for all groups of a step at once."""
        return (
            self.normalises or self.mark is not None or (self.estimator is not None and self.estimator.needs_mini_batch)
        )

    @property
    def kl_coef(self) -> float | None:
        """Coefficient of the penalty in the next step, for checkpoints; None without a penalty."""
        return None if self.penalty is None else self.penalty.controller.coefficient

    def restore(self, kl_coef: float | None) -> None:
        """Restore a checkpoint's coefficient if it follows a target. A fixed coefficient always comes from the configuration."""
        if kl_coef is not None and self.penalty is not None and self.penalty.controller.target is not None:
            self.penalty.controller.coefficient = kl_coef


def _with_marks(group: Group, marked: Group) -> Group:
    rows = zip(group.trajectories, marked.trajectories, strict=True)
    return replace(group, trajectories=tuple(replace(row, marks=of.marks) for row, of in rows))


def make_advantage_estimator(name: str, constants: AdvantageConstants | None = None) -> AdvantageEstimator:
    """Return the estimator called ``name``, or at the path ``name``. Raises ``ConfigError`` with the known names.

    ``grpo`` without ``norm_by_std`` is ``dr_grpo``.
    """
    constants = constants or AdvantageConstants()
    entry = ADVANTAGE_ESTIMATORS.entry("dr_grpo" if name == "grpo" and not constants.norm_by_std else name)
    return AdvantageEstimator(
        compute=ADVANTAGE_ESTIMATORS.load(entry),
        unit=entry.unit,
        needs_mini_batch=entry.needs_mini_batch,
        needs_values=entry.needs_values,
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
            values, and returns what was earned less the value, so that values are trained towards the sum (``estimators.gae``).

    Raises:
        ConfigError: the function is not at the top of a module that can be imported, or there is no such unit.
    """
    if unit not in list(Unit):
        raise ConfigError(f"unit must be one of {', '.join(Unit)}, got {unit!r}")
    if unit == Unit.SAMPLE and needs.get("needs_values"):
        raise ConfigError(f"unit must be turn or token with needs_values=True, got {unit!r}: values are of tokens")

    def register(function: F) -> F:
        entry = AdvantageEntry(path=path_of(function), unit=Unit(unit), needs_groups=needs_groups, **needs)
        ADVANTAGE_ESTIMATORS.register(name, entry)
        return function

    return register
