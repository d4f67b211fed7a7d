"""Policy, reference and recomputed log-probs on the same devices: one at a time."""

import asyncio
from pathlib import Path

from skyrl_async.composition.turns import policy_in_turn, prepare_in_turn
from skyrl_async.device_turns import groups_by_member
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.training.protocol import export_weights
from skyrl_async.types import Group, LogprobModel, Trajectory

ROW = Trajectory(
    prompt_token_ids=(1,),
    response_token_ids=(2,) * 10,
    loss_mask=(1,) * 10,
    logprobs=(-1.0,) * 10,
    versions=(0,) * 10,
    reward=0.0,
)
GROUP = Group(uid="a", admission_index=0, scheduled_version=0, trajectories=(ROW,))


def test_what_shares_devices_computes_one_after_another_and_what_does_not_overlaps() -> None:
    async def seconds(shared: list[str]) -> float:
        loop = asyncio.get_running_loop()
        groups = groups_by_member([shared]) if shared else {}
        policy = policy_in_turn(ModelledPolicy(seconds_per_token=0.1, step_seconds=1.0), groups)

        async def ref(group: Group) -> Group:
            await asyncio.sleep(2.0)
            return group

        works = prepare_in_turn({"ref_logp": ref}, groups)

        async def train() -> None:
            await policy.forward_backward([ROW], [0.0], 0)
            await policy.step(10.0)

        started = loop.time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train())
            tasks.create_task(works["ref_logp"](GROUP))
        return loop.time() - started

    assert run_in_virtual_time(seconds(["policy", "ref"])) == 4.0
    assert run_in_virtual_time(seconds([])) == 2.0
    assert run_in_virtual_time(seconds(["policy", "logp"])) == 2.0


def test_a_policy_in_turn_is_a_policy(tmp_path: Path) -> None:
    async def main() -> None:
        policy = policy_in_turn(ModelledPolicy(), groups_by_member([["policy", "ref"]]))
        assert (await policy.logprobs_of([ROW], LogprobModel.REF)).version == 0
        assert await policy.logprobs([1, 2]) == [-1.0]
        assert (await export_weights(policy, 3, tmp_path, 1)).version == 3
        await policy.save(tmp_path / "saved")
        await policy.load(tmp_path / "saved")
        await policy.export_hf(tmp_path / "hf")
        await policy.close()

    run_in_virtual_time(main())
