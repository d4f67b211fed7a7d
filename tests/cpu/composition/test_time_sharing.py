"""Policy, reference and recomputed log-probs on the same devices: one at a time."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_async.composition.time_sharing import lease_of, leasing_policy, on_leased_devices
from skyrl_async.errors import TrainingError, WorkerDiedError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.rollout.preparation import OnSharedDevices, Prepare
from skyrl_async.runtime.device_leases import DeviceGroup, LeaseDevices, groups_by_member
from skyrl_async.runtime.stages import Channel, Stage, run_stage
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine, ModelledPolicy
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.training.workers.logprob_workers import ColumnStageWork, LogprobWorkers
from skyrl_async.types import Group, LogprobModel, PauseMode, RowLogprobs, Trajectory, WeightUpdate
from skyrl_async.weight_sync.engine_time_sharing import EngineTimeSharing
from skyrl_async.weight_sync.publisher import WeightPublisher
from tests.cpu.tiny_policies import export_weights

ROW = Trajectory(
    prompt_token_ids=(1,),
    response_token_ids=(2,) * 10,
    loss_mask=(1,) * 10,
    logprobs=(-1.0,) * 10,
    versions=(0,) * 10,
    reward=0.0,
)


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, path="", manifest={}, num_bytes=0)


def is_there(update: WeightUpdate) -> bool:
    return Path(update.path).exists()


class Forward:
    """Takes 2 s for log-probs and 1 s for a version; may die of its next call."""

    def __init__(self, group: DeviceGroup | None = None, member: str = "") -> None:
        self._group = group
        self._member = member
        self._version = 0
        self.is_dying = False

    async def _computes(self, seconds: float) -> None:
        for part in (0.0, seconds):
            await asyncio.sleep(part)
            assert self._group is None or self._group.statistics().holder == self._member
        if self.is_dying:
            raise WorkerDiedError("logp-worker-0 died")

    async def logprobs_of(self, trajectories: Sequence[Trajectory], model: LogprobModel) -> RowLogprobs:
        await self._computes(2.0)
        return RowLogprobs(values=tuple(row.logprobs for row in trajectories), version=self._version)

    async def load_weights(self, update: WeightUpdate) -> None:
        await self._computes(1.0)
        if not is_there(update):
            raise TrainingError("its files are gone")
        self._version = update.version

    async def close(self) -> None:
        pass


def test_what_shares_devices_computes_one_after_another_and_what_does_not_overlaps() -> None:
    async def seconds(shared: list[str]) -> float:
        loop = asyncio.get_running_loop()
        groups = groups_by_member([shared]) if shared else {}
        policy = leasing_policy(ModelledPolicy(seconds_per_token=0.1, step_seconds=1.0), groups)

        async def start() -> Forward:
            return Forward(groups.get("ref"), "ref")

        reference = await LogprobWorkers(start, max_restarts=0, device_lease=lease_of("ref", groups)).started()

        async def train() -> None:
            await policy.forward_backward([ROW], [0.0], 0)
            await policy.step(10.0)

        started = loop.time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train())
            tasks.create_task(reference.logprobs_of([ROW]))
        return loop.time() - started

    assert run_in_virtual_time(seconds(["policy", "ref"])) == 4.0
    assert run_in_virtual_time(seconds([])) == 2.0
    assert run_in_virtual_time(seconds(["policy", "logp"])) == 2.0


def bucket_in(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "bucket").touch()
    return directory / "bucket"


class SendingFiles(ModelledPolicy):
    """Has a file for each version."""

    async def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        update = await super().send_weights(version, directory, bucket_bytes)
        return replace(update, path=str(bucket_in(directory)))


def test_log_prob_workers_that_die_while_a_version_is_sent_keep_no_engine_from_loading_it(tmp_path: Path) -> None:
    """Without a second buffer the one that they had is gone by then: new ones wait for what engines on their devices load first."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        trace, groups = Trace(None, loop.time), groups_by_member([["policy", "logp", "generate"]])
        engine = ModelledEngine("engine-0", num_tokens_of=lambda prompt, seed: 1, load_seconds=0.5)
        client = InferenceEngineClient([engine], tokenizer=None, max_model_len=1000)
        turns = EngineTimeSharing(
            client, groups["generate"], min_slice_s=1.0, is_busy=lambda: True, trace=trace, clock=loop.time
        )
        started: list[Forward] = []

        async def start() -> Forward:
            started.append(Forward(groups["logp"], "logp"))
            return started[-1]

        workers = await LogprobWorkers(start, max_restarts=1, device_lease=lease_of("logp", groups)).started()
        publisher = WeightPublisher(
            client=client,
            policy=leasing_policy(SendingFiles(gather_seconds=0.5, send_seconds=9.0), groups),
            directory=tmp_path,
            bucket_bytes=1,
            double_buffer=False,
            pause_mode=PauseMode.ABORT,
            trace=trace,
            hold_engines=turns.holding,
            followers=(workers.load_weights,),
            clock=loop.time,
        )
        async with turns.running():
            await publisher.publish(1)
            assert (await workers.logprobs_of([ROW])).version == 1
            await publisher.gather(2)
            async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(publisher.send(2))
                await asyncio.sleep(1.0)
                started[0].is_dying = True
                asked = tasks.create_task(workers.logprobs_of([ROW]))
                await sending
                assert workers.num_restarts == 1 and not asked.done()
                await publisher.load()
        assert asked.result().version == 2 and len(started) == 2

    run_in_virtual_time(main())


def test_log_prob_workers_that_die_under_a_lease_are_replaced_without_one_and_continue_under_another() -> None:
    async def main() -> None:
        groups = groups_by_member([["logp", "generate"]])
        started: list[Forward] = []

        async def start() -> Forward:
            assert groups["logp"].statistics().holder is None
            started.append(Forward(groups["logp"], "logp"))
            return started[-1]

        workers = await LogprobWorkers(start, max_restarts=1, device_lease=lease_of("logp", groups)).started()
        async with asyncio.TaskGroup() as tasks, workers.lease():
            newer = tasks.create_task(workers.load_weights(update(1)))
            assert (await workers.logprobs_of([ROW])).version == 0
            started[0].is_dying = True
            assert (await workers.logprobs_of([ROW])).version == 1  # new ones begin with the newest
            assert (await workers.logprobs_of([ROW])).version == 1
            assert not newer.done()
        assert (await workers.logprobs_of([ROW])).version == 1
        assert groups["logp"].statistics().holder is None
        assert (
            groups["logp"].statistics().num_leases["logp"] == 5
        )  # before and after the death, two loads, the last call

    run_in_virtual_time(main())


@pytest.mark.parametrize("has_own_workers", [True, False])
def test_a_group_waiting_for_devices_is_shown_and_not_processed(has_own_workers: bool) -> None:
    async def main() -> None:
        loop, spans = asyncio.get_running_loop(), list[tuple[str, float, float]]()
        member = "logp" if has_own_workers else "policy"
        groups = groups_by_member([[member, "generate"]])
        work, lease_devices = await work_on_shared_devices(groups, has_own_workers)
        stage = Stage(
            "logp", loop.time, lambda _, state, item, begin, end: spans.append((f"{state.value} {item}", begin, end))
        )
        inputs, prepared = Channel[Group](2), list[Group]()

        async def output(group: Group) -> None:
            prepared.append(group)

        for index in range(2):
            inputs.put_nowait(Group(uid=f"p{index}", admission_index=index, scheduled_version=0, trajectories=(ROW,)))
        inputs.close()
        async with asyncio.TaskGroup() as tasks, groups["generate"].lease("generate"):
            running = run_stage(
                stage, inputs, work, output, name_of=lambda group: group.uid, lease_devices=lease_devices
            )
            tasks.create_task(running)
            await asyncio.sleep(5.0)
            assert stage.status().where == "waiting for input p0 (5.0 s)"
        assert stage.statistics()["processing_seconds"] == 4.0 and len(prepared) == 2
        assert [span for span in spans if span[2] > span[1]] == [
            ("waiting for input p0", 0.0, 5.0),
            ("processing p0", 5.0, 7.0),
            ("processing p1", 7.0, 9.0),
        ]

    run_in_virtual_time(main())


async def work_on_shared_devices(
    groups: Mapping[str, DeviceGroup], has_own_workers: bool
) -> tuple[Prepare, LeaseDevices]:
    """Log-probs in 2 s a group, of workers of their own or of the policy's."""
    model = LogprobModel.POLICY
    if has_own_workers:

        async def start() -> Forward:
            return Forward(groups["logp"], "logp")

        workers = await LogprobWorkers(start, max_restarts=0, device_lease=lease_of("logp", groups)).started()
        in_line = on_leased_devices(
            ColumnStageWork(workers.logprobs_of, "old_logprobs", "old_version"), "logp", groups, workers.lease
        )
    else:
        policy = leasing_policy(ModelledPolicy(seconds_per_token=0.6), groups)
        in_line = on_leased_devices(
            ColumnStageWork(lambda rows: policy.logprobs_of(rows, model), "old_logprobs", "old_version"),
            "policy",
            groups,
        )
    assert isinstance(in_line, OnSharedDevices)
    return in_line, in_line.lease_devices


SHARED = SimulationSettings(
    mini_batch_size=8,
    num_steps=8,
    mean_tokens=60.0,
    group_size=8,
    num_prompts=400,
    seconds_per_token=5e-5,
    step_seconds=0.05,
    max_staleness_steps=4,
    shared_by=(("policy", "ref", "logp", "generate"),),
)


@pytest.mark.parametrize("stages", [["ref_logp"], ["ref_logp", "logp"]])
def test_groups_waiting_for_log_probs_share_a_lease_and_each_is_a_call_of_its_own(stages: list[str]) -> None:
    """With a turn for each, engines would keep the devices for a second between one group and the next."""
    called: dict[str, list[str]] = {stage: [] for stage in stages}

    def prepare(policy: ModelledPolicy) -> dict[str, Prepare]:
        def work_of(stage: str) -> Prepare:
            model = LogprobModel.REF if stage == "ref_logp" else LogprobModel.POLICY
            column = "ref_logprobs" if stage == "ref_logp" else "old_logprobs"
            work = ColumnStageWork(lambda rows: policy.logprobs_of(rows, model), column)

            async def recorded(group: Group) -> Group:
                called[stage].append(group.uid)
                return await work(group)

            return recorded

        return {stage: work_of(stage) for stage in stages}

    async def main() -> None:
        simulation = Simulation(SHARED, prepare_with=prepare)
        await simulation.run()
        num_groups = simulation.trainer.totals.trained_groups
        assert num_groups == 8 * 8
        for stage, uids in called.items():
            member = {"ref_logp": "ref"}.get(stage, stage)
            turns = simulation.device_groups[member].statistics()
            assert len(uids) == len(set(uids)) >= num_groups
            assert turns.num_leases[member] < num_groups / 4
            assert sum(values[f"stage/{stage}/items"] for _, values in simulation.logged) <= len(uids)
        assert asyncio.get_running_loop().time() < 18.0

    run_in_virtual_time(main())


def test_a_leasing_policy_is_a_policy(tmp_path: Path) -> None:
    async def main() -> None:
        policy = leasing_policy(ModelledPolicy(), groups_by_member([["policy", "ref"]]))
        assert (await policy.logprobs_of([ROW], LogprobModel.REF)).version == 0
        assert await policy.logprobs([1, 2]) == [-1.0]
        assert (await export_weights(policy, 3, tmp_path, 1)).version == 3
        await policy.save(tmp_path / "saved")
        await policy.load(tmp_path / "saved")
        await policy.export_hf(tmp_path / "hf")
        await policy.close()

    run_in_virtual_time(main())
