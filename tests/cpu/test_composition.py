"""How values of the configuration reach the parts."""

from pathlib import Path

import pytest

from skyrl_async.composition.data import Prompts, num_planned_steps
from skyrl_async.composition.processes import _training_settings, write_private
from skyrl_async.config.load import from_overrides
from skyrl_async.training.optimizer import lr_factor
from skyrl_async.types import Prompt


def prompts(num: int) -> Prompts:
    message = {"role": "user", "content": "?"}
    train = tuple(Prompt(uid=f"p{i}", messages=(message,), env_class="x") for i in range(num))
    return Prompts(train=train, held_out=())


@pytest.mark.parametrize(
    ("num_steps", "num_epochs", "expected"), [("null", 3, 8), ("5", 3, 5), ("50", 3, 8), ("5", 1000, 5)]
)
def test_a_run_has_the_steps_asked_for_or_those_its_epochs_hold(num_steps: str, num_epochs: int, expected: int) -> None:
    config = from_overrides(
        f"trainer.num_steps={num_steps}", f"trainer.num_epochs={num_epochs}", "trainer.policy_mini_batch_size=4"
    )
    assert num_planned_steps(config, prompts(10)) == expected


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_falling_learning_rate_reaches_zero_at_the_end_of_a_run_that_epochs_end(schedule: str) -> None:
    config = from_overrides("trainer.num_steps=null", "trainer.num_epochs=2", f"training.lr_schedule={schedule}")
    num_steps = num_planned_steps(config, prompts(40))
    settings = _training_settings(config, Path("unused"), num_steps)
    factors = [
        lr_factor(step, schedule=settings.lr_schedule, num_warmup_steps=0, num_steps=settings.num_steps)
        for step in range(num_steps + 1)
    ]
    assert num_steps == 10
    assert factors[0] == 1.0 and factors[-1] == pytest.approx(0.0) and factors == sorted(factors, reverse=True)


def test_truncated_sampling_is_warned_of_because_it_biases_the_ratios(caplog: pytest.LogCaptureFixture) -> None:
    _training_settings(from_overrides("generator.sampling.top_p=0.9"), Path("unused"), 1)
    assert "generator.sampling.top_p=0.9 truncates" in caplog.text
    caplog.clear()
    _training_settings(from_overrides(), Path("unused"), 1)
    assert caplog.text == ""


def test_a_private_file_is_its_owner_s_whatever_was_there(tmp_path: Path) -> None:
    (tmp_path / "endpoint.json").write_text("older, and for everybody")
    write_private(tmp_path / "endpoint.json", "secret")
    assert (tmp_path / "endpoint.json").read_text() == "secret"
    assert (tmp_path / "endpoint.json").stat().st_mode & 0o77 == 0
