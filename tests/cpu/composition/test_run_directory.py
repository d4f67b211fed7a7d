"""What a run goes on from, and that no record of a run is lost by it, whatever is asked for."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from skyrl_async.checkpoint.checkpointer import Checkpointer, TrainerState
from skyrl_async.composition.run_directory import checkpoint_to_resume, set_aside_records
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import CheckpointError, ConfigError
from skyrl_async.main import run
from skyrl_async.metrics.tracker import read_rows
from skyrl_async.record.ended import EndedGroup, Outcome
from skyrl_async.record.files import DIRECTORY as SAMPLES
from skyrl_async.record.files import read_samples
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.types import Group
from tests.cpu.quick_config import config_of

LATEST, FROM_PATH, EVAL_ONLY = (
    "trainer.resume_mode=latest",
    "trainer.resume_mode=from_path",
    "trainer.eval_only=true",
)


def run_in(
    directory: Path, *, steps: Sequence[int] = (), checkpoints: Sequence[int] = (), has_finished: bool = False
) -> Path:
    """What a run leaves that logged so many steps and wrote these checkpoints."""
    directory.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "time_s": 1.0 * step}) + "\n" for step in steps]
    (directory / "metrics.jsonl").write_text("".join(lines))
    record = SampleRecord(directory / SAMPLES)
    for step in steps:
        group = Group(uid=f"p{step}", admission_index=step, scheduled_version=0, trajectories=())
        record.add(EndedGroup(group=group, outcome=Outcome.FAILED, step=step, failed=[0], failure=OSError("it broke")))
    record.close()
    (directory / "config.yaml").write_text("trainer: {eval_only: false}\n")
    if has_finished:
        (directory / "summary.json").write_text("{}")
        (directory / "policy").mkdir()
    for step in checkpoints:
        state = TrainerState(step=step, next_admission_index=0, dataloader={}, groups=(), totals={})
        asyncio.run(Checkpointer(directory / "checkpoints", max_to_keep=0).write(ModelledPolicy(), state))
    return directory


def config_in(run_dir: Path, *overrides: str) -> Config:
    return config_of(f"trainer.output_dir={run_dir}", *overrides)


def from_path(path: Path) -> list[str]:
    return [FROM_PATH, f"trainer.resume_path={path}"]


def resumed_step(run_dir: Path, *overrides: str) -> int | None:
    """By ``resume_mode``, with what it sets aside set aside."""
    config = config_in(run_dir, *overrides)
    start = checkpoint_to_resume(config, run_dir)
    set_aside_records(config, run_dir, start)
    return start.state.step if start is not None else None


def files_in(directory: Path) -> dict[str, bytes]:
    ignored = ("run.log", "run.lock")
    files = {p for p in directory.rglob("*") if p.is_file() and p.name not in ignored and "policy_dir" not in p.parts}
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def steps_in(directory: Path) -> list[list[int]]:
    return [
        [row["step"] for row in read_rows(directory / "metrics.jsonl")],
        read_samples(directory)["step"].to_pylist(),
    ]


@pytest.mark.parametrize("has_finished", [True, False])
def test_an_evaluation_of_a_run_without_checkpoints_is_refused_and_leaves_its_record(
    tmp_path: Path, has_finished: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_in(tmp_path / "run", steps=range(1, 41), has_finished=has_finished)
    before = files_in(run_dir)
    assert run(config_in(run_dir, LATEST, EVAL_ONLY), []) == 2
    said = capsys.readouterr().err
    assert (
        f"trainer.resume_mode=latest finds no checkpoint in {run_dir}/checkpoints, and trainer.eval_only=true" in said
    )
    assert "trainer.output_dir to a new directory" in said
    assert (f"policy.path to {run_dir}/policy" in said) == has_finished
    assert files_in(run_dir) == before


def test_a_finished_run_without_checkpoints_is_not_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_in(tmp_path / "run", steps=range(1, 41), has_finished=True)
    before = files_in(run_dir)
    assert run(config_in(run_dir, LATEST), []) == 2
    said = capsys.readouterr().err
    assert "to continue the finished run there; set trainer.resume_mode=none, trainer.output_dir to a new" in said
    assert files_in(run_dir) == before


def test_a_run_killed_before_its_first_checkpoint_begins_again_and_its_record_is_kept(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run", steps=[0, 1, 2])
    (run_dir / "tensorboard").mkdir()
    before = files_in(run_dir)
    config = config_in(run_dir, LATEST)
    assert checkpoint_to_resume(config, run_dir) is None
    said = set_aside_records(config, run_dir, None)
    assert said is not None and "ended before its first checkpoint" in said and f"{run_dir}/set_aside_1" in said
    assert files_in(run_dir) == {f"set_aside_1/{name}": text for name, text in before.items()}
    assert set_aside_records(config, run_dir, None) is None
    run_in(run_dir, steps=[1])
    assert "set_aside_2" in (set_aside_records(config, run_dir, None) or "")


@pytest.mark.parametrize("steps", [(), (0,)], ids=["nothing", "an evaluation"])
def test_no_record_of_a_run_that_trained_no_step_is_set_aside(tmp_path: Path, steps: tuple[int, ...]) -> None:
    run_dir = run_in(tmp_path / "run", steps=steps)
    assert resumed_step(run_dir, LATEST) is None
    assert not (run_dir / "set_aside_1").exists()


@pytest.mark.parametrize(
    "overrides",
    [(LATEST,), (LATEST, EVAL_ONLY), ("from_path",), ("from_path", EVAL_ONLY)],
    ids=["latest", "latest, evaluated", "back", "back, evaluated"],
)
def test_a_record_is_cut_only_when_the_checkpoint_is_resumed(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """The run fails on its way there, before Ray starts."""
    run_dir = run_in(tmp_path / "run", steps=range(1, 48), checkpoints=[20, 40])
    given = from_path(run_dir / "checkpoints" / "global_step_20")
    chosen = [each for name in overrides for each in (given if name == "from_path" else [name])]
    failing = [
        "generator.entrypoint=nowhere_to_be_found:f",
        f"cache_dir={tmp_path / 'policy_dir'}",
        "logging.tensorboard=false",
    ]
    before = {name: held for name, held in files_in(run_dir).items() if not name.startswith("checkpoints")}
    assert run(config_in(run_dir, *chosen, *failing), []) == 1
    after = files_in(run_dir)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("is_evaluation", [True, False])
def test_contract_7_a_checkpoint_of_another_run_is_not_resumed_into_a_run_and_leaves_it_whole(
    tmp_path: Path, is_finished: bool, is_evaluation: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run_in(tmp_path / "a", checkpoints=[20]) / "checkpoints" / "global_step_20"
    run_dir = run_in(
        tmp_path / "b", steps=range(1, 41), checkpoints=() if is_finished else [20, 40], has_finished=is_finished
    )
    before = files_in(run_dir)
    overrides = [*from_path(other), f"trainer.eval_only={is_evaluation}"]
    assert run(config_in(run_dir, *overrides), []) == 2
    said = capsys.readouterr().err
    assert f"trainer.output_dir={run_dir} already holds a run, and trainer.resume_path={other} is none of its" in said
    assert "choose another trainer.output_dir, or continue" in said
    assert files_in(run_dir) == before


def test_a_run_that_began_with_another_s_checkpoint_begins_with_it_again_until_it_has_its_own(tmp_path: Path) -> None:
    other = run_in(tmp_path / "a", checkpoints=[20]) / "checkpoints" / "global_step_20"
    run_dir = run_in(tmp_path / "b", steps=[20, 21])
    assert resumed_step(run_dir, *from_path(other)) == 20
    assert steps_in(run_dir / "set_aside_1") == [[20, 21], [20, 21]]
    assert resumed_step(run_dir, LATEST, f"trainer.resume_path={other}") == 20
    run_in(run_dir, steps=[21, 22], checkpoints=[22])
    assert resumed_step(run_dir, LATEST, f"trainer.resume_path={other}") == 22
    assert steps_in(run_dir) == [[21, 22], [21, 22]]


def test_contract_7_a_run_that_goes_back_keeps_what_came_later_and_goes_on_from_there_when_it_is_killed(
    tmp_path: Path,
) -> None:
    run_dir = run_in(tmp_path / "run", steps=range(1, 48), checkpoints=[10, 20, 30, 40])
    (run_dir / "config_to_step_30.yaml").touch(mode=0o600)
    config = config_in(run_dir, *from_path(run_dir / "checkpoints" / "global_step_20"))
    said = set_aside_records(config, run_dir, checkpoint_to_resume(config, run_dir))
    aside = run_dir / "checkpoints" / "set_aside_1"
    assert said is not None and "goes back to step 20: global_step_40, global_step_30 and" in said
    assert str(aside) in said and f"{run_dir}/set_aside_1" in said
    assert sorted(path.name for path in aside.iterdir()) == ["global_step_30", "global_step_40"]
    assert steps_in(run_dir / "set_aside_1") == [[*range(1, 48)]] * 2 == steps_in(run_dir), "cut when it is resumed"
    assert (run_dir / "set_aside_1" / "config_to_step_30.yaml").stat().st_mode & 0o777 == 0o600
    assert resumed_step(run_dir, LATEST) == 20
    assert set_aside_records(config, run_dir, checkpoint_to_resume(config, run_dir)) is None, "it is there already"

    back = config_in(run_dir, *from_path(aside / "global_step_40"))
    with pytest.raises(ConfigError, match=r"already holds a run, and .*set_aside_1/global_step_40 is none of its"):
        checkpoint_to_resume(back, run_dir)


@pytest.mark.parametrize("num_renames", range(4))
def test_contract_7_a_run_killed_while_it_goes_back_can_be_resumed_and_has_its_record(
    tmp_path: Path, num_renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    run_dir = run_in(tmp_path / "run", steps=range(1, 41), checkpoints=[20, 30, 40])
    left, rename = [num_renames], Path.rename

    def rename_or_die(self: Path, target: Path) -> Path:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return rename(self, target)

    overrides = from_path(run_dir / "checkpoints" / "global_step_20")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_or_die)
        try:
            resumed_step(run_dir, *overrides)
        except Killed:
            assert num_renames < 2
    assert resumed_step(run_dir, LATEST) == (40, 30, 20, 20)[num_renames]
    assert steps_in(run_dir) == [[*range(1, 41)]] * 2
    assert resumed_step(run_dir, *overrides) == 20
    assert resumed_step(run_dir, LATEST) == 20


def test_an_evaluation_of_an_earlier_checkpoint_moves_nothing(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run", steps=range(1, 41), checkpoints=[20, 40])
    before = files_in(run_dir)
    assert resumed_step(run_dir, *from_path(run_dir / "checkpoints" / "global_step_20"), EVAL_ONLY) == 20
    assert files_in(run_dir) == before


def test_a_new_run_is_refused_where_there_is_a_checkpoint_and_no_line_was_logged(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run", checkpoints=[0])
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="already holds a run; choose another"):
        checkpoint_to_resume(config_in(run_dir), run_dir)


def test_what_cannot_be_set_aside_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run_in(tmp_path / "run", steps=[1])

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=rf"what {run_dir} holds cannot be set aside: .*Permission denied"):
        set_aside_records(config_in(run_dir, LATEST), run_dir, None)


def test_the_log_shows_no_key_that_the_command_line_has(tmp_path: Path) -> None:
    overrides = [
        "server.api_key=sk-one",
        "++server.api_key='sk-two, sk-three'",
        'server={"api_key": "sk-\\"four}", port: 1}',
        "trainer={algorithm:{distillation:{api_key:sk-five,top_k:2}},num_steps:3}",
    ]
    failing = ["generator.entrypoint=nowhere_to_be_found:f", "logging.tensorboard=false"]
    assert run(config_in(tmp_path, *failing), overrides) == 1
    log = (tmp_path / "run.log").read_text()
    assert "sk-" not in log
    assert 'server={"api_key": ***, port: 1}' in log and "api_key:***,top_k:2}},num_steps:3}" in log


def test_what_is_set_aside_is_said_on_standard_error_and_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_in(tmp_path / "run", steps=[1])
    failing = ["generator.entrypoint=nowhere_to_be_found:f", "logging.tensorboard=false"]
    assert run(config_in(run_dir, LATEST, *failing), []) == 1
    assert "its record so far is kept in" in capsys.readouterr().err
    assert "its record so far is kept in" in (run_dir / "run.log").read_text()
