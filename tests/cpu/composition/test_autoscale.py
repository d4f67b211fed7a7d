"""The rule that adds and removes engines: its wishes, and what it does over time with a scripted plan and fleet (stand-ins)."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_async.composition.autoscale import Plan, Steps, autoscaled, follow, planned, wish
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.engine import Autoscale, EngineConfig
from skyrl_async.errors import ConfigError, EngineStartError
from skyrl_async.simulator.clock import run_in_virtual_time


@pytest.mark.parametrize(
    ("steps", "change"),
    [
        pytest.param({2: (1.0, 0.02), 3: (0.8, 0.02), 1: (1.9, 0.02)}, 1, id="a large gain adds one"),
        pytest.param({2: (1.0, 0.2), 3: (0.8, 0.3), 1: (1.9, 0.2)}, 0, id="a gain within the plan's error adds none"),
        pytest.param({2: (1.0, 0.01), 3: (0.95, 0.01), 1: (1.3, 0.01)}, 0, id="a small gain adds none"),
        pytest.param({2: (1.0, 0.01), 3: (1.0, 0.01), 1: (1.01, 0.01)}, -1, id="one that nobody would miss is removed"),
        pytest.param({2: (1.0, 0.01)}, 0, id="at the bounds nothing is done"),
    ],
)
def test_the_rule_adds_for_a_sure_gain_and_removes_what_gains_nothing(steps: Steps, change: int) -> None:
    assert wish(steps, 2).change == change


def test_an_engine_that_was_added_for_its_gain_is_not_removed_by_the_same_figures() -> None:
    steps = {1: (1.0, 0.0), 2: (1 / 1.1001, 0.0)}
    assert wish(steps, 1).change == 1 and wish(steps, 2).change == 0


class FakeFleet:
    """Engines by name."""

    def __init__(self, num: int, *, fails: bool = False) -> None:
        self.names = [f"engine-{i}" for i in range(num)]
        self.client = SimpleNamespace(engines=self.names)
        self.fails = fails
        self.starting: list[str] = []
        self.log: list[tuple[float, str]] = []

    def _note(self, what: str) -> None:
        self.log.append((asyncio.get_running_loop().time(), what))

    async def add_engine(self) -> str:
        self._note("add")
        if self.fails:
            raise EngineStartError("no room")
        self.names.append(f"engine-{len(self.names)}")
        return self.names[-1]

    async def remove_engine(self, name: str) -> None:
        self._note(f"remove {name}")
        self.names.remove(name)

    def rows(self) -> list[dict[str, Any]]:
        rows = [{"name": name, "serving": name, "state": "serving"} for name in self.names]
        return rows + [{"name": name, "serving": None, "state": "starting"} for name in self.starting]


def follow_until(until: float, fleet: FakeFleet, plan: Plan, **settings: Any) -> list[tuple[float, str]]:
    """What happens to the fleet by then, with a plan every 10 s."""
    config = EngineConfig(autoscale=Autoscale.plan, autoscale_interval_s=10.0, **settings)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(until):
                await follow(Path("run"), fleet, config, plan)  # type: ignore[arg-type]

    run_in_virtual_time(main())
    return fleet.log


def followed(fleet: FakeFleet, seconds: dict[int, float], *, until: float, **settings: Any) -> list[tuple[float, str]]:
    """The same where so many engines take so many seconds."""

    async def plan(run_dir: Path, numbers: list[int]) -> Steps:
        return {number: (seconds[number], 0.0) for number in numbers}

    return follow_until(until, fleet, plan, **{"num_engines": len(fleet.names)} | settings)


SATURATING = {1: 4.0, 2: 2.0, 3: 1.4, 4: 1.35, 5: 1.35}


def test_engines_are_added_up_to_where_they_gain_each_after_two_plans() -> None:
    assert followed(FakeFleet(1), SATURATING, until=200, max_engines=5) == [(20.0, "add"), (40.0, "add")]


def test_engines_are_removed_down_to_where_they_are_missed_the_newest_first() -> None:
    log = followed(FakeFleet(5), SATURATING, until=200)
    assert log == [(20.0, "remove engine-4")]
    assert followed(FakeFleet(5), dict.fromkeys(range(7), 1.0), until=200, min_engines=3) == [
        (20.0, "remove engine-4"),
        (40.0, "remove engine-3"),
    ]


def test_it_never_leaves_the_bounds() -> None:
    assert followed(FakeFleet(2), SATURATING, until=100, max_engines=2) == []
    assert followed(FakeFleet(1), dict.fromkeys(range(4), 1.0), until=100) == []


def test_more_engines_than_the_maximum_are_removed_where_nobody_misses_them() -> None:
    log = followed(FakeFleet(4), dict.fromkeys(range(7), 1.0), until=45, num_engines=2)
    assert log == [(20.0, "remove engine-3"), (40.0, "remove engine-2")]


def test_without_a_maximum_it_goes_back_up_to_as_many_engines_as_it_began_with() -> None:
    fleet = FakeFleet(2)

    async def plan(run_dir: Path, numbers: list[int]) -> Steps:
        has_enough = asyncio.get_running_loop().time() < 30  # then answers get longer
        return {number: (1.0 if has_enough else 4.0 / number, 0.0) for number in numbers}

    follow_until(100.0, fleet, plan, num_engines=2)
    assert fleet.log == [(20.0, "remove engine-1"), (40.0, "add")]


@pytest.mark.parametrize("boots", [False, True])
def test_what_was_planned_while_somebody_else_added_an_engine_is_dropped(boots: bool) -> None:
    fleet, asked = FakeFleet(1), list[list[int]]()

    async def plan(run_dir: Path, numbers: list[int]) -> Steps:
        asked.append(numbers)
        if len(asked) == 2 and boots:
            fleet.starting.append("engine-1")
        elif len(asked) == 2:
            await fleet.add_engine()
        return {number: (SATURATING[number], 0.0) for number in numbers}

    follow_until(60.0, fleet, plan, max_engines=2)
    assert fleet.log == ([] if boots else [(20.0, "add")])
    assert len(asked) == (2 if boots else 5), "nothing is planned while an engine boots"


def test_an_engine_more_that_is_refused_leaves_the_plan_of_fewer() -> None:
    fleet = FakeFleet(3)

    async def plan(run_dir: Path, numbers: list[int]) -> Steps:
        if max(numbers) > 3:
            raise ConfigError("engine.num_engines must be <= 3, got 4")
        return dict.fromkeys(numbers, (1.0, 0.0))

    follow_until(25.0, fleet, plan, max_engines=5)
    assert fleet.log == [(20.0, "remove engine-2")]


def test_a_wish_for_one_number_of_engines_is_none_for_another() -> None:
    fleet = FakeFleet(1)

    async def plan(run_dir: Path, numbers: list[int]) -> Steps:
        return {number: (4.0 / number, 0.0) for number in numbers}

    async def main() -> None:
        config = EngineConfig(autoscale=Autoscale.plan, autoscale_interval_s=10.0, max_engines=5)
        following = asyncio.create_task(follow(Path("run"), fleet, config, plan))  # type: ignore[arg-type]
        await asyncio.sleep(15.0)
        await fleet.add_engine()
        await asyncio.sleep(10.0)
        following.cancel()

    run_in_virtual_time(main())
    assert fleet.log == [(15.0, "add")]


def test_an_engine_of_which_the_plan_promises_too_much_is_added_ever_more_rarely() -> None:
    fleet = FakeFleet(1)

    async def plan(run_dir: Path, numbers: list[int]) -> Steps:
        return {number: (0.8 if number > len(fleet.names) else 1.0, 0.0) for number in numbers}

    follow_until(210.0, fleet, plan, max_engines=2)
    assert [time for time, what in fleet.log if what == "add"] == [20.0, 80.0, 180.0]


def test_an_engine_that_died_for_good_is_added_again_after_two_plans() -> None:
    fleet = FakeFleet(1)

    async def plan(run_dir: Path, numbers: list[int]) -> Steps:
        if len(fleet.log) == 1:
            del fleet.names[1:]
        return {number: (4.0 / number, 0.0) for number in numbers}

    follow_until(65.0, fleet, plan, max_engines=2)
    assert fleet.log == [(20.0, "add"), (50.0, "add")]


def test_an_engine_that_cannot_be_started_is_tried_again_after_two_more_plans() -> None:
    assert followed(FakeFleet(1, fails=True), SATURATING, until=65, max_engines=2) == [
        (20.0, "add"),
        (40.0, "add"),
        (60.0, "add"),
    ]


def test_a_plan_that_raises_what_nobody_expects_is_asked_again() -> None:
    asked: list[float] = []

    async def plan(run_dir: Path, numbers: list[int]) -> Steps:
        asked.append(asyncio.get_running_loop().time())
        raise OSError("no process")

    follow_until(35.0, FakeFleet(1), plan)
    assert asked == [10.0, 20.0, 30.0]


@pytest.mark.slow
def test_a_plan_that_fails_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be the directory of a run"):
        asyncio.run(planned(tmp_path, [1, 2], num_groups=8))


def test_a_plan_has_the_groups_in_flight_of_the_run_however_many_engines_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, command = tmp_path / "asked", tmp_path / "python"
    answer = json.dumps({"rows": [{"keys": {"engine.num_engines": 1}, "step_seconds": 2.0, "spread_seconds": 0.5}]})
    command.write_text(f"#!/bin/sh\necho \"$*\" > {asked}\necho '{answer}'\n")
    command.chmod(0o755)
    os.mkfifo(asked)
    monkeypatch.setattr("sys.executable", str(command))
    config = from_overrides("engine.autoscale=plan", "engine.autoscale_interval_s=0.01", "engine.max_engines=2")

    async def main() -> str:
        async with autoscaled(tmp_path, FakeFleet(1), config):  # type: ignore[arg-type]
            return await asyncio.to_thread(asked.read_text)

    words = asyncio.run(main())
    num_groups = config.trainer.max_concurrent_generation_groups(config.num_group_places)
    assert f"--engines 1,2 --json --processes=1 --generation-workers={num_groups}" in words


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.min_engines=3"], r"engine.num_engines must be from min_engines to max_engines \(3 to 1\), got 1"),
        (["engine.num_engines=3", "engine.max_engines=2"], r"\(1 to 2\), got 3"),
        (
            ["engine.autoscale=plan", "engine.backend=deterministic"],
            "engine.backend must be vllm with engine.autoscale=plan",
        ),
        (
            ["engine.autoscale=plan", "placement.groups=[[policy],[generate]]", "placement.ratios=[0.5,0.5]"],
            "engine.autoscale must be none with placement.groups, which fix the number of engines, got plan",
        ),
        (
            ["engine.autoscale=plan", "logging.trace=false"],
            "logging.trace must be true with engine.autoscale=plan, whose plans are made from it, got false",
        ),
    ],
)
def test_bounds_that_the_engines_do_not_fit_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_overrides(*overrides)
