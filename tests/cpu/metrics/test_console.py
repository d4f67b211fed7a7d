"""What a person watching sees, on a terminal and in a pipe."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console as Output

from skyrl_async.inference.fleet import Outage
from skyrl_async.inference.pool import EnginePool
from skyrl_async.metrics.alarms import FAILED
from skyrl_async.metrics.console import Console
from skyrl_async.metrics.logs import run_logging
from skyrl_async.metrics.summary import summary_table
from skyrl_async.rollout.watchdog import Watchdog
from skyrl_async.runtime.progress import RolloutStatus
from skyrl_async.runtime.stages import StageState, StageStatus
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.models import ModelledEngine

VALUES = {
    "reward/mean": 0.614,
    "async/staleness_mean": 1.25,
    "async/staleness_max": 4.0,
    "async/buffer_groups": 3.0,
    "async/running_groups": 16.0,
    "generate/tokens_per_second": 4210.0,
    "trainer/idle_frac": 0.12,
}


class Clock:
    """Time that goes on only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(total_steps: int | None = 45, *, enabled: bool = True) -> tuple[Console, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    output = Output(file=file, width=100, force_terminal=False)
    return Console(enabled, total_steps, output=output, clock=clock), file, clock


def where(seconds: float) -> list[StageStatus]:
    generate = StageStatus(name="generate", state=StageState.PROCESSING, item="p7", seconds=seconds, num_items=4)
    train = StageStatus(name="train", state=StageState.WAITING_FOR_INPUT, item="", seconds=0.5, num_items=1)
    return [generate, train]


def test_without_a_terminal_a_line_names_every_stage_every_twenty_seconds() -> None:
    console, file, clock = plain()
    with console:
        console.watch(lambda: where(clock.now))
        for clock.now in (1.0, 21.0, 22.0, 42.0):
            console.log(3, VALUES)
    assert [line for line in file.getvalue().splitlines() if line.startswith("[stages")] == [
        f"[stages: generate: processing p7 and 3 more ({seconds} s); train: waiting for input (0.5 s)]"
        for seconds in ("21.0", "42.0")
    ]


def test_a_terminal_has_a_row_for_every_stage() -> None:
    console, file = terminal()
    with console:
        console.watch(lambda: where(1.2))
        console.log(3, VALUES)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    rows = {" ".join(line.split()) for line in shown.splitlines()}
    assert {"generate processing p7 and 3 more (1.2 s)", "train waiting for input (0.5 s)"} <= rows


def test_several_lines_of_a_step_are_one_for_an_alarm() -> None:
    console, file, _ = plain()
    for step in (3, 4, 5, 6):
        for _ in range(3):
            console.log(step, {"engines/slowest_frac": 0.3})
    assert "alarm" not in file.getvalue()
    console.log(7, {"engines/slowest_frac": 0.3})
    assert "alarm" in file.getvalue()


def test_an_evaluation_of_an_earlier_step_does_not_take_the_progress_bar_back() -> None:
    console, file = terminal()
    with console:
        console.log(8, VALUES)
        console.log(5, {"reward/eval": 0.9})
    assert (
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).rpartition("starting")[2].split("/45")[0].endswith(" 8")
    )


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(True, 45, output=Output(file=file, width=120, force_terminal=True)), file


def test_without_a_terminal_each_step_is_a_line_with_the_main_figures() -> None:
    console, file, _ = plain()
    with console:
        console.log(3, VALUES)
    assert file.getvalue() == (
        "step 3/45 | reward 0.61 | eval - | staleness mean/max 1.2/4 | buffered/running 3/16 | tokens/s 4,210 | "
        "trainer idle 12%\n"
    )


def test_lines_are_throttled_but_evaluations_and_the_last_step_always_show() -> None:
    console, file, clock = plain(total_steps=9)
    for step in range(1, 10):
        clock.now += 0.5
        evaluation = {"reward/eval": 0.9} if step == 3 else {}
        console.log(step, {"reward/mean": 0.5, **evaluation})
    assert [line.split(" ")[1] for line in file.getvalue().splitlines()] == ["1/9", "3/9", "7/9", "9/9"]


def test_an_evaluation_stays_in_view_until_the_next() -> None:
    console, file, clock = plain(total_steps=None)
    console.log(1, {"reward/eval": 0.9})
    clock.now += 10
    console.log(2, {"reward/mean": 0.5})
    assert file.getvalue().splitlines()[-1].startswith("step 2 | reward 0.50 | eval 0.90 | ")


def test_a_phase_that_counts_up_is_printed_every_few_seconds_and_a_new_one_at_once() -> None:
    console, file, clock = plain()
    for percent in range(0, 100, 10):
        console.phase(f"warm start {percent} %")
        clock.now += 1
    console.phase("booting engines")
    assert file.getvalue().splitlines() == ["[warm start 0 %]", "[warm start 50 %]", "[booting engines]"]


def test_a_message_is_printed_as_it_is_whatever_brackets_it_has() -> None:
    console, file, _ = plain()
    console.message("wrote [bold]/x/y[/bold]")
    assert file.getvalue() == "wrote [bold]/x/y[/bold]\n"


def test_a_console_that_is_off_prints_nothing_but_the_summary() -> None:
    console, file, _ = plain(enabled=False)
    with console:
        console.phase("booting engines")
        console.log(3, VALUES)
        console.message("hello")
        assert file.getvalue() == ""
    console.summary(summary_table({"reward_after": 0.97}))
    assert "held-out reward after" in file.getvalue()
    assert "0.970" in file.getvalue()


def test_a_terminal_gets_a_display_with_bar_phase_figures_and_reward_curve() -> None:
    console, file = terminal()
    with console:
        console.phase("training [4 engines]")
        for step, reward in enumerate((0.1, 0.5, 0.9), start=1):
            console.log(step, VALUES | {"reward/mean": reward})
        console.message("checkpoint at step 3")
    text = file.getvalue()
    for part in (
        "training [4 engines]",
        "3/45",
        "0.90",
        "1.2/4",
        "3/16",
        "4,210",
        "12%",
        "▁▅█",
        "checkpoint at step 3",
    ):
        assert part in text, part


def test_a_step_may_end_while_another_thread_draws_the_rewards() -> None:
    console, file = terminal()

    class LoggedWhileCompared(float):
        def __lt__(self, other: float) -> bool:
            console.log(3, VALUES)
            return super().__lt__(other)

    with console:
        for step in (1, 2):
            console.log(step, {"reward/mean": LoggedWhileCompared(0.5)})
    assert "3/45" in file.getvalue()


def test_a_terminal_is_left_in_order_when_the_run_fails() -> None:
    console, file = terminal()
    with pytest.raises(ValueError, match="boom"), console:
        raise ValueError("boom")
    show_cursor = "\x1b[?25h"
    assert file.getvalue().rstrip().endswith(show_cursor)


def test_stuck_work_is_a_line_without_a_terminal_and_stays_on_a_terminal_until_it_moves() -> None:
    console, file, _ = plain()
    console.stuck([f"p{i} [turn 2] (generating for {90 - i} s)" for i in range(5)])
    console.stuck([])
    assert file.getvalue() == (
        "[stuck: p0 [turn 2] (generating for 90 s); p1 [turn 2] (generating for 89 s); p2 [turn 2] (generating for 88 s); "
        "and 2 more]\n"
    )
    display, shown = terminal()
    with display:
        display.log(3, VALUES)
        display.stuck(["p3 sample 1 (in environment step for 75 s)"])
    words = re.sub(r"\x1b\[[\d;?]*\w", "", shown.getvalue())
    assert "stuck p3 sample 1 (in environment step for 75 s)" in words
    display, shown = terminal()
    with display:
        display.stuck(["p3 (generating for 75 s)"])
        display.stuck([])
    assert "p3" not in shown.getvalue().rpartition("starting")[2]


@pytest.mark.parametrize("has_console", [True, False])
def test_an_outage_and_stuck_work_are_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_console: bool
) -> None:
    """By the console where there is one, else on standard error; and in the log."""
    status = RolloutStatus(uid="p3", phase="in environment step", seconds=75.0, total_seconds=80.0)
    console = Console(has_console, None)

    async def main() -> None:
        engine = ModelledEngine("engine-0", num_tokens_of=lambda prompt, seed: 1)
        pool = EnginePool([engine], wait_s=None)
        outage = Outage(pool, 900.0, console.message)
        pool.drop(engine, "it was killed")
        outage.update()
        outage.end()
        watchdog = Watchdog(lambda: [[status]], lambda: [], threshold_s=60.0, log=lambda _: None, show=console.stuck)
        watchdog.check()

    with run_logging(tmp_path / "run.log", "info", has_console=has_console):
        run_in_virtual_time(main())
    said, log = capsys.readouterr(), (tmp_path / "run.log").read_text()
    for line in ("no inference engine is left", "p3 (in environment step for 75 s)"):
        assert (said.out.count(line), said.err.count(line)) == ((1, 0) if has_console else (0, 1))
        assert log.count(line) == 1


def test_a_new_alarm_is_a_line_and_one_that_lasts_is_said_again_with_the_summary() -> None:
    console, file, _ = plain()
    with console:
        for step in range(1, 10):
            console.log(step, {"trainer/idle_frac": 0.75})
    console.summary("the end")
    shown = [line for line in file.getvalue().splitlines() if "alarm" in line]
    assert len(shown) == 2 and shown[0].startswith(
        "[alarm: The trainer waits for generation for 75% of the step (since"
    )
    assert shown[1].startswith("alarm: The trainer waits")


def test_an_alarm_keeps_its_step_however_long_it_lasts_and_a_slow_engine_is_named() -> None:
    console, file, _ = plain()
    console.watch(list, engines=lambda: {name: {"tokens_per_call_second": 9.0 + len(name)} for name in ("b", "long")})
    with console:
        for step in range(1, 300):
            console.log(step, {"engines/slowest_frac": 0.3})
    console.summary("the end")
    last = [line for line in file.getvalue().splitlines() if line.startswith("alarm")]
    assert len(last) == 1 and "that the others do: b (since step 3;" in last[0]


def test_an_alarm_on_failing_samples_says_why_they_fail_and_commands_no_terminal() -> None:
    console, file, _ = plain()
    console.watch(list, lambda: {FAILED: ["OSError: gone \x1b[2J"]})
    with console:
        for step in range(1, 10):
            console.log(step, {"generate/failed_frac": 0.5})
    assert "[alarm: 50% of the samples fail, 100% of them with OSError: gone \\x1b[2J (since" in file.getvalue()


def test_a_terminal_shows_the_newest_alarm() -> None:
    console, file = terminal()
    with console:
        for step in range(1, 10):
            console.log(step, {"trainer/idle_frac": 0.75, "generate/truncated_frac": 0.5 if step > 3 else 0.0})
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).split("alarm")[-1]
    assert last.startswith(" The token budget cuts 50% of the answers")
