"""Contracts 1 and 7 in virtual time: a run thrown away at any moment and resumed from its directory trains each prompt once."""

import asyncio
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_async.checkpoint.checkpointer import Checkpointer, read_state
from skyrl_async.errors import CheckpointError, GenerationError
from skyrl_async.generators.gym.episode_state import EpisodeState
from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.rollout.generator import Generator, GroupRequest
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledGenerator
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import PauseMode, Trajectory

LONG_TAILED = SimulationSettings(
    num_steps=None,
    num_epochs=2,
    num_prompts=18,
    mini_batch_size=4,
    group_size=2,
    num_engines=2,
    mean_tokens=300,
    sigma=1.0,
    seconds_per_token=1 / 2000,
    step_seconds=1.0,
    load_seconds=0.2,
    checkpoint_interval_steps=1,
    max_retries=1,
)


class Walk:
    """Takes one to four turns, as many as its prompt says."""

    is_fast = True

    def __init__(self) -> None:
        self.num_left = 0

    def init(self, prompt: list) -> tuple[list, dict]:
        self.num_left = 1 + int(prompt[0]["content"]) % 4
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        self.num_left -= 1
        assert self.num_left >= 0
        said = [{"role": "user", "content": "go on"}]
        return {"observations": said, "reward": 0.5, "done": self.num_left == 0, "metadata": {}}

    def close(self) -> None:
        pass


class RestorableWalk(Walk):
    """One that can be resumed on its way."""

    def snapshot(self) -> dict[str, int]:
        return {"num_left": self.num_left}

    def restore(self, state: dict[str, int]) -> None:
        self.num_left = state["num_left"]


class Numbers:
    """A chat template of numbers."""

    def render(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        return tuple(ord(c) for message in messages for c in message["content"])

    def render_next(self, messages: Sequence[dict[str, Any]], context: tuple[int, ...]) -> tuple[int, ...]:
        return (*context, len(messages))

    def stop_string(self, *args: Any) -> None:
        return None

    def text_ends(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return (0,) * len(token_ids)


def walking(environment: Callable[[], Walk]) -> Callable[[InferenceEngineClient], Generator]:
    return lambda client: GymGenerator(client, Numbers(), lambda name, extras: environment())


class Flaky(ModelledGenerator):
    """Some of its samples fail at first: before anything is sampled, or after all of it is."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self.failed: set[tuple[int, int]] = set()

    async def _one(self, request: GroupRequest, index: int, seed: int) -> Trajectory:
        is_first = (request.seed, index) not in self.failed
        self.failed.add((request.seed, index))
        if is_first and seed % 4 == 0:
            raise GenerationError("the door is locked")
        row = await super()._one(request, index, seed)
        if is_first and seed % 4 == 1:
            raise GenerationError("the door has closed")
        return row


GENERATORS = {
    "single turn": ModelledGenerator,
    "failing samples": Flaky,
    "restorable turns": walking(RestorableWalk),
    "other turns": walking(Walk),
}


def keep_account(simulation: Simulation) -> list[tuple[int, tuple[int, str]]]:
    """(step, (epoch, uid)) of everything that will be trained."""
    trained: list[tuple[int, tuple[int, str]]] = []
    mark = simulation.dataloader.mark_consumed_uids

    async def marking(keys: Sequence[tuple[int, str]]) -> None:
        trained.extend((simulation.trainer.served_version + 1, key) for key in keys)
        await mark(keys)

    simulation.dataloader.mark_consumed_uids = marking  # type: ignore[method-assign]
    return trained


def killed_after(seconds: float, settings: SimulationSettings, directory: Path, kind: str) -> list:
    """What a run, or one that goes on from its directory, trained until it was thrown away with nothing put in order."""

    async def main() -> list:
        simulation = Simulation(settings, checkpoint_dir=directory, generator_over=GENERATORS[kind])
        trained = keep_account(simulation)
        if (checkpoint := latest(directory)) is not None:
            await simulation.trainer.resume(checkpoint)
        running = asyncio.ensure_future(simulation.trainer.run())
        await asyncio.wait([running], timeout=seconds)
        simulation.trainer._saver.checkpointer = None  # a process that is gone writes nothing
        running.cancel()
        await asyncio.wait([running])
        return trained

    return run_in_virtual_time(main())


def resumed(
    settings: SimulationSettings, checkpoint: Path | None, kind: str, directory: Path | None = None, **parts: Any
) -> tuple[Simulation, list]:
    async def main() -> tuple[Simulation, list]:
        simulation = Simulation(settings, checkpoint_dir=directory, **{"generator_over": GENERATORS[kind], **parts})
        trained = keep_account(simulation)
        if checkpoint is not None:
            await simulation.trainer.resume(checkpoint)
        await simulation.trainer.run()
        return simulation, trained

    return run_in_virtual_time(main())


def keys_of(settings: SimulationSettings) -> list[tuple[int, str]]:
    return sorted((e, f"p{i}") for e in range(settings.num_epochs or 0) for i in range(settings.num_prompts))


def latest(directory: Path) -> Path | None:
    usable = Checkpointer(directory, max_to_keep=0).usable()
    return None if usable is None else usable.path


def step_of(checkpoint: Path | None) -> int:
    return read_state(checkpoint).step if checkpoint else 0


@pytest.mark.slow
@given(
    bound=st.integers(0, 3),
    kills=st.lists(st.floats(0.5, 40.0), min_size=1, max_size=2),
    kind=st.sampled_from(list(GENERATORS)),
    policy=st.sampled_from(["wait", "window", "mask", "resample", "allow"]),
    mode=st.sampled_from(PauseMode),
    seed=st.integers(0, 3),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_contract_7_a_run_killed_at_any_moments_trains_every_prompt_of_every_epoch_once(
    tmp_path_factory: pytest.TempPathFactory,
    bound: int,
    kills: list[float],
    kind: str,
    policy: str,
    mode: PauseMode,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("run")
    job = replace(LONG_TAILED, num_prompts=12, max_staleness_steps=bound, staleness_policy=policy)
    job = replace(job, pause_mode=mode, seed=seed)
    kept: list[tuple[int, tuple[int, str]]] = []
    for seconds in kills:
        kept += killed_after(seconds, job, directory, kind)
        step = step_of(latest(directory))
        kept = [(s, key) for s, key in kept if s <= step]
    simulation, again = resumed(job, latest(directory), kind, directory)
    assert sorted(key for _, key in kept + again) == keys_of(job)
    counts = simulation.dataloader.statistics()
    assert counts["trained_total"] == 24 and not counts["running"] and not counts["finished"]
    totals = simulation.trainer.totals
    assert totals.groups_over_bound == 0 or policy in ("mask", "allow")
    if policy == "resample":
        return  # groups that are drawn again were generated, too, and their tokens are thrown away
    assert totals.generated_tokens == totals.trained_tokens + totals.masked_tokens
    if kind not in ("other turns", "failing samples"):
        assert totals.wasted_tokens == totals.restarted_trajectories == 0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint per generator, taken while groups were running."""
    found = {}
    for kind in GENERATORS:
        directory = tmp_path_factory.mktemp("run")
        killed_after(25.0, LONG_TAILED, directory, kind)
        found[kind] = latest(directory)
        assert sum(group.num_sampled_tokens for group in read_state(found[kind]).running) > 0
    return found


@pytest.mark.slow
def test_contract_7_running_groups_go_on_under_their_admission_with_tokens_of_the_versions_before(
    checkpoints: dict[str, Path],
) -> None:
    state = read_state(checkpoints["restorable turns"])
    simulation, _ = resumed(LONG_TAILED, checkpoints["restorable turns"], "restorable turns")
    totals = simulation.trainer.totals
    assert totals.resumed_trajectories == sum(group.num_samples for group in state.running)
    assert totals.restarted_trajectories == totals.wasted_tokens == 0
    rows = [row for step in simulation.policy.steps for group in step for row in group]
    begun = [s.state for g in state.running for s in g.samples.values() if s.state and s.state["tokens"]["turns"]]
    assert begun
    for sample in begun:
        head = EpisodeState.from_json(sample).builder.build(is_truncated=False, metrics={})
        num = len(head.versions)
        assert [
            row
            for row in rows
            if np.array_equal(row.response_token_ids[:num], head.response_token_ids)
            and row.versions[:num] == head.versions
        ]


def test_contract_7_episodes_of_an_environment_without_snapshots_begin_anew_and_are_counted(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    running = read_state(checkpoints["other turns"]).running
    restarted = [s for g in running for s in g.samples.values() if not s.is_kept]
    assert restarted and any(s.is_kept for g in running for s in g.samples.values())
    simulation, _ = resumed(LONG_TAILED, checkpoints["other turns"], "other turns")
    totals = simulation.trainer.totals
    assert totals.restarted_trajectories == sum(g.num_samples - g.num_kept for g in running) >= len(restarted)
    assert totals.wasted_tokens == sum(s.num_tokens for s in restarted) > 0
    assert totals.summary()["restarted_trajectories"] == totals.restarted_trajectories
    assert f"begin anew ({totals.wasted_tokens} tokens lost)" in caplog.text


class Forgetful(ModelledGenerator):
    """Says nothing of what it does."""

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        return await super().generate(GroupRequest(**{f: getattr(request, f) for f in FIELDS}))


FIELDS = ("prompt", "num_samples", "sampling", "seed", "priority", "is_evaluation")


def test_contract_7_groups_of_a_generator_that_takes_no_part_begin_anew_and_are_counted(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    running = read_state(checkpoints["single turn"]).running
    simulation, _ = resumed(LONG_TAILED, checkpoints["single turn"], "single turn", tmp_path, generator_over=Forgetful)
    assert simulation.trainer.totals.restarted_trajectories == sum(group.num_samples for group in running)
    assert simulation.trainer.totals.resumed_trajectories == 0
    assert simulation.trainer.totals.wasted_tokens == sum(group.num_sampled_tokens for group in running)
    assert simulation.dataloader.statistics()["trained_total"] == 36
    written = [read_state(path).running for path in tmp_path.glob("global_step_*")]
    assert all(not group.samples for groups in written for group in groups) and any(written)


@pytest.mark.parametrize(
    "changed", [{"group_size": 3}, {"group_size": 1}, {"mean_tokens": 200.0}], ids=["larger", "smaller", "sampling"]
)
def test_with_another_group_size_or_sampling_running_groups_begin_anew(
    checkpoints: dict[str, Path], changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    running = read_state(checkpoints["single turn"]).running
    job = replace(LONG_TAILED, **changed)
    simulation, _ = resumed(job, checkpoints["single turn"], "single turn")
    assert f"its {len(running)} running groups begin anew" in caplog.text
    totals = simulation.trainer.totals
    assert totals.restarted_trajectories == len(running) * job.group_size and totals.resumed_trajectories == 0
    assert totals.wasted_tokens == sum(group.num_sampled_tokens for group in running)
    assert simulation.dataloader.statistics()["trained_total"] == 36


@pytest.mark.parametrize("num_engines", [1, 4])
def test_a_run_resumes_with_another_number_of_engines_and_fewer_workers_than_groups_run(
    checkpoints: dict[str, Path], num_engines: int
) -> None:
    job = replace(LONG_TAILED, num_engines=num_engines, num_workers=1)
    simulation, _ = resumed(job, checkpoints["restorable turns"], "restorable turns")
    assert simulation.dataloader.statistics()["trained_total"] == 36
    assert simulation.trainer.totals.restarted_trajectories == simulation.trainer.totals.wasted_tokens == 0


def test_running_groups_that_no_longer_fit_are_drawn_again_and_counted(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job = replace(LONG_TAILED, max_staleness_steps=0)
    state = read_state(checkpoints["single turn"])
    simulation, _ = resumed(job, checkpoints["single turn"], "single turn")
    totals = simulation.trainer.totals
    assert "no longer fit and are drawn again" in caplog.text and totals.wasted_tokens > 0
    assert totals.resumed_trajectories < sum(group.num_samples for group in state.running)
    assert simulation.dataloader.statistics()["trained_total"] == 36 and totals.groups_over_bound == 0


def rewritten(checkpoint: Path, directory: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """A copy of a checkpoint in which one file holds something else."""
    copy = directory / checkpoint.name
    for path in checkpoint.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(checkpoint)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(checkpoint)).write_bytes(path.read_bytes())
    (copy / name).write_text(json.dumps(change(json.loads((copy / name).read_text()))))
    manifest = json.loads((copy / "manifest.json").read_text())
    contents = (copy / name).read_bytes()
    manifest[name] = {"bytes": len(contents), "crc32": f"{zlib.crc32(contents):08x}"}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def test_a_checkpoint_whose_ledger_and_running_groups_differ_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    copy = rewritten(checkpoints["single turn"], tmp_path, "running_groups.json", lambda groups: groups[1:])
    with pytest.raises(CheckpointError, match=r"do not agree on \(0, 'p\d+'\), and 1 in all"):
        resumed(LONG_TAILED, copy, "single turn")
