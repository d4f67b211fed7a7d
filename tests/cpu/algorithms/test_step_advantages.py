"""Advantages that are computed when a step is put together, in the real loop over modelled engines."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from skyrl_async.algorithms.advantages import AdvantageEstimator, MaskGroup
from skyrl_async.algorithms.credit import GroupRewards
from skyrl_async.algorithms.step_advantages import StepAdvantages
from skyrl_async.composition.algorithms import Advantages, make_advantages
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KeptGroups
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Group
from tests.cpu.advantage_columns import numbers
from tests.cpu.quick_config import config_of

SETTINGS = SimulationSettings(mean_tokens=100.0, sigma=0.8, num_steps=6, mini_batch_size=4, step_seconds=0.5)


@pytest.mark.parametrize(("streamed", "num_at_once"), [(False, 4), (True, 1)])
def test_all_groups_of_a_step_get_their_advantages_together_unless_it_streams(streamed: bool, num_at_once: int) -> None:
    seen: list[int] = []
    record = KeptGroups()

    class Seen(StepAdvantages):
        def __call__(self, groups: Sequence[Group], *masked: MaskGroup) -> Sequence[Group]:
            seen.append(len(groups))
            return super().__call__(groups, *masked)

    def by_place(groups: Sequence[GroupRewards]) -> list[list[float]]:
        return [[float(index), float(index)] for index, _ in enumerate(groups)]

    estimator = AdvantageEstimator(compute=by_place, needs_mini_batch=True)
    if streamed:
        estimator = AdvantageEstimator(compute=lambda rewards: [0.0] * len(rewards))

    async def main() -> None:
        simulation = Simulation(
            replace(SETTINGS, stream_mini_batch=streamed),
            advantages=Advantages(of_stage=None, of_step=Seen(estimator)),
            record=record,
        )
        await simulation.trainer.run()

    run_in_virtual_time(main())
    assert seen == [num_at_once] * (6 * 4 // num_at_once)
    for step in range(1, 7):
        groups = [group for at, group in record.trained if at == step]
        assert [numbers(group.advantages) for group in groups] == [(i % num_at_once,) * 2 for i in range(4)]
        if not streamed:
            assert [g.admission_index for g in groups] == sorted(g.admission_index for g in groups)


def test_normalised_advantages_are_those_of_a_whole_step_which_is_then_not_streamed() -> None:
    of_step = make_advantages(config_of("trainer.algorithm.advantage_batch_normalize=true").trainer.algorithm).of_step
    assert of_step.need_mini_batch
    made = Advantages(of_stage=AdvantageEstimator(compute=lambda rewards: range(len(rewards))), of_step=of_step)
    record = KeptGroups()

    async def main() -> None:
        await Simulation(replace(SETTINGS, stream_mini_batch=True), advantages=made, record=record).trainer.run()

    run_in_virtual_time(main())
    for step in range(1, 7):
        of_groups = [np.concatenate(group.advantages) for at, group in record.trained if at == step]
        tokens = np.concatenate(of_groups)
        assert (tokens.mean(), tokens.std(ddof=1)) == (pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-5))
        assert max(abs(column.mean()) for column in of_groups) > 0.01, "not of each group"


def test_tokens_that_the_staleness_policy_masks_are_neither_counted_nor_marked() -> None:
    """And what is masked is still counted as that."""
    counted: list[int] = []
    seen: list[list[int]] = []

    def compute(groups: Sequence[GroupRewards]) -> list[list[float]]:
        counted.append(sum(sum(group.num_tokens) for group in groups))
        return [[reward - 0.5 for reward in group.rewards] for group in groups]

    def mark(groups: Sequence[Group]) -> list[Group]:
        """Every token that it is given."""
        seen.append([row.num_sampled_tokens for group in groups for row in group.trajectories])
        return [
            replace(group, trajectories=tuple(replace(row, marks=row.loss_mask) for row in group.trajectories))
            for group in groups
        ]

    async def main() -> Simulation:
        simulation = Simulation(
            replace(
                SETTINGS,
                sigma=1.5,
                num_steps=20,
                max_staleness_steps=1,
                stream_mini_batch=False,
                staleness_policy="mask",
            ),
            advantages=Advantages(
                of_stage=None,
                of_step=StepAdvantages(AdvantageEstimator(compute=compute, needs_mini_batch=True), mark=mark),
            ),
        )
        await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    steps = [[row for group in step for row in group] for step in simulation.policy.steps if step]
    assert simulation.trainer.totals.masked_tokens > 0
    assert seen == [[row.num_sampled_tokens for row in step] for step in steps]
    assert counted == [sum(of_step) for of_step in seen]
    assert sum(counted) == simulation.trainer.totals.trained_tokens
    assert all(np.array_equal(row.marks, row.loss_mask) for step in steps for row in step)
