"""What a run directory keeps of the configuration, and what a run that goes on with other settings says and leaves."""

from pathlib import Path

import pytest
import yaml

from skyrl_async.composition.run_directory import RunConfigFile
from skyrl_async.config.load import compose_config, from_overrides, load, without_secrets
from tests.cpu.quick_config import config_of


def lr_of(file: Path) -> float:
    return yaml.safe_load(file.read_text())["training"]["lr"]


def test_a_new_run_keeps_its_configuration_at_once_for_its_owner_only(tmp_path: Path) -> None:
    kept = RunConfigFile(tmp_path, config_of("training.lr=3e-4"), None)
    assert kept.changes() == []
    assert lr_of(tmp_path / "config.yaml") == 3e-4
    assert (tmp_path / "config.yaml").stat().st_mode & 0o077 == 0


def test_a_resumed_run_lists_changed_settings_and_replaces_its_configuration_file(tmp_path: Path) -> None:
    RunConfigFile(tmp_path, config_of("training.lr=3e-4", "server.api_key=one"), None)
    resumed = config_of("trainer.max_staleness_steps=1", "server.api_key=two", "trainer.resume_mode=none")
    kept = RunConfigFile(tmp_path, resumed, 40)
    assert sorted(kept.changes()) == ["trainer.max_staleness_steps=1 (was None)", "training.lr=0.0008 (was 0.0003)"]
    assert lr_of(tmp_path / "config.yaml") == 3e-4, "a run that is refused on its way changes nothing"
    kept.replace()
    assert lr_of(tmp_path / "config.yaml") == 8e-4
    assert lr_of(tmp_path / "config_to_step_40.yaml") == 3e-4
    assert RunConfigFile(tmp_path, resumed, 50).changes() == []


def test_of_settings_tried_one_after_another_from_a_step_those_that_held_up_to_it_are_kept(tmp_path: Path) -> None:
    def kept_after(step: int | None, lr: float) -> dict[str, float]:
        file = RunConfigFile(tmp_path, config_of(f"training.lr={lr}"), step)
        file.replace()
        return {path.stem: lr_of(path) for path in tmp_path.iterdir()}

    kept_after(None, 1e-4)
    for lr in (2e-4, 3e-4):
        assert kept_after(40, lr) == {"config": lr, "config_to_step_40": 1e-4}, "no step of the first one is left"
    assert kept_after(60, 4e-4) == {"config": 4e-4, "config_to_step_40": 1e-4, "config_to_step_60": 3e-4}
    assert kept_after(50, 5e-4) == {"config": 5e-4, "config_to_step_40": 1e-4, "config_to_step_50": 3e-4}
    assert kept_after(20, 6e-4) == {"config": 6e-4, "config_to_step_20": 1e-4}
    assert kept_after(10, 1e-4) == {"config": 1e-4}


@pytest.fixture(scope="module")
def default_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    RunConfigFile(directory, from_overrides(), None)
    return directory / "config.yaml"


@pytest.mark.parametrize(
    ("asked", "bound"),
    [
        ("trainer.schedule=sync", 0),
        pytest.param("trainer.schedule=one_step_off", 1, marks=pytest.mark.slow),
        pytest.param("trainer.generate_ahead_steps=2", 2, marks=pytest.mark.slow),
        ("trainer.max_staleness_steps=3", 3),
    ],
)
def test_a_bound_that_nobody_set_does_not_stand_against_another_schedule_or_bound(
    asked: str, bound: int, default_file: Path
) -> None:
    assert default_file.read_text().startswith("# the staleness bound is 4\n")
    assert load(compose_config([asked], default_file)).trainer.staleness_bound == bound


def test_trackers_are_told_the_bound_that_follows_from_the_schedule_and_no_key() -> None:
    of_teacher = "trainer.algorithm.distillation.api_key=secret"
    told = without_secrets(from_overrides("trainer.schedule=one_step_off", "server.api_key=secret", of_teacher))
    assert told["trainer"]["max_staleness_steps"] == 1 and "secret" not in str(told)


def test_what_is_added_to_a_dictionary_or_left_out_of_it_is_a_change_and_no_key_of_a_teacher_is_shown(
    tmp_path: Path,
) -> None:
    of_teacher = "trainer.algorithm.distillation.api_key="
    RunConfigFile(tmp_path, config_of("engine.extra_args.a=1", f"{of_teacher}sk-one"), None)
    resumed = config_of("trainer.algorithm.distillation.teachers.t=http://h/v1", f"{of_teacher}sk-two")
    kept = RunConfigFile(tmp_path, resumed, 40)
    added = "trainer.algorithm.distillation.teachers.t=http://h/v1 (was None)"
    assert kept.changes() == [added, "engine.extra_args.a=None (was 1)"]
    kept.replace()
    assert (tmp_path / "config_to_step_40.yaml").exists()


def test_no_configuration_is_kept_aside_where_nothing_changes(tmp_path: Path) -> None:
    RunConfigFile(tmp_path, config_of(), None)
    RunConfigFile(tmp_path, config_of(), 40).replace()
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_an_evaluation_of_a_run_leaves_the_configuration_that_it_trains_with(tmp_path: Path) -> None:
    RunConfigFile(tmp_path, config_of(), None)
    RunConfigFile(tmp_path, config_of("trainer.eval_only=true"), 40).replace()
    assert not yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["eval_only"]


def test_a_file_that_cannot_be_read_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [")
    kept = RunConfigFile(tmp_path, config_of(), 40)
    assert kept.changes() == []
    kept.replace()
    assert lr_of(tmp_path / "config.yaml") == 8e-4
