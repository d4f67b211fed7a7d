"""Steps that are scaled or refused by their effective sample size."""

import math
from typing import Any

from skyrl_async.algorithms.guard import Guard
from skyrl_async.config.schema.trainer import GuardConfig
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.run import Simulation, SimulationSettings


def shares(share: float) -> dict[str, float]:
    return {"policy/sequence_ess": share, "policy/ess": 0.9}


def test_a_step_takes_the_square_root_of_its_share_and_none_below_the_least() -> None:
    guard = Guard(scales_lr=True, min_ess=0.2)
    assert [guard.lr_scale(shares(s)) for s in (1.0, 0.25, 0.2, 0.1)] == [1.0, 0.5, math.sqrt(0.2), 0.0]
    assert [Guard(min_ess=0.2).lr_scale(shares(s)) for s in (0.25, 0.1)] == [1.0, 0.0]
    assert Guard(scales_lr=True).lr_scale({}) == Guard().lr_scale(shares(0.01)) == 1.0


def test_groups_of_refused_steps_count_as_trained_and_the_run_goes_on() -> None:
    settings = SimulationSettings(mean_tokens=60.0, num_steps=6, mini_batch_size=4)
    scales: list[float] = []

    async def main() -> Simulation:
        simulation = Simulation(settings)
        config = simulation.trainer._run.config.trainer
        assert config.guard == GuardConfig()
        simulation.trainer._train_stage._guard = Guard(min_ess=0.5)
        forward_backward, step = simulation.policy.forward_backward, simulation.policy.step

        async def of_stale_answers(rows: Any, values: Any, version: int) -> dict[str, Any]:
            sums = await forward_backward(rows, values, version)
            is_bad = version % 2 == 1
            return sums | {
                "sequence_ess_count": 4.0,
                "sequence_ess_weights": 4.0,
                "sequence_ess_squares": 16.0 if is_bad else 4.0,
            }

        async def noted(denominator: float, lr_scale: float) -> dict[str, float]:
            scales.append(lr_scale)
            return await step(denominator, lr_scale)

        simulation.policy.forward_backward, simulation.policy.step = of_stale_answers, noted
        await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    assert scales == [1.0, 0.0] * 3
    assert [values["policy/lr_scale"] for _, values in simulation.logged if "policy/lr_scale" in values] == scales
    assert simulation.staleness.trained_version == 6
