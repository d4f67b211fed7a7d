"""Steps that are scaled or refused by their effective sample size."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_async.algorithms.guard import Guard
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.trainer import GuardConfig
from skyrl_async.record.ended import Outcome
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KeptGroups
from skyrl_async.simulator.run import Simulation, SimulationSettings
from tests.cpu.trainer.test_critic import weights_after_each_step
from tests.cpu.trainer.test_deterministic_run import NUM_STEPS, Job, Running, policy_dir, train

__all__ = ["policy_dir"]


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
    kept = KeptGroups()

    async def main() -> Simulation:
        simulation = Simulation(settings, record=kept)
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
    assert simulation.logged[-1][1]["policy/refused_steps"] == simulation.trainer.totals.summary()["refused_steps"] == 3
    refused = {ended.step: ended.reason for ended in kept.ended if ended.outcome is Outcome.TRAINED}
    assert [refused[step] for step in (1, 2)] == [None, "trainer.guard.min_ess refused the step"]


LR = 1e-2
"""Of the job: so high that stale answers are worth some four fifths of fresh ones."""


@pytest.mark.slow
@pytest.mark.parametrize("override", ["scale_lr_by_ess=true", "min_ess=0.83"])
def test_a_key_of_the_guard_reaches_the_optimizer_and_no_group_of_a_refused_step_is_lost(
    policy_dir: Path, tmp_path: Path, override: str
) -> None:
    runs: list[Running] = []
    weights: list[list[torch.Tensor]] = []
    rates: list[float] = []

    def before(running: Running) -> None:
        runs.append(running)
        weights.append(weights_after_each_step(running.policy))
        optimizer: Any = running.policy._rank._backend._optimizer  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))

    guard = from_overrides(f"trainer.guard.{override}").trainer.guard
    train(Job(max_staleness_steps=2, guard=guard), policy_dir, tmp_path, before)
    steps = [values for values in runs[0].logged if "policy/loss" in values]
    shares = [values["policy/sequence_ess"] for values in steps]
    scales = [math.sqrt(share) if guard.scale_lr_by_ess else float(share >= guard.min_ess) for share in shares]
    assert min(scales) < 0.95 < max(scales)
    assert [values["policy/lr_scale"] for values in steps] == scales
    assert [values["policy/lr"] for values in steps] == [LR * scale for scale in scales]
    assert rates == [LR * scale for scale in scales if scale]
    assert [not torch.equal(*pair) for pair in pairwise(weights[0])] == [scale > 0 for scale in scales]
    assert runs[0].staleness.trained_version == NUM_STEPS
    assert runs[0].dataloader.statistics()["trained_total"] == runs[0].trainer.totals.trained_groups == 3 * NUM_STEPS
