"""What a run says of its stages, in virtual time: items that went through each, and what validation costs training."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.overlap import OverlapThroughput
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.runtime.stages import StageState
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation
from skyrl_async.types import Trajectory
from tests.cpu.trainer.test_trainer_stages import SLOW_PUBLISH, run

ONE_EPOCH = replace(SLOW_PUBLISH, num_steps=None, num_epochs=1, num_prompts=18)


def items_of(simulation: Simulation) -> dict[str, float]:
    """By stage, of all steps."""
    items: Counter[str] = Counter()
    for _, values in simulation.logged:
        items.update({name.split("/")[1]: value for name, value in values.items() if name.endswith("/items")})
    return items


@pytest.mark.parametrize("bound", [0, 2])
def test_every_group_is_an_item_of_each_stage_once(bound: int) -> None:
    simulation, _ = run(replace(ONE_EPOCH, max_staleness_steps=bound))
    assert sum(map(len, simulation.policy.steps)) == 18
    items = items_of(simulation)
    groups = ("dataloader", "generate", "rollout", "reward", "train")
    assert {stage: items[stage] for stage in groups} == dict.fromkeys(groups, 18)
    assert items["param_update"] == 4, "the fifth version is through when it is logged"


def test_a_group_that_failed_is_drawn_and_goes_through_no_other_stage() -> None:
    class Refusing:
        def __init__(self, client: InferenceEngineClient) -> None:
            self._generator = ModelledGenerator(client)

        async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
            if request.prompt.uid in ("p3", "p5"):
                raise RuntimeError("no")
            return await self._generator.generate(request)

    simulation, _ = run(ONE_EPOCH, generator_over=Refusing)
    assert simulation.workers.counts["failed_groups"] == 2
    items = items_of(simulation)
    groups = ("generate", "rollout", "reward", "train")
    assert {stage: items[stage] for stage in groups} == dict.fromkeys(groups, 16)
    assert items["dataloader"] == 18


VALIDATING_EACH_STEP = replace(
    SLOW_PUBLISH,
    mini_batch_size=16,
    sigma=0.0,
    eval_interval_steps=1,
    num_eval_prompts=12,
    **dict.fromkeys(("seconds_per_token", "step_seconds", "send_seconds", "load_seconds"), 0.0),
)


@pytest.mark.parametrize("slowdown", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_cost_of_validation_is_measured_even_if_it_runs_beside_every_step(slowdown: int) -> None:
    """Groups are there long before; each takes 0.2 s alone, 16 of them a step, of which the first second is validation."""

    async def main() -> Simulation:
        simulation = Simulation(VALIDATING_EACH_STEP)
        trainer, forward_backward = simulation.trainer, simulation.policy.forward_backward

        async def slowed(rows: Sequence[Trajectory], *rest: Any) -> dict[str, float]:
            for _ in range(sum(row.num_sampled_tokens for row in rows) // 10):
                (validation,) = (stage for stage in trainer.stages() if stage.name == "validation")
                await asyncio.sleep(0.01 * (slowdown if validation.state is StageState.PROCESSING else 1))
            return await forward_backward(rows, *rest)

        simulation.policy.forward_backward = slowed
        await trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    shares = [values["stage/validation/processing_frac"] for _, values in simulation.logged if "policy/lr" in values]
    assert all(0.15 < share < 0.4 for share in shares[1:]), "a part of each step"
    assert simulation.trainer.throughput_beside_validation == pytest.approx(1 / slowdown, rel=0.1)


def test_waiting_that_every_token_causes_counts_as_its_cost() -> None:
    """As for log-probs of the reference that the same workers compute: in ``train`` they would cost as much."""

    async def main() -> float | None:
        loop = asyncio.get_running_loop()
        throughput = OverlapThroughput(lambda: min(max(loop.time() - 100.0, 0.0), 100.0))
        throughput.lap()
        while loop.time() < 300.0:
            with throughput.piece(10):
                await asyncio.sleep(0.1)
                await asyncio.sleep(0.3 if 100.0 <= loop.time() < 200.0 else 0.1)
            throughput.lap()
        return throughput.ratio

    assert run_in_virtual_time(main()) == pytest.approx(1 / 2, rel=0.01)


@pytest.mark.slow
def test_time_in_which_checkpoints_are_written_counts_neither_as_beside_validation_nor_as_without(
    tmp_path: Path,
) -> None:
    """They are written just before the held-out prompts are played: training without these would look slow."""

    async def main() -> float | None:
        job = replace(VALIDATING_EACH_STEP, seconds_per_token=0.2 / 100, checkpoint_interval_steps=2)
        simulation = Simulation(job, checkpoint_dir=tmp_path)
        save = simulation.policy.save

        async def slow(directory: Path) -> None:
            await asyncio.sleep(10.0)
            await save(directory)

        simulation.policy.save = slow  # type: ignore[method-assign]
        await simulation.trainer.run()
        return simulation.trainer.throughput_beside_validation

    assert run_in_virtual_time(main()) == pytest.approx(1.0, rel=0.1)


def test_training_that_waits_for_its_devices_processes_nothing() -> None:
    job = replace(
        SLOW_PUBLISH,
        mean_tokens=1000.0,
        max_staleness_steps=2,
        seconds_per_token=2e-4,
        shared_by=(("policy", "generate"),),
        min_generation_slice_s=5.0,
    )

    async def main() -> None:
        simulation = Simulation(job)
        await simulation.run()
        stage = simulation.trainer._run.board.stage("train")
        assert simulation.device_groups["policy"].statistics().seconds_waited["policy"] > 10.0
        assert stage.statistics()["processing_seconds"] == pytest.approx(simulation.trainer.totals.train_seconds)

    run_in_virtual_time(main())


@pytest.mark.parametrize("validates_only", [False, True])
def test_evaluations_before_and_after_training_are_items_of_the_validation_stage(validates_only: bool) -> None:
    """And without training, too: whoever looks meanwhile sees what the run is at."""

    async def main() -> None:
        simulation = Simulation(replace(SLOW_PUBLISH, num_eval_prompts=8, eval_only=validates_only))
        trainer = simulation.trainer
        evaluate, seen = trainer._validation._evaluator.evaluate, []

        async def watched(num_prompts: int, **arguments: Any) -> Any:
            result = await evaluate(num_prompts, **arguments)
            seen.append([status.where for status in trainer.stages() if status.name == "validation"])
            return result

        trainer._validation._evaluator.evaluate = watched  # type: ignore[union-attr, method-assign]
        await trainer.run()
        versions = [0] if validates_only else [0, SLOW_PUBLISH.num_steps]
        assert [where.partition(" (")[0] for (where,) in seen] == [f"processing version {v}" for v in versions]
        statistics = trainer._run.board.stage("validation").statistics()
        assert statistics["items"] == len(versions) and statistics["processing_seconds"] > 0
        assert trainer.stages()[-1].state is StageState.DONE

    run_in_virtual_time(main())
