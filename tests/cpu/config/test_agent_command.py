"""An agent's command at the end of the command line, after ``--``."""

import shlex
from pathlib import Path

import pytest

from skyrl_async.config.command_line import run_cli
from skyrl_async.config.schema.generator import GeneratorKind
from skyrl_async.config.schema.run import Config

WORDS = [
    *("python", "agent.py", "--config", "-h", "it's", 'a "b", [x', "${HOME}", "$X", "a\nb"),
    *("\\", "", "null", "--", "x=1,2"),
]


def config_of(*argv: str) -> Config:
    seen: list[Config] = []

    def run(config: Config, overrides: list[str]) -> int:
        seen.append(config)
        return 0

    assert run_cli(run, argv) == 0
    return seen[0]


def refusal_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that refuses a command line."""
    assert run_cli(lambda config, overrides: pytest.fail("started"), argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("settings", [["trainer.seed=3", "generator=agent"], ["trainer.seed=3"]])
def test_words_after_two_dashes_are_the_command_of_an_agent_as_they_were_typed(settings: list[str]) -> None:
    config = config_of(*settings, "--", *WORDS)
    assert (config.trainer.seed, config.generator.kind) == (3, GeneratorKind.agent)
    assert shlex.split(str(config.generator.command)) == WORDS


def test_the_command_is_kept_by_a_config_file_and_replaced_by_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(lambda config, overrides: 1, ["--cfg", "job", "--", *WORDS]) == 0
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    assert shlex.split(str(config_of("--config", str(file)).generator.command)) == WORDS
    assert config_of("--config", str(file), "--", "python", "other.py").generator.command == "python other.py"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--"], "-- must be followed by the agent's command, such as: -- python agent.py"),
        (["generator=agent", "--", ""], "-- must be followed by the agent's command"),
        (["generator=gym_http", "--", "x"], "generator must be agent with a command after --, got 'gym_http'"),
        (["generator.kind=gym", "--", "x"], "generator.kind must be agent with a command after --, got 'gym'"),
        (["generator.command=y", "--", "x"], "generator.command must not be given beside a command after --"),
        (["generator.entrypoint=a:b", "--", "x"], "generator.entrypoint must not be given beside a command after --"),
        (["generator.harness=codex", "--", "x"], "generator.harness must not be given beside a command after --"),
        (["--", "x", "trainer.num_steps=4"], "trainer.num_steps=4 must stand before --"),
        (["--", "x", "task=relay"], "task=relay must stand before --"),
        (["--from-skyrl", "run.sh", "--", "x"], "--from-skyrl takes a script alone, got -- too"),
        (["generator=agent"], "got none of them; a command may follow at the end, after --"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused_with_what_to_change(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal_of(capsys, *argv)
