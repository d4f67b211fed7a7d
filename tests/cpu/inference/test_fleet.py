"""The fleet over modelled engines that die, freeze and refuse, in virtual time, under the real loop (contracts 4, 5 and 6)."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyrl_async.checkpoint.checkpointer import Checkpointer, TrainerState, read_state
from skyrl_async.config.schema.engine import EngineConfig
from skyrl_async.errors import EngineStartError, InferenceError, NoEngineError, PublishError, WeightsWriteError
from skyrl_async.inference.engine_life import EngineLife, EngineState
from skyrl_async.inference.fleet import Fleet
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.metrics.trace import Trace
from skyrl_async.metrics.trace_parts import read_spans
from skyrl_async.runtime.heartbeat import Heartbeat, Silence
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.faults import FaultyEngine
from skyrl_async.simulator.models import ModelledEngine
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import Group, PauseMode, WeightUpdate

ENGINES = EngineConfig(
    heartbeat_interval_s=5.0, heartbeat_timeout_s=20.0, max_restarts=3, restart_backoff_s=1.0, no_engine_timeout_s=900.0
)
BOOT_SECONDS = 30.0
RUN = SimulationSettings(
    mini_batch_size=4,
    max_staleness_steps=2,
    num_steps=30,
    num_prompts=40,
    num_engines=2,
    mean_tokens=300,
    seconds_per_token=0.0005,
    step_seconds=1.0,
    load_seconds=0.25,
    send_seconds=0.5,
    engine_wait_s=None,
)


class Setting:
    """A simulated run, its fleet, and every engine that there ever was."""

    def __init__(
        self, settings: SimulationSettings = RUN, config: EngineConfig = ENGINES, *, path: Path | None = None
    ) -> None:
        self.engines: dict[str, FaultyEngine] = {}
        self.simulation = Simulation(settings, checkpoint_dir=path, engine_around=self._around)
        self.lines: list[str] = []
        self.starts: list[tuple[float, str]] = []
        self.make: Callable[[str], FaultyEngine] = self._new_engine
        self.fleet = Fleet(self.simulation.client, start=self._start, config=config, say=self.lines.append)

    def __getitem__(self, name: str) -> FaultyEngine:
        return self.engines[name]

    @property
    def serving(self) -> list[str]:
        return [engine.name for engine in self.simulation.client.engines]

    async def run(self, *events: Awaitable[None]) -> None:
        """Train to the end while things happen."""

        async def happen(event: Awaitable[None]) -> None:
            await event

        async with self.fleet.supervising(), asyncio.TaskGroup() as tasks:
            happening = [tasks.create_task(happen(event)) for event in events]
            try:
                await self.simulation.trainer.run()
            finally:
                for task in happening:
                    task.cancel()

    async def at(self, seconds: float, *calls: Callable[[], None]) -> None:
        await asyncio.sleep(seconds - asyncio.get_running_loop().time())
        for call in calls:
            call()

    def _around(self, engine: ModelledEngine) -> FaultyEngine:
        return self.engines.setdefault(engine.name, FaultyEngine(engine))

    def _new_engine(self, name: str) -> FaultyEngine:
        model = self.simulation.engines[0]
        return FaultyEngine(ModelledEngine(name, num_tokens_of=model.num_tokens_of, load_seconds=0.25))

    async def _start(self, name: str) -> InferenceEngine:
        self.starts.append((asyncio.get_running_loop().time(), name))
        await asyncio.sleep(BOOT_SECONDS)
        self.engines[name] = self.make(name)
        return self.engines[name]


def all_is_trained(simulation: Simulation, config: SimulationSettings = RUN) -> None:
    assert config.num_steps is not None
    assert simulation.trainer.totals.trained_groups == config.num_steps * config.mini_batch_size
    assert simulation.workers.counts["failed_groups"] == simulation.workers.counts["retries"] == 0
    assert simulation.trainer.totals.groups_over_bound == 0


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_an_engine_that_dies_or_freezes_is_replaced_by_one_of_the_current_version_while_training_goes_on(
    fault: str, tmp_path: Path
) -> None:
    async def main() -> None:
        setting = Setting()
        setting.fleet.trace = Trace(tmp_path, asyncio.get_running_loop().time)
        steps_before = 0

        async def look() -> None:
            nonlocal steps_before
            await setting.at(20.0, getattr(setting["engine-0"], fault))
            steps_before = setting.simulation.trainer.served_version
            await setting.at(20.0 + ENGINES.heartbeat_timeout_s + 2 * ENGINES.heartbeat_interval_s + 0.1)
            assert setting.serving == ["engine-1"] and setting["engine-0"].is_dead
            assert setting.fleet.states()["engine-0"] is EngineState.restarting
            await asyncio.sleep(BOOT_SECONDS + 2.0)
            assert setting.serving == ["engine-1", "engine-0.1"]
            version = setting.simulation.client.policy_version
            assert await setting["engine-0.1"].version() in (version, version + 1)
            assert version > steps_before + 3, "training goes on beside a boot"

        await setting.run(look())
        all_is_trained(setting.simulation)
        versions = {await setting[name].checksum() for name in setting.serving if not setting[name].is_dead}
        assert versions <= {f"version-{RUN.num_steps}"}
        assert setting.fleet.statistics()["engines/restarts"] == 1
        assert setting.lines == []
        assert (setting.fleet.statistics()["engines/heartbeats_missed"] > 0) == (fault == "freeze")
        setting.fleet.trace.close()

    run_in_virtual_time(main())
    death, restart = read_spans(tmp_path)
    assert (death.name, restart.name, death.track) == ("death", "restart", "engines/engine-0")
    assert death.begin == death.end == restart.begin < restart.end - BOOT_SECONDS


def test_a_heartbeat_within_its_time_keeps_an_engine_and_is_counted_as_missed() -> None:
    async def main() -> None:
        setting = Setting()

        async def hiccup() -> None:
            await setting.at(21.0, setting["engine-0"].freeze)
            await setting.at(36.0, setting["engine-0"]._moving.set)

        await setting.run(hiccup())
        all_is_trained(setting.simulation)
        statistics = setting.fleet.statistics()
        assert (statistics["engines/serving"], statistics["engines/restarts"]) == (2, 0)
        assert 2 <= statistics["engines/heartbeats_missed"] <= 3

    run_in_virtual_time(main())


def test_without_any_engine_the_run_waits_says_so_once_and_goes_on_with_the_next() -> None:
    async def main() -> None:
        setting = Setting()
        steps: list[int] = []

        async def look() -> None:
            await setting.at(20.0, setting["engine-0"].kill, setting["engine-1"].kill)
            await asyncio.sleep(BOOT_SECONDS - 1)
            steps.append(setting.simulation.trainer.served_version)
            await asyncio.sleep(60.0)
            steps.append(setting.simulation.trainer.served_version)

        await setting.run(look())
        assert steps[1] > steps[0] + 3
        all_is_trained(setting.simulation)
        waits, goes_on = (line.partition(",")[0] for line in setting.lines)
        assert waits == "no inference engine is left: generation and weight updates wait for one"
        assert goes_on in ("engine-0.1 serves: generation goes on", "engine-1.1 serves: generation goes on")
        assert setting.simulation.trainer.totals.failed_groups == 0

    run_in_virtual_time(main())


def test_an_outage_does_not_count_against_a_rollout() -> None:
    """It takes thrice as long as a rollout may, before which and after which nobody took half of that."""
    config = replace(
        RUN, mean_tokens=100, rollout_timeout_s=BOOT_SECONDS / 3, num_eval_prompts=8, eval_interval_steps=1
    )

    async def main() -> None:
        setting = Setting(config)
        await setting.run(setting.at(20.0, setting["engine-0"].kill, setting["engine-1"].kill))
        all_is_trained(setting.simulation, config)
        assert len(setting.lines) == 2
        failed = [values["eval/failed_prompts"] for _, values in setting.simulation.logged if "reward/eval" in values]
        assert len(failed) > 3 and not any(failed)

    run_in_virtual_time(main())


def test_after_the_deadline_without_engines_the_run_ends_with_a_checkpoint_from_which_it_goes_on(
    tmp_path: Path,
) -> None:
    config = replace(RUN, checkpoint_interval_steps=7, num_steps=None, num_epochs=1)

    async def fail() -> int:
        setting = Setting(config, replace(ENGINES, no_engine_timeout_s=50.0), path=tmp_path)

        def fails(name: str) -> FaultyEngine:
            raise EngineStartError(f"{name} has no memory")

        setting.make = fails
        with pytest.raises(NoEngineError, match="no inference engine came back within engine.no_engine_timeout_s=50"):
            await setting.run(setting.at(20.0, setting["engine-0"].kill, setting["engine-1"].freeze))
        step = setting.simulation.trainer.trained_version
        latest = Checkpointer(tmp_path, max_to_keep=0).usable().path
        assert latest is not None
        saved = read_state(latest)
        assert saved.step == step > 1 and step % 7
        num_open = saved.next_admission_index - 4 * step
        assert len(saved.running) == num_open - len(saved.groups) > 0 and all(group.num_kept for group in saved.running)
        assert sum(group.num_sampled_tokens for group in saved.running) > 100
        assert saved.totals["wasted_tokens"] == 0, "they are kept"
        return step

    async def go_on() -> None:
        setting = Setting(config)
        latest = Checkpointer(tmp_path, max_to_keep=0).usable().path
        assert latest is not None
        await setting.simulation.trainer.resume(latest)
        await setting.run()
        assert setting.simulation.dataloader.statistics()["trained_total"] == 40
        totals = setting.simulation.trainer.totals
        assert (totals.trained_groups, totals.restarted_trajectories, totals.wasted_tokens) == (40, 0, 0)
        assert totals.resumed_trajectories >= 2 and totals.generated_tokens == totals.trained_tokens

    run_in_virtual_time(fail())
    run_in_virtual_time(go_on())


def test_a_version_that_no_engine_is_left_to_serve_is_in_the_checkpoint(tmp_path: Path) -> None:
    config = replace(RUN, checkpoint_interval_steps=100)

    async def main() -> None:
        setting = Setting(config, replace(ENGINES, no_engine_timeout_s=5.0), path=tmp_path)
        publisher, load = setting.simulation.publisher, setting.simulation.publisher.load

        async def without_engines() -> object:
            if setting.simulation.trainer.served_version == 8:
                for engine in setting.engines.values():
                    engine.kill()
            return await load()

        publisher.load = without_engines  # type: ignore[method-assign,assignment]
        with pytest.raises(NoEngineError, match="came back within engine.no_engine_timeout_s=5"):
            await setting.run()
        latest = Checkpointer(tmp_path, max_to_keep=0).usable().path
        assert latest is not None and read_state(latest).step == 10, "a step was made beside the load of the one before"
        assert setting.simulation.trainer.totals.trained_groups == 10 * config.mini_batch_size

    run_in_virtual_time(main())


def test_contract_7_a_publish_that_ends_the_run_costs_no_token(tmp_path: Path) -> None:
    """What the engines hold of open generations is in the last checkpoint, although they are cut off."""
    config = replace(RUN, checkpoint_interval_steps=100, num_steps=None, num_epochs=1)

    async def fail() -> Simulation:
        simulation = Simulation(config, checkpoint_dir=tmp_path)
        asyncio.get_running_loop().call_later(30.0, setattr, simulation.engines[1], "fails_next_load", PublishError)
        with pytest.raises(PublishError, match="engine-1 refused version"):
            await simulation.trainer.run()
        assert simulation.dataloader.statistics()["running"] == simulation.staleness.num_running == 0
        return simulation

    failed = run_in_virtual_time(fail())
    newest = failed.trainer.newest_checkpoint
    assert newest is not None
    saved = read_state(newest)
    assert saved.step == failed.trainer.trained_version == failed.trainer.served_version + 1
    num_sampled = sum(engine.num_sampled_tokens for engine in failed.engines)
    num_running = sum(group.num_sampled_tokens for group in saved.running)
    assert (saved.totals["generated_tokens"] + num_running, saved.totals["wasted_tokens"]) == (num_sampled, 0)
    assert len(saved.running) > 2 and num_running > 500
    (values,) = (values for step, values in failed.logged if step == saved.step)
    assert values["policy/grad_norm"] == 1.0 and values["async/wasted_tokens"] == 0.0
    assert sum(values.get("generate/tokens", 0.0) for _, values in failed.logged) == saved.totals["generated_tokens"]

    async def go_on() -> None:
        simulation = Simulation(config)
        await simulation.trainer.resume(newest)
        await simulation.trainer.run()
        totals = simulation.trainer.totals
        assert (totals.trained_groups, totals.restarted_trajectories, totals.wasted_tokens) == (40, 0, 0)

    run_in_virtual_time(go_on())


def test_contract_7_an_outage_in_a_step_saves_the_step_before_again_with_what_was_generated_since(
    tmp_path: Path,
) -> None:
    config = replace(RUN, checkpoint_interval_steps=1, max_staleness_steps=0)

    async def main() -> None:
        setting = Setting(config, replace(ENGINES, no_engine_timeout_s=5.0), path=tmp_path)
        simulation = setting.simulation
        before: list[TrainerState] = []
        put = simulation.buffer.put

        def put_and_kill(group: Group) -> None:
            put(group)
            if simulation.workers.counts["groups"] == 3 * config.mini_batch_size + 2:
                newest = simulation.trainer.newest_checkpoint
                assert newest is not None
                before.append(read_state(newest))
                setting["engine-0"].kill()
                setting["engine-1"].kill()

        simulation.buffer.put = put_and_kill  # type: ignore[method-assign]
        with pytest.raises(NoEngineError, match="came back within engine.no_engine_timeout_s=5"):
            await setting.run()
        assert [(state.step, len(state.groups)) for state in before] == [(3, 0)]
        newest = simulation.trainer.newest_checkpoint
        assert newest is not None
        saved = read_state(newest)
        assert (saved.step, len(saved.groups), len(saved.running)) == (3, 2, 2)

    run_in_virtual_time(main())


def test_restarts_wait_longer_each_time_and_when_they_are_used_up_nobody_waits() -> None:
    async def main() -> None:
        setting = Setting(replace(RUN, num_engines=1))

        def fails(name: str) -> FaultyEngine:
            raise EngineStartError(f"{name} has no memory")

        setting.make = fails
        with pytest.raises(
            NoEngineError, match="engine.max_restarts=3 are used up; the last failure: engine-0.3 has no memory"
        ):
            await setting.run(setting.at(20.0, setting["engine-0"].kill))
        times = [at for at, _ in setting.starts]
        assert [name for _, name in setting.starts] == ["engine-0.1", "engine-0.2", "engine-0.3"]
        assert [b - a - BOOT_SECONDS for a, b in itertools.pairwise(times)] == [2.0, 4.0]
        assert setting.fleet.states() == {"engine-0": EngineState.given_up}

    run_in_virtual_time(main())


def test_an_engine_with_other_weights_takes_no_request_and_another_is_started() -> None:
    class Corrupt(ModelledEngine):
        async def checksum(self) -> str:
            return "something else"

    async def main() -> None:
        setting = Setting()
        good, num_made = setting.make, 0

        def first_is_corrupt(name: str) -> FaultyEngine:
            nonlocal num_made
            num_made += 1
            return FaultyEngine(Corrupt(name, num_tokens_of=lambda prompt, seed: 1)) if num_made == 1 else good(name)

        setting.make = first_is_corrupt
        await setting.run(setting.at(20.0, setting["engine-0"].kill))
        all_is_trained(setting.simulation)
        assert setting["engine-0.1"].is_dead
        assert setting.fleet.statistics()["engines/serving"] == 2
        assert [name for _, name in setting.starts] == ["engine-0.1", "engine-0.2"]

    run_in_virtual_time(main())


def test_a_publish_does_not_wait_for_an_engine_that_boots() -> None:
    async def main() -> None:
        setting = Setting()
        await setting.run(setting.at(20.0, setting["engine-0"].kill))
        assert max(setting.simulation.trainer.totals.pauses) == pytest.approx(RUN.load_seconds)
        steps = [values["timing/publish"] for _, values in setting.simulation.logged if "timing/publish" in values]
        # At worst it finds the new engine at its own load, one heartbeat of virtual time before.
        assert max(steps) <= 2 * RUN.load_seconds + RUN.send_seconds + 1e-6

    run_in_virtual_time(main())


def test_engines_are_added_and_removed_while_training_and_their_places_are_supervised(tmp_path: Path) -> None:
    async def main() -> None:
        setting = Setting()
        setting.fleet.trace = Trace(tmp_path, asyncio.get_running_loop().time)

        async def change() -> None:
            await setting.at(10.0)
            assert await setting.fleet.add_engine() == "engine-2"
            assert setting.serving == ["engine-0", "engine-1", "engine-2"]
            await setting.fleet.remove_engine("engine-0")
            assert setting["engine-0"].is_dead and setting.serving == ["engine-1", "engine-2"]
            setting["engine-2"].kill()
            await asyncio.sleep(2 * BOOT_SECONDS)
            assert setting.serving == ["engine-1", "engine-2.1"]
            assert set(setting.fleet.states()) == {"engine-1", "engine-2"}

        await setting.run(change())
        all_is_trained(setting.simulation)
        assert setting.simulation.client.statistics()["engine_failures_total"] == 1
        setting.fleet.trace.close()

    run_in_virtual_time(main())
    removal, death, _ = read_spans(tmp_path)
    assert (removal.name, removal.track) == ("removal", "engines/engine-0") and death.track == "engines/engine-2"


@pytest.mark.parametrize("is_removed_first", [True, False])
def test_a_place_that_was_given_up_can_be_removed_and_holds_an_engine_again(is_removed_first: bool) -> None:
    async def main() -> None:
        setting = Setting(RUN, replace(ENGINES, max_restarts=1))
        fleet = setting.fleet

        async def change() -> None:
            await setting.at(10.0, setting["engine-0"].kill)
            await asyncio.sleep(BOOT_SECONDS + 10.0)
            setting["engine-0.1"].kill()
            await asyncio.sleep(5.1)
            assert fleet.states() == {"engine-0": EngineState.given_up, "engine-1": EngineState.serving}
            if is_removed_first:
                await fleet.remove_engine("engine-0")
                assert fleet.states() == {"engine-1": EngineState.serving}
            assert await fleet.add_engine() == "engine-0"
            assert setting.serving == ["engine-1", "engine-0"]
            setting["engine-0"].kill()
            await asyncio.sleep(BOOT_SECONDS + 10.0)
            assert setting.serving == ["engine-1", "engine-0.1"], "it is supervised, with restarts of its own"

        await setting.run(change())
        all_is_trained(setting.simulation)
        assert fleet.states() == {"engine-0": EngineState.serving, "engine-1": EngineState.serving}

    run_in_virtual_time(main())


def test_a_place_is_removed_by_its_name_or_its_engine_s_also_while_another_engine_comes_up_in_it() -> None:
    async def main() -> None:
        setting = Setting(replace(RUN, num_engines=3))
        fleet = setting.fleet

        async def change() -> None:
            await setting.at(10.0, setting["engine-0"].kill, setting["engine-1"].kill)
            await asyncio.sleep(BOOT_SECONDS / 2)
            assert fleet.states()["engine-0"] is EngineState.restarting
            await fleet.remove_engine("engine-0")
            await asyncio.sleep(BOOT_SECONDS)
            assert setting.serving == ["engine-2", "engine-1.1"] and "engine-0.1" not in setting.engines
            await fleet.remove_engine("engine-1")
            assert setting["engine-1.1"].is_dead and fleet.states() == {"engine-2": EngineState.serving}
            with pytest.raises(InferenceError, match="there is no engine 'engine-0' to remove; there are engine-2"):
                await fleet.remove_engine("engine-0")
            with pytest.raises(InferenceError, match="engine-2 is the only engine; add another one"):
                await fleet.remove_engine("engine-2")
            setting["engine-2"].kill()
            await asyncio.sleep(5.1)
            with pytest.raises(InferenceError, match="engine-2 is the only engine; add another one"):
                await fleet.remove_engine("engine-2")

        await setting.run(change())
        all_is_trained(setting.simulation)
        assert setting.serving == ["engine-2.1"]

    run_in_virtual_time(main())


@pytest.mark.parametrize("num_turns", range(5))
def test_an_engine_may_be_removed_in_the_moment_in_which_it_is_found_dead(num_turns: int) -> None:
    async def main() -> None:
        setting = Setting()

        async def change() -> None:
            await setting.at(20.0)
            setting.fleet._member_of("engine-0").report_death("no heartbeat within 20 s")
            for _ in range(num_turns):  # of the event loop
                await asyncio.sleep(0)
            await setting.fleet.remove_engine("engine-0")
            assert setting["engine-0"].is_dead and setting.fleet.states() == {"engine-1": EngineState.serving}

        await setting.run(change())
        all_is_trained(setting.simulation)
        assert setting.starts == []

    run_in_virtual_time(main())


def test_of_all_engines_that_are_removed_at_once_one_stays() -> None:
    async def main() -> None:
        setting = Setting(replace(RUN, num_engines=3))

        async def change() -> None:
            await setting.at(10.0, setting["engine-2"].kill)
            await asyncio.sleep(BOOT_SECONDS / 2)
            removals = (setting.fleet.remove_engine(f"engine-{i}") for i in range(3))
            last = (await asyncio.gather(*removals, return_exceptions=True))[2]
            assert str(last) == "engine-2 is the only engine; add another one before it is removed"

        await setting.run(change())
        all_is_trained(setting.simulation)
        assert setting.serving == ["engine-2.1"]
        assert setting.fleet.statistics()["engines/restarts"] == 1

    run_in_virtual_time(main())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_place_is_free_again_when_the_engine_that_leaves_it_is_closed(is_cancelled: bool) -> None:
    async def main() -> None:
        setting = Setting()
        fleet = setting.fleet

        async def change() -> None:
            await setting.at(10.0, setting["engine-1"].freeze)
            removing = asyncio.create_task(
                fleet.remove_engine("engine-1")
            )  # what it has does not come back for a minute
            await asyncio.sleep(1.0)
            assert fleet.states() == {"engine-0": EngineState.serving, "engine-1": EngineState.leaving}
            with pytest.raises(InferenceError, match="engine-1 is being removed already"):
                await fleet.remove_engine("engine-1")
            with pytest.raises(InferenceError, match="engine-0 is the only engine"):
                await fleet.remove_engine("engine-0")
            adding = asyncio.create_task(fleet.add_engine())
            await asyncio.sleep(1.0)
            with pytest.raises(InferenceError, match="engine-2 is starting; remove it once it serves"):
                await fleet.remove_engine("engine-2")
            assert await adding == "engine-2"
            if is_cancelled:
                removing.cancel()
            await asyncio.wait([removing])
            assert setting["engine-1"].is_dead and set(fleet.states()) == {"engine-0", "engine-2"}
            assert await fleet.add_engine() == "engine-1"

        await setting.run(change())
        all_is_trained(setting.simulation)

    run_in_virtual_time(main())


def test_a_restart_that_fails_in_an_unexpected_way_is_tried_again_and_counted_after_its_place_is_gone() -> None:
    async def main() -> None:
        setting = Setting()
        good = setting.make

        def fails(name: str) -> FaultyEngine:
            setting.make = good
            raise OSError("no space left on device")

        async def change() -> None:
            setting.make = fails
            await setting.at(10.0, setting["engine-0"].kill)
            await asyncio.sleep(3 * BOOT_SECONDS)
            assert setting.serving == ["engine-1", "engine-0.2"]
            before = setting.fleet.statistics()
            await setting.fleet.remove_engine("engine-0")
            after = setting.fleet.statistics()
            assert before["engines/restarts"] == after["engines/restarts"] == 2
            assert before["engines/heartbeats_missed"] == after["engines/heartbeats_missed"]

        await setting.run(change())
        all_is_trained(setting.simulation)

    run_in_virtual_time(main())


def test_restarts_wait_a_minute_at_most_however_many_there_were() -> None:
    life = EngineLife(replace(ENGINES, max_restarts=2_000))
    life.die()
    assert max(life.restart() or 0.0 for _ in range(2_000)) == 60.0


def test_an_engine_that_does_not_come_up_leaves_its_place_free_and_nobody_waiting() -> None:
    async def main() -> None:
        setting = Setting(RUN, replace(ENGINES, max_restarts=0))
        good = setting.make

        def fails(name: str) -> FaultyEngine:
            raise EngineStartError(f"{name} has no memory")

        async def change() -> None:
            await setting.at(10.0, setting["engine-0"].kill)
            await asyncio.sleep(5.1)
            setting.make = fails
            with pytest.raises(EngineStartError, match="engine-0 has no memory"):
                await setting.fleet.add_engine()
            assert setting.fleet.states() == {"engine-1": EngineState.serving}
            setting.make = good
            assert await setting.fleet.add_engine() == "engine-0"
            setting.make = fails
            adding = asyncio.create_task(setting.fleet.add_engine())
            await asyncio.sleep(1.0)
            setting["engine-0"].kill()
            setting["engine-1"].kill()
            with pytest.raises(EngineStartError, match="engine-2 has no memory"):
                await adding

        with pytest.raises(
            NoEngineError,
            match="no inference engine is left, and the one that was added does not serve: engine-2 has no mem",
        ):
            await setting.run(change())
        assert asyncio.get_running_loop().time() < ENGINES.no_engine_timeout_s

    run_in_virtual_time(main())


def test_front_ends_learn_of_every_change_also_when_one_is_missed() -> None:
    class FrontEnd:
        def __init__(self) -> None:
            self.heard: list[list[str]] = []
            self.is_busy = False

        async def follow(self, engines: Sequence[InferenceEngine]) -> None:
            if self.is_busy:
                await asyncio.Event().wait()
            self.heard.append([engine.name for engine in engines])

    async def main() -> None:
        setting, front_end = Setting(), FrontEnd()
        setting.fleet = Fleet(
            setting.simulation.client, start=setting._start, config=ENGINES, say=print, front_ends=[front_end]
        )

        async def look() -> None:
            await setting.at(20.0, setting["engine-0"].kill)
            await asyncio.sleep(5.1)
            assert front_end.heard[0] == ["engine-0", "engine-1"] and front_end.heard[-1] == ["engine-1"]
            front_end.is_busy = True
            await asyncio.sleep(BOOT_SECONDS + 5.0)
            front_end.is_busy = False
            assert front_end.heard[-1] == ["engine-1"]
            await asyncio.sleep(20.0)
            assert front_end.heard[-1] == ["engine-1", "engine-0.1"]

        await setting.run(look())
        all_is_trained(setting.simulation)

    run_in_virtual_time(main())


faults = st.lists(
    st.tuples(st.floats(0.0, 90.0), st.sampled_from(["kill", "freeze", "refuse", "full"]), st.integers(0, 2)),
    max_size=7,
)


@pytest.mark.slow
@given(faults=faults, seed=st.integers(0, 3), mode=st.sampled_from(PauseMode))
def test_contract_6_whatever_fails_and_when_all_that_serve_after_a_publish_serve_one_version_and_all_is_trained(
    faults: list[tuple[float, str, int]], seed: int, mode: PauseMode
) -> None:
    config = replace(RUN, num_engines=3, num_steps=15, seed=seed, pause_mode=mode)

    async def main() -> None:
        setting = Setting(config, replace(ENGINES, max_restarts=50))
        simulation, refusals = setting.simulation, random.Random(seed)
        publisher, load, send = (
            simulation.publisher,
            simulation.publisher._load,
            simulation.policy.send_weights,
        )
        is_full = False

        async def checked(sent: Any) -> object:
            version = sent.update.version
            try:
                return await load(sent)
            finally:
                serving = [engine for engine in simulation.client.engines if not setting[engine.name].is_frozen]
                alive = [engine for engine in serving if not setting[engine.name].is_dead]
                assert len({await engine.checksum() for engine in alive}) <= 1
                assert {await engine.version() for engine in alive} <= {version, version - 1}

        async def exported(version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
            nonlocal is_full
            if is_full:
                is_full = False
                raise WeightsWriteError("no space left on device")
            return await send(version, directory, bucket_bytes)

        async def happen(at: float, fault: str, index: int) -> None:
            nonlocal is_full
            await setting.at(at)
            alive = [engine for engine in setting.engines.values() if not engine.is_dead]
            engine = alive[index % len(alive)] if alive else None
            if fault == "full":
                is_full = True
            elif engine is not None and fault == "refuse":
                inner = engine._engine
                assert isinstance(inner, ModelledEngine)
                inner.fails_next_load = refusals.choice([PublishError, RuntimeError])
            elif engine is not None:
                getattr(engine, fault)()

        publisher.max_retries = 5
        publisher._load = checked  # type: ignore[method-assign,assignment]
        simulation.policy.send_weights = exported  # type: ignore[method-assign]
        await setting.run(*(happen(*fault) for fault in faults))
        all_is_trained(simulation, config)
        rows = [row for step in simulation.policy.steps for group in step for row in group]
        assert all(list(row.versions) == sorted(row.versions) for row in rows), (
            "no answer goes back to an older version"
        )
        assert simulation.client.statistics()["running_requests"] == 0

    run_in_virtual_time(main())


HEARTBEAT = Heartbeat(interval_s=ENGINES.heartbeat_interval_s, timeout_s=ENGINES.heartbeat_timeout_s)


class LifeMachine(RuleBasedStateMachine):
    """Answers, silences, deaths and restarts in any order, at any times."""

    def __init__(self) -> None:
        super().__init__()
        self.life = EngineLife(ENGINES)
        self.now = 0.0
        self.asked: float | None = None
        self.num_ticks = 0

    @precondition(lambda self: self.life.state in (EngineState.starting, EngineState.restarting))
    @rule()
    def serve(self) -> None:
        self.life.serve()
        assert self.life.state is EngineState.serving

    @precondition(lambda self: self.life.state is EngineState.serving and self.asked is None)
    @rule()
    def ask(self) -> None:
        self.silence = Silence(HEARTBEAT, self.now)
        self.asked, self.num_ticks = self.now, 0

    @precondition(lambda self: self.asked is not None)
    @rule(seconds=st.floats(0.0, 1000.0))
    def tick(self, seconds: float) -> None:
        """However long this process slept, it takes as many looks as fit into the deadline to call an engine dead."""
        self.now += seconds
        self.num_ticks += 1
        if self.silence.tick(self.now):
            assert self.asked is not None
            assert self.num_ticks * HEARTBEAT.interval_s >= HEARTBEAT.timeout_s <= self.now - self.asked
            self.life.die()
            self.asked = None

    @precondition(lambda self: self.asked is not None)
    @rule()
    def answer(self) -> None:
        self.life.answer()
        assert self.life.state is EngineState.serving
        self.asked = None

    @precondition(lambda self: self.life.state not in (EngineState.dead, EngineState.given_up))
    @rule()
    def die(self) -> None:
        self.life.die()
        self.asked = None

    @precondition(lambda self: self.life.state in (EngineState.dead, EngineState.restarting))
    @rule()
    def restart(self) -> None:
        wait_s = self.life.restart()
        assert (wait_s is None) == (self.life.state is EngineState.given_up)
        assert wait_s is None or ENGINES.restart_backoff_s <= wait_s <= 60.0

    @rule(seconds=st.floats(0.0, 1000.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def restarts_are_bounded(self) -> None:
        assert self.life.num_restarts <= ENGINES.max_restarts
        assert self.life.state is not EngineState.given_up or self.life.num_restarts == ENGINES.max_restarts


TestLifeMachine = LifeMachine.TestCase
TestLifeMachine.settings = settings(stateful_step_count=40)


def test_the_error_of_a_publish_in_which_the_last_engine_died_says_that_none_may_be_started() -> None:
    async def main() -> None:
        setting = Setting(RUN, replace(ENGINES, max_restarts=0))
        model = setting.simulation.engines[1]

        async def kill() -> None:
            await setting.at(20.0, setting["engine-0"].kill)
            model.fails_next_load = RuntimeError

        with pytest.raises(
            NoEngineError, match="engine.max_restarts=0 are used up; the last failure: engine-1 was killed"
        ):
            await setting.run(kill())

    run_in_virtual_time(main())
