"""What a run says of its stages, in virtual time: items that went through each."""

from collections import Counter
from dataclasses import replace

import pytest

from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation
from skyrl_async.types import GroupRequest, Trajectory
from tests.cpu.test_trainer_stages import SLOW_PUBLISH, run

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
