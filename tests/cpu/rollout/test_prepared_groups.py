"""What happens to a group between its generation and its training: its log-probs, in the real loop over modelled engines."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_async.errors import WorkerDiedError
from skyrl_async.rollout.preparation import Prepare
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import KeptGroups, ModelledPolicy
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.training.workers.logprob_workers import ColumnStageWork
from skyrl_async.types import Group, LogprobModel, RowLogprobs, Trajectory

SETTINGS = SimulationSettings(
    mean_tokens=100.0, sigma=0.8, num_steps=12, mini_batch_size=4, seconds_per_token=1e-3, step_seconds=0.5
)
REF_SECONDS = 0.2


def simulate(settings: SimulationSettings, **parts) -> tuple[Simulation, float]:
    async def main() -> tuple[Simulation, float]:
        simulation = Simulation(settings, **parts)
        await simulation.trainer.run()
        return simulation, asyncio.get_running_loop().time()

    return run_in_virtual_time(main())


def both_log_probs(policy: ModelledPolicy) -> dict[str, Prepare]:
    async def ref(rows: Sequence[Trajectory]) -> RowLogprobs:
        return await policy.logprobs_of(rows, LogprobModel.REF)

    async def old(rows: Sequence[Trajectory]) -> RowLogprobs:
        return await policy.logprobs_of(rows, LogprobModel.POLICY)

    return {
        "ref_logp": ColumnStageWork(ref, "ref_logprobs"),
        "logp": ColumnStageWork(old, "old_logprobs", "old_version"),
    }


def one_at_a_time(policy: ModelledPolicy) -> dict[str, Prepare]:
    """A reference on a worker of its own."""

    async def complete(group: Group) -> Group:
        await asyncio.sleep(REF_SECONDS)
        return group

    return {"ref_logp": complete}


def test_every_row_is_trained_with_its_log_probs_and_the_version_they_are_of() -> None:
    record = KeptGroups()
    simulation, _ = simulate(SETTINGS, prepare_with=both_log_probs, record=record)
    versions = Counter[int]()
    for step, row in ((step, row) for step, group in record.trained for row in group.trajectories):
        assert row.ref_logprobs is not None and row.old_logprobs is not None and row.old_version is not None
        assert len(row.ref_logprobs) == len(row.old_logprobs) == len(row.response_token_ids)
        assert max(row.versions.distinct) <= row.old_version <= step - 1
        versions[step - 1 - row.old_version] += 1
    handed = [row for groups in simulation.policy.steps for rows in groups for row in rows]
    assert all(row.ref_logprobs is not None and row.old_logprobs is not None for row in handed)
    assert versions.total() == len(handed) > 12 * 4
    assert max(versions) > 0


@pytest.mark.slow
def test_the_reference_on_a_worker_of_its_own_overlaps_training() -> None:
    apart, seconds_apart = simulate(SETTINGS, prepare_with=one_at_a_time)

    async def inline() -> float:
        simulation = Simulation(SETTINGS)
        alone = simulation.policy.forward_backward

        async def with_reference(
            trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
        ) -> dict[str, float]:
            await asyncio.sleep(REF_SECONDS)
            return await alone(trajectories, advantages, version)

        simulation.policy.forward_backward = with_reference
        await simulation.trainer.run()
        return asyncio.get_running_loop().time()

    seconds_inline = run_in_virtual_time(inline())
    _, seconds_without = simulate(SETTINGS)
    assert apart.trainer.totals.trained_groups == 12 * 4
    assert seconds_inline - seconds_without > 0.9 * 12 * 4 * REF_SECONDS
    assert seconds_apart - seconds_without < 0.1 * 12 * 4 * REF_SECONDS


@pytest.mark.parametrize("seed", range(8))
def test_contract_2_the_last_groups_of_the_data_stay_within_the_bound_though_older_ones_wait_for_their_log_probs(
    seed: int,
) -> None:
    settings = replace(SETTINGS, max_staleness_steps=1, num_prompts=18, num_epochs=1, num_steps=None, seed=seed)
    for sigma in (0.8, 1.2):
        simulation, _ = simulate(replace(settings, sigma=sigma), prepare_with=one_at_a_time)
        assert simulation.trainer.totals.trained_groups == 18
        assert simulation.trainer.totals.staleness_max <= 1


@pytest.mark.parametrize("policy", ["wait", "resample", "mask"])
def test_groups_that_wait_for_their_log_probs_stay_within_the_bound_and_every_prompt_is_trained_once(
    policy: str,
) -> None:
    settings = replace(
        SETTINGS, staleness_policy=policy, max_staleness_steps=1, num_prompts=48, num_epochs=1, sigma=1.2
    )
    settings = replace(settings, num_steps=None)
    record = KeptGroups()
    simulation, _ = simulate(settings, prepare_with=one_at_a_time, record=record)
    assert sorted(group.uid for _, group in record.trained) == sorted(f"p{i}" for i in range(48))
    assert policy == "mask" or simulation.trainer.totals.staleness_max <= 1


def test_a_failure_while_log_probs_are_computed_ends_the_run_and_requeues_every_prompt() -> None:
    def dying(policy: ModelledPolicy) -> dict[str, Prepare]:
        num_groups = 0

        async def complete(group: Group) -> Group:
            nonlocal num_groups
            num_groups += 1
            if num_groups == 7:
                raise WorkerDiedError("ref-worker-0 died in logprobs_of")
            return group

        return {"ref_logp": complete}

    async def main() -> Simulation:
        simulation = Simulation(SETTINGS, prepare_with=dying)
        with pytest.raises(WorkerDiedError, match="ref-worker-0 died in logprobs_of"):
            await simulation.trainer.run()
        return simulation

    simulation = run_in_virtual_time(main())
    assert simulation.staleness.num_running == 0
    assert simulation.workers.counts["failed_groups"] == 0


def test_finished_groups_of_a_checkpoint_are_completed_before_they_are_trained(tmp_path: Path) -> None:
    settings = replace(SETTINGS, checkpoint_interval_steps=4, num_steps=8)
    simulation, _ = simulate(settings, checkpoint_dir=tmp_path)
    saved = tmp_path / "global_step_4"

    async def resume() -> Simulation:
        resumed = Simulation(settings, prepare_with=both_log_probs)
        await resumed.trainer.resume(saved)
        assert len(resumed.buffer) > 0
        await resumed.trainer.run()
        rows = [row for groups in resumed.policy.steps for group in groups for row in group]
        assert all(row.ref_logprobs is not None for row in rows)
        return resumed

    resumed = run_in_virtual_time(resume())
    assert resumed.trainer.totals.trained_groups == simulation.trainer.totals.trained_groups
