"""Advantages that are computed when a step is put together, in the real loop over modelled engines."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from skyrl_async.algorithms.advantages import AdvantageEstimator, GroupRewards
from skyrl_async.algorithms.crediting import Credit
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.run import SimulationSettings, build_simulation
from skyrl_async.types import Group

SETTINGS = SimulationSettings(mean_tokens=100.0, sigma=0.8, num_steps=6, mini_batch_size=4, step_seconds=0.5)


@pytest.mark.parametrize(("streamed", "num_at_once"), [(False, 4), (True, 1)])
def test_all_groups_of_a_step_are_credited_together_unless_it_streams(streamed: bool, num_at_once: int) -> None:
    seen: list[int] = []
    trained: list[list[Group]] = []

    def compute(groups: Sequence[GroupRewards]) -> list[list[float]]:
        seen.append(len(groups))
        return [[float(index), float(index)] for index, _ in enumerate(groups)]

    async def main() -> None:
        simulation = build_simulation(
            replace(SETTINGS, stream_mini_batch=streamed),
            advantages=None,
            credit=Credit(AdvantageEstimator(of_mini_batch=compute)),
            log_groups=lambda _, groups: trained.append(list(groups)),
        )
        await simulation.trainer.run()

    run_in_virtual_time(main())
    assert seen == [num_at_once] * (6 * 4 // num_at_once)
    for groups in trained:
        assert [group.advantages for group in groups] == [(i % num_at_once,) * 2 for i in range(4)]
        if not streamed:
            assert [g.admission_index for g in groups] == sorted(g.admission_index for g in groups)
