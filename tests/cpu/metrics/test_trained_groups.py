"""The record of what was trained: whole, exact, and without seams over a resume."""

from dataclasses import replace
from pathlib import Path

from skyrl_async.metrics.tracker import TrainedGroupsLog, read_rows
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.run import Simulation, SimulationSettings
from skyrl_async.types import ENVIRONMENT_VERSION, Group, Trajectory


def group(uid: str, scheduled_version: int = 0) -> Group:
    row = Trajectory(
        prompt_token_ids=(1, 2),
        response_token_ids=(3, 4, 5),
        loss_mask=(1, 0, 1),
        logprobs=(-0.5, 0.0, -0.25),
        versions=(0, ENVIRONMENT_VERSION, 1),
        reward=1.0,
    )
    return Group(uid=uid, admission_index=7, scheduled_version=scheduled_version, trajectories=(row,))


def test_a_line_says_which_version_sampled_which_tokens_of_a_group(tmp_path: Path) -> None:
    path = tmp_path / "trained_groups.jsonl"
    log = TrainedGroupsLog(path)
    log.log(2, [group("a", scheduled_version=1)])
    (line,) = read_rows(path)
    assert (line["step"], line["trained_version"], line["scheduled_version"]) == (3, 2, 1)
    assert (line["uid"], line["epoch"], line["admission_index"]) == ("a", 0, 7)
    (row,) = line["rows"]
    assert [span["version"] for span in row["policy_versions"]] == [0, ENVIRONMENT_VERSION, 1]
    assert (row["num_sampled_tokens"], row["num_response_tokens"]) == (2, 3)
    assert "logprobs" not in row
    log.close()


def test_tokens_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    log = TrainedGroupsLog(tmp_path / "groups.jsonl", has_tokens=True)
    log.log(1, [group("a")])
    log.close()
    (line,) = read_rows(tmp_path / "groups.jsonl")
    assert '"loss_mask": [1, 0, 1]' in (tmp_path / "groups.jsonl").read_text()
    assert line["rows"][0]["response_token_ids"] == [3, 4, 5]
    assert line["rows"][0]["logprobs"] == [-0.5, 0.0, -0.25]
    assert not {"ref_logprobs", "old_logprobs", "old_version"} & line["rows"][0].keys()


def test_recomputed_log_probs_are_recorded_with_their_version(tmp_path: Path) -> None:
    whole = group("a")
    row = replace(
        whole.trajectories[0], ref_logprobs=(-1.0, 0.0, -2.0), old_logprobs=(-0.5, 0.0, -0.125), old_version=1
    )
    log = TrainedGroupsLog(tmp_path / "groups.jsonl", has_tokens=True)
    log.log(1, [replace(whole, trajectories=(row,))])
    log.close()
    (line,) = read_rows(tmp_path / "groups.jsonl")
    (found,) = line["rows"]
    assert (found["old_version"], found["old_logprobs"]) == (1, [-0.5, 0.0, -0.125])
    assert found["ref_logprobs"] == [-1.0, 0.0, -2.0]


def test_a_resumed_record_drops_steps_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    log = TrainedGroupsLog(path)
    for version in range(4):
        log.log(version, [group(f"p{version}")])
    log.close()
    TrainedGroupsLog(path, resume_step=2).close()
    assert len(read_rows(path)) == 4, "nothing was taken up"
    resumed = TrainedGroupsLog(path, resume_step=2)
    resumed.begin()
    assert [line["step"] for line in read_rows(path)] == [1, 2]
    resumed.log(2, [group("again")])
    resumed.close()
    assert [(line["step"], line["uid"]) for line in read_rows(path)] == [(1, "p0"), (2, "p1"), (3, "again")]


def test_the_trainer_records_every_group_it_trained_once(tmp_path: Path) -> None:
    recorded: list[tuple[int, str]] = []

    async def main() -> None:
        settings = SimulationSettings(num_steps=5, mini_batch_size=4, num_prompts=20, num_epochs=1)
        simulation = Simulation(
            settings, log_groups=lambda version, groups: recorded.extend((version, group.uid) for group in groups)
        )
        await simulation.trainer.run()

    run_in_virtual_time(main())
    assert [version for version, _ in recorded] == [step for step in range(5) for _ in range(4)]
    assert {uid for _, uid in recorded} == {f"p{i}" for i in range(20)}
