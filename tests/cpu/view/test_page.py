"""The page in a real Chromium, served by the real command. Skipped where no Chromium is installed."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import skyrl_async.view
from benchmarks.view_page import CHROMIUM, FLAGS
from skyrl_async.chat.turns import RowTurn
from skyrl_async.metrics.trace import Trace
from skyrl_async.record.ended import Outcome
from skyrl_async.record.files import DIRECTORY, TOKENIZER
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.types import ToolCall, Trajectory
from skyrl_async.view.__main__ import main
from tests.cpu.forked_workers import forking_executable
from tests.cpu.record.test_sample_record import ended, row
from tests.cpu.view.test_run import append
from tests.patience import PATIENCE_S

COMMAND = Path(skyrl_async.view.__file__).with_name("__main__.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_workers"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]

expect.set_options(timeout=20_000)  # a busy machine draws late

EVIL = '<img src=x onerror="window.wasRun=1"><script>window.wasRun=1</script>\x1b[2J\u202eabc'
TOKENIZER_OF_THE_RUN = train_tokenizer(["What is 2+2? Done 0123456789"])
WORDS = TOKENIZER_OF_THE_RUN("What is 2+2? Done", add_special_tokens=False)["input_ids"]


def answer(*, reward: float, versions: list[int], branch_at: int = len(WORDS), sample: int = 0) -> Trajectory:
    """``WORDS`` behind a prompt of two tokens; from ``branch_at`` on it says something else."""
    num = len(WORDS)
    return Trajectory(
        prompt_token_ids=(1, 2),
        response_token_ids=[token if i < branch_at else WORDS[0] for i, token in enumerate(WORDS)],
        loss_mask=[True] * num,
        logprobs=[-0.25] * num,
        old_logprobs=[-0.5] * num,
        old_version=max(versions),
        versions=[versions[i * len(versions) // num] for i in range(num)],
        reward=reward,
        sample_index=sample,
    )


def turns(row: Trajectory) -> list[RowTurn]:
    end = 2 + len(row.response_token_ids)
    call = ToolCall(id="call_1", name="add", arguments=EVIL)
    return [
        RowTurn("tool", "two words", 0, 2, tool_call_id="call_0", name="look"),
        RowTurn("assistant", "What is 2+2? Done" if end > 5 else EVIL, 2, end, (call,), engines=("engine-1",)),
    ]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "first"
    record = SampleRecord(run_dir / DIRECTORY, turns_of=turns)
    rows = [
        answer(reward=1.0, versions=[1, 2]),
        answer(reward=0.0, versions=[2], sample=1),
        answer(reward=0.0, versions=[2], sample=1, branch_at=5),
    ]
    record.add(ended("sum-1", 3, Outcome.TRAINED, *rows))
    record.add(ended("evil-<b>", 4, Outcome.FILTERED, row(), reason="<i>no signal</i>"))
    record.add(ended("sum-3", 4, Outcome.FAILED, failed=[0], failure=OSError("disk gone")))
    record.close()
    TOKENIZER_OF_THE_RUN.backend_tokenizer.save(str(run_dir / TOKENIZER))
    bad = {"trainer/idle_frac": 0.75}
    figures = ({"step": n, "time_s": 2.0 * n, "reward/mean": n / 10, "timing/step": 2.0, **bad} for n in range(1, 9))
    append(run_dir / "metrics.jsonl", *figures)
    (run_dir / "config.yaml").write_text("training:\n  lr: 0.001\n")
    trace = Trace(run_dir / "trace", lambda: 0.0)
    trace.past_span("group", "generation", 1.0, 7.0, uid="sum-1")
    trace.past_span("wait_for_groups", "waiting", 2.0, 7.5, step=3)
    trace.past_span("load", "engines/engine-0", 1.0, 2.0, version=3, acknowledge_s=0.5)
    trace.past_span("pause", "publish/pause", 1.25, 2.25, version=3)
    trace.past_span("gather", "publish", 2.5, 2.503, version=4)
    trace.past_span("death", "engines/engine-0", 4.5, 4.5, reason="killed")
    trace.past_span("restart", "engines/engine-0", 4.5, 6.0, reason="killed")
    trace.past_span("load", "engines/engine-1", 1.0, 2.0, version=3)
    trace.past_span("removal", "engines/engine-1", 3.0, 3.0)
    trace.close()
    return run_dir


@contextmanager
def served(*arguments: str | Path, **environment: str) -> Iterator[str]:
    """The address that the command prints."""
    command = [*forking_executable(), str(COMMAND), *map(str, arguments), "--port", "0"]
    environment = {"DISPLAY": "", "WAYLAND_DISPLAY": "", **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page; an error in one of its scripts fails the test."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    was_run = page.evaluate("window.wasRun")
    page.close()
    assert not errors and was_run is None


def rows_shown(page: Page) -> list[str]:
    return page.locator(".row:not(.head)").all_inner_texts()


def test_figures_are_drawn_with_what_is_wrong_first_and_follow_the_run(run_dir: Path, page: Page) -> None:
    with served(run_dir) as address:
        page.goto(address)
        expect(page.locator("#alarms")).to_contain_text(
            "The trainer waits for generation for 75% of the step, since step 3"
        )
        reward = page.locator(".panel", has_text="Reward")
        expect(reward.locator("canvas")).to_have_count(1)
        expect(reward.locator(".legend")).to_have_text("0.8 training")
        expect(page.locator(".panel", has_text="Entropy")).to_contain_text("not logged")
        append(run_dir / "metrics.jsonl", {"step": 9, "time_s": 18.0, "reward/mean": 0.95, "trainer/idle_frac": 0.0})
        expect(reward.locator(".legend")).to_have_text("0.95 training")
        expect(page.locator(".alarm")).to_have_count(0)
        drawn = page.evaluate(
            "(() => { const c = document.querySelector('.panel canvas'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; let n = 0; for (let i = 0; i < d.length; i += 4)"
            " n += d[i] < 80 && d[i + 1] > 90 && d[i + 2] > 160 && d[i + 3] > 200; return n; })()"
        )
        assert drawn > 100, "pixels in the colour of the line"


def test_a_zoom_into_a_long_run_shows_its_steps_instead_of_means(run_dir: Path, page: Page) -> None:
    rewards = ({"step": n, "time_s": 2.0 * n, "reward/mean": float(n % 2)} for n in range(9, 10_000))
    append(run_dir / "metrics.jsonl", *rewards)
    with served(run_dir) as address:
        page.goto(address)
        panel = page.locator(".panel", has_text="Reward")
        page.get_by_label("moving average").uncheck()
        expect(panel.locator(".legend")).to_have_text("0.5 training")
        box = panel.locator(".u-over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 110, box["y"] + 50, steps=3)
        with page.expect_response(lambda answer: "by=step" in answer.url) as asked:
            page.mouse.up()
        found = asked.value.json()
        assert set(found["reward/mean"]) == {0.0, 1.0} and 100 < len(found["step"]) < 2000
        page.get_by_role("button", name="whole run").click()
        expect(panel.locator(".legend")).to_have_text("0.5 training")


def test_a_run_that_writes_no_more_says_since_when(run_dir: Path, page: Page) -> None:
    with served(run_dir) as address:
        page.goto(address)
        expect(page.locator("#state")).to_contain_text("live")
        for file in run_dir.iterdir():
            os.utime(file, (time.time() - 3 * 3600,) * 2)
        expect(page.locator("#state")).to_contain_text("written 3 h ago")
        shutil.rmtree(run_dir)
        expect(page.locator("#state")).to_contain_text("stopped")
        expect(page.locator("#problem")).to_contain_text("No such file or directory")


def test_the_table_ends_with_the_window_and_shows_the_reward_on_a_phone(run_dir: Path, page: Page) -> None:
    with served(run_dir) as address:
        for width, height in ((1400, 900), (420, 900)):
            page.set_viewport_size({"width": width, "height": height})
            page.goto(f"{address}#/samples")
            expect(page.locator("#num-rows")).to_have_text("6 of 6 rows")
            assert page.evaluate("[document.body.scrollHeight, document.body.scrollWidth]") == [height, width]
        box = page.get_by_role("columnheader", name="reward").bounding_box()
        assert box is not None and box["x"] + box["width"] < 420


def test_two_runs_are_drawn_over_each_other_with_what_differs(run_dir: Path, page: Page, tmp_path: Path) -> None:
    other = tmp_path / "second"
    append(run_dir / "metrics.jsonl", {"step": 9, "time_s": 18.0, "stage/generate/waiting_for_output_frac": 0.5})
    shutil.copytree(run_dir, other)
    (other / "config.yaml").write_text("training:\n  lr: 0.002\n")
    with served(run_dir, other) as address:
        page.goto(address)
        expect(page.locator("#differences table")).to_contain_text("training.lr")
        expect(page.locator("#differences td")).to_have_text(["training.lr", "0.001", "0.002"])
        expect(page.locator(".panel", has_text="Reward").locator(".legend b")).to_have_text(["0.8", "0.8"])
        expect(page.locator("#differences .error")).to_have_count(0)
        markers = page.locator(".panel", has_text="Waiting").locator(".legend i")
        dashes = markers.evaluate_all("all => all.map((one) => one.getAttribute('style').includes('gradient'))")
        assert dashes == [False, False, True, True]


def test_a_chart_of_several_runs_has_as_many_lines_as_engines(run_dir: Path, page: Page, tmp_path: Path) -> None:
    lags = {f"engine-{i}": {"lag_steps": i} for i in range(6)}
    append(run_dir / "metrics.jsonl", *({"step": n, "time_s": 2.0 * n, "engines": lags} for n in range(9, 12)))
    shutil.copytree(run_dir, tmp_path / "second")
    with served(run_dir, tmp_path / "second") as address:
        page.goto(address)
        expect(page.locator(".legend").get_by_text("engine-5").first).to_be_visible()


def test_runs_of_different_tasks_are_said_not_to_compare(run_dir: Path, page: Page, tmp_path: Path) -> None:
    runs = []
    for name in ("relay", "trail"):
        shutil.copytree(run_dir, run := tmp_path / name)
        (run / "config.yaml").write_text(f"task:\n  name: {name}\n")
        runs.append(run)
    with served(*runs) as address:
        page.goto(address)
        expect(page.locator("#differences .error")).to_have_text(
            "The runs have different tasks (relay, trail): their rewards and lengths do not compare."
        )


def test_samples_are_sorted_filtered_and_searched(run_dir: Path, page: Page) -> None:
    with served(run_dir) as address:
        page.goto(f"{address}#/samples")
        expect(page.locator("#num-rows")).to_have_text("6 of 6 rows")
        page.locator(".head", has_text="reward").get_by_text("reward", exact=True).click()
        assert "sum-3" in rows_shown(page)[-1], "without a reward it is last"
        page.select_option("#of-outcome", "failed")
        expect(page.locator("#num-rows")).to_have_text("2 of 6 rows")
        assert "disk gone" in rows_shown(page)[-1]
        page.get_by_text("clear").click()
        page.fill("#reward-from", "half")
        expect(page.locator("#reward-from")).to_have_attribute("aria-invalid", "true")
        page.fill("#reward-from", "0.5")
        expect(page.locator("#num-rows")).to_have_text("3 of 6 rows")
        page.get_by_text("clear").click()
        page.fill("#version-from", "2")
        expect(page.locator("#num-rows")).to_have_text("3 of 6 rows")
        page.fill("#tokens-to", "16")
        expect(page.locator("#num-rows")).to_have_text("0 of 6 rows")
        page.get_by_text("clear").click()
        page.fill("#words", "WHAT is 2")
        page.press("#words", "Enter")
        expect(page.locator("#num-rows")).to_have_text("3 of 6 rows")
        record = SampleRecord(run_dir / DIRECTORY, turns_of=turns)
        record.restore(6, -1)
        record.add(ended("sum-4", 5, Outcome.TRAINED, answer(reward=1.0, versions=[4])))
        record.close()
        expect(page.locator("#num-rows")).to_have_text("4 of 7 rows")


def test_a_search_that_fails_or_finds_too_much_says_so(run_dir: Path, page: Page) -> None:
    (file,) = (run_dir / DIRECTORY).iterdir()
    whole = file.read_bytes()
    with served(run_dir) as address:
        page.goto(f"{address}#/samples")
        expect(page.locator("#num-rows")).to_have_text("6 of 6 rows")
        file.write_bytes(whole[:100])
        page.fill("#words", "What is")
        page.press("#words", "Enter")
        expect(page.locator("#num-rows")).to_have_text("The search failed.")
        expect(page.locator("#problem")).to_contain_text(f"{file.name} is damaged")
        file.write_bytes(whole)
        expect(page.locator("#num-rows")).to_have_text("3 of 6 rows")
        expect(page.locator("#problem")).to_be_hidden()
        page.route("**/api/find?*", lambda route: route.fulfill(json={"rows": [2, 1], "is_cut": True}))
        page.fill("#words", "Done")
        page.press("#words", "Enter")
        expect(page.locator("#num-rows")).to_have_text(
            "2 of 6 rows; the words are also in older ones: only the newest 2 are found"
        )


def test_each_token_shows_its_version_and_numbers(run_dir: Path, page: Page) -> None:
    with served(run_dir) as address:
        page.goto(f"{address}#/samples?run=0&row=0")
        tokens = page.locator(".turn.assistant .token")
        expect(tokens).to_have_count(len(WORDS))
        assert page.locator(".turn.assistant .text").inner_text() == TOKENIZER_OF_THE_RUN.decode(WORDS)
        expect(page.locator("#scale")).to_contain_text("version 1")
        colours = tokens.evaluate_all("all => all.map(one => one.style.background)")
        assert len(set(colours)) == 2 and colours == sorted(colours, key=colours.index), "one colour per version"
        expect(page.locator(".turn.tool small")).to_have_text("tool · look · call_0 · 2 tokens")
        expect(page.locator(".turn.assistant > small")).to_contain_text("engine-1")
        expect(page.locator(".call b")).to_have_text("add")
        assert "\\u001b[2J" in page.locator(".call code").inner_text()
        tokens.last.hover()
        expect(page.locator("#hint")).to_contain_text("version 2")
        expect(page.locator("#hint")).to_contain_text("behavior log-prob -0.25")
        expect(page.locator("#hint")).to_contain_text("gap -0.25, ratio 0.7788")
        page.select_option("#mode", "gap")
        expect(page.locator("#scale")).to_contain_text("-0.1")
        page.get_by_text("side by side").click()
        expect(page.locator(".side > .card")).to_have_count(3)
        page.select_option("#mode", "version")
        expect(page.locator("#scale span")).to_have_text(["version 1", "version 2"])


def test_weights_and_rewards_of_tokens_are_shown_where_a_sample_has_them(tmp_path: Path, page: Page) -> None:
    def choices() -> list[str]:
        return page.locator("#mode option").all_inner_texts()

    record, last = SampleRecord(tmp_path / DIRECTORY, turns_of=turns), [0.0] * (len(WORDS) - 1)
    known = {"token_weights": [0.5, *last], "token_rewards": [*last, 0.75]}
    plain, both = answer(reward=0.5, versions=[1]), replace(answer(reward=0.75, versions=[1], sample=1), **known)
    record.add(ended("sum-1", 3, Outcome.TRAINED, plain, both))
    record.close()
    TOKENIZER_OF_THE_RUN.backend_tokenizer.save(str(tmp_path / TOKENIZER))
    with served(tmp_path) as address:
        page.goto(f"{address}#/samples?run=0&row=1")
        tokens = page.locator(".turn.assistant .token")
        expect(page.locator("#mode option", has_text="weight")).to_have_count(1)
        for name, place, shown in (("weight", 0, "weight 0.5\nreward 0"), ("reward", -1, "weight 0\nreward 0.75")):
            page.select_option("#mode", name)
            tokens.nth(place).hover()
            assert page.locator("#hint").inner_text().endswith(shown)
            colours = tokens.evaluate_all("all => all.map(one => one.style.background)")
            assert colours.count(colours[place]) == 1, "its number is like no other"
        with_both = choices()
        assert not {"critic's value", "teacher − engine, log-prob"} & set(with_both)
        page.locator(".chips button", has_text="0: 0.5").click()
        expect(page.locator("#scale span")).to_have_text(["version 1"])
        assert [title for title in with_both if title not in choices()] == ["weight", "reward"]
        tokens.first.hover()
        expect(page.locator("#hint")).to_contain_text("gap -0.25")
        assert "weight" not in page.locator("#hint").inner_text()


def test_a_rewritten_history_is_a_tree_of_branches(run_dir: Path, page: Page) -> None:
    with served(run_dir) as address:
        page.goto(f"{address}#/samples?run=0&row=2")
        expect(page.locator(".tree .tree").first).to_contain_text(
            "branch 1: 17 tokens, leaves branch 0 at turn 2 (token 7)"
        )
        page.locator(".tree button", has_text="branch 0").first.click()
        expect(page.locator(".turn.assistant .text")).to_have_text("What is 2+2? Done")


def test_texts_of_samples_are_never_code(run_dir: Path, page: Page) -> None:
    with served(run_dir) as address:
        page.goto(f"{address}#/samples?run=0&row=3")
        expect(page.locator(".detail h2")).to_contain_text("evil-<b>")
        expect(page.locator(".detail .error")).to_have_text("<i>no signal</i>")
        (run_dir / TOKENIZER).unlink()
    with served(run_dir) as address:
        page.goto(f"{address}#/samples?run=0&row=3")
        text = page.locator(".turn.assistant .text")
        expect(text).to_contain_text("<script>window.wasRun=1</script>")
        assert "\\u001b[2J\\u202eabc" in text.inner_text()
        expect(page.locator(".detail img, .detail script")).to_have_count(0)


def test_the_time_view_shows_spans_and_leads_from_a_wait_to_its_group(run_dir: Path, page: Page) -> None:
    with served(run_dir) as address:
        page.goto(f"{address}#/time")
        expect(page.locator("#waits td").first).to_have_text("5.5")
        canvas = page.locator("#timeline").bounding_box()
        assert canvas is not None

        def point_at(row: int, second: float) -> None:
            share = (second - 0) / 7.5
            x = canvas["x"] + 150 + share * (canvas["width"] - 150)
            page.mouse.move(x, canvas["y"] + 24 + 22 * row + 11)

        point_at(5, 3.5)
        expect(page.locator("#hint")).to_contain_text("uid: sum-1")
        point_at(0, 1.6)
        expect(page.locator("#hint")).to_contain_text("engine-0: pause\n1.5 s, for 0.75 s")
        point_at(0, 3.5)
        expect(page.locator("#hint")).to_contain_text("engine-0: serves")
        expect(page.locator("#hint")).to_contain_text("steps behind at the end: 1")
        point_at(0, 4.5)
        expect(page.locator("#hint")).to_contain_text("engine-0: death")
        point_at(0, 5.5)
        expect(page.locator("#hint")).to_contain_text("engine-0: restart")
        point_at(1, 3.0)
        expect(page.locator("#hint")).to_contain_text("engine-1: removal")
        point_at(1, 2.5)
        expect(page.locator("#hint")).to_contain_text("engine-1: serves\n2 s, for 1 s")
        page.get_by_role("button", name="zoom in").click()
        page.get_by_role("link", name="sum-1").click()
        expect(page.locator(".detail h2")).to_contain_text("sum-1")
        record = SampleRecord(run_dir / DIRECTORY)
        record.restore(6, -1)
        record.add(ended("sum-12", 9))
        record.close()
        page.goto(f"{address}#/time")
        expect(page.locator("#runs")).to_contain_text("7 rows")
        page.get_by_role("link", name="sum-1").click()
        expect(page.locator(".detail h2")).to_have_text(re.compile("sum-1 "))


def test_an_engine_has_a_colour_per_version_darker_when_it_is_behind_at_every_zoom(run_dir: Path, page: Page) -> None:
    shutil.rmtree(run_dir / "trace")
    trace = Trace(run_dir / "trace", lambda: 0.0)
    for version, second in enumerate((1.0, 6.0), start=3):
        trace.past_span("gather", "publish", second - 3, second - 2.999, version=version)
        trace.past_span("load", "engines/engine-0", second, second + 0.5, version=version)
    trace.past_span("wait_for_groups", "waiting", 2.0, 7.5, step=3)
    trace.close()

    def colour_at(second: float) -> list[int]:
        """In the upper part of the first row."""
        return page.evaluate(
            "second => { const { begin, end } = time.spans, canvas = byId('timeline');"
            " const x = left() + ((second - begin) / (end - begin)) * (canvas.width - left());"
            " return [...canvas.getContext('2d').getImageData(x, TOP + 4, 1, 1).data.slice(0, 3)]; }",
            second,
        )

    with served(run_dir) as address:
        page.goto(f"{address}#/time")
        expect(page.locator("#waits td").first).to_have_text("5.5")
        current, behind, newer = colour_at(2.5), colour_at(4.0), colour_at(7.0)
        assert sum(behind) < sum(current)
        assert newer not in (current, behind)
        page.evaluate("setWindow(2.8, 5.8), loadTime()")
        assert colour_at(4.0) == behind, "though it loaded before the window begins"


def test_the_wheel_scrolls_the_page_unless_a_key_makes_it_zoom(run_dir: Path, page: Page) -> None:
    with served(run_dir) as address:
        page.goto(f"{address}#/time")
        expect(page.locator("#waits td").first).to_have_text("5.5")
        page.set_viewport_size({"width": 1000, "height": 300})
        page.locator("#timeline").hover(position={"x": 400, "y": 60})
        page.mouse.wheel(0, 100)
        page.evaluate(
            "new Promise((is) => { const look = () => (scrollY ? is() : requestAnimationFrame(look)); look(); })"
        )
        expect(page.locator("#time-state")).to_contain_text("0 s to 8 s")
        page.locator("#timeline").hover(position={"x": 400, "y": 60})
        page.keyboard.down("Control")
        page.mouse.wheel(0, -100)
        expect(page.locator("#time-state")).not_to_contain_text("0 s to 8 s")


def test_a_report_is_one_file_that_needs_no_network(run_dir: Path, page: Page, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    assert main([str(run_dir), "--export", str(report)]) == 0
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    expect(page.locator("#alarms")).to_contain_text("The trainer waits")
    expect(page.locator(".panel canvas").first).to_be_visible()
    page.goto(f"{report.as_uri()}#/samples?run=0&row=3")
    expect(page.locator(".detail h2")).to_contain_text("evil-<b>")
    page.fill("#words", "What is")
    page.press("#words", "Enter")
    expect(page.locator("#num-rows")).to_have_text("3 of 6 rows; the report has 5 texts to search")
    page.goto(f"{report.as_uri()}#/time")
    expect(page.locator("#waits td").first).to_have_text("5.5")
    expect(page.locator("#time-state")).to_contain_text("the report has the last minute")
    expect(page.get_by_role("button", name="whole run")).to_be_hidden()
    assert all(url.startswith(("file:", "data:")) for url in asked)


def test_only_who_knows_the_token_and_who_names_this_machine_is_answered(run_dir: Path) -> None:
    with served(run_dir) as address:
        assert httpx.get(address).status_code == 200
        assert httpx.get(address, headers={"host": "evil.example"}).status_code == 400
        answers = [httpx.get(f"{address}api/{path}") for path in ("sample?row=99", "sample?row=x", "series?run=7")]
        assert [answer.status_code for answer in answers] == [404, 400, 400]
        assert answers[2].json() == {"error": "run must be a number from 0 to 0, got '7'"}
    with served(run_dir, "--host", "0.0.0.0") as address:
        assert f"//{socket.gethostname()}:" in address, "a name for other machines"
        address = address.replace(socket.gethostname(), "127.0.0.1", 1)
        with httpx.Client() as client:
            assert client.get(address.split("?")[0]).status_code == 403
            assert "token" in client.get(address.split("?")[0] + "api/overview").json()["error"]
            assert client.get(address).status_code == 200
            with served(run_dir, "--host", "0.0.0.0") as other:
                assert client.get(other.replace(socket.gethostname(), "127.0.0.1", 1)).status_code == 200
            assert client.get(address.split("?")[0] + "api/overview").status_code == 200, "by the cookie, of this port"


def test_a_browser_is_opened_where_there_is_a_screen(run_dir: Path, tmp_path: Path) -> None:
    browser, called, opened = tmp_path / "browser", tmp_path / "called", tmp_path / "opened"
    os.mkfifo(opened)
    browser.write_text(f'#!/bin/sh\ntouch {called}\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    with served(run_dir, BROWSER=str(browser)) as address:
        assert httpx.get(address, timeout=PATIENCE_S).status_code == 200
        assert not called.exists()
    with served(run_dir, BROWSER=str(browser), DISPLAY=":99") as address:
        assert httpx.get(address, timeout=PATIENCE_S).status_code == 200, "whatever the browser does"
        assert opened.read_text().strip() == address


def test_a_file_that_is_damaged_is_named_where_it_is_missed(run_dir: Path, page: Page) -> None:
    (file,) = (run_dir / DIRECTORY).iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with served(run_dir) as address:
        page.goto(address)
        expect(page.locator(".panel canvas").first).to_be_visible()
        expect(page.locator("#problem")).to_be_hidden()
        page.goto(f"{address}#/samples")
        expect(page.locator("#problem")).to_contain_text(f"{file.name} is damaged")
        file.write_bytes(whole)
        expect(page.locator("#num-rows")).to_have_text("6 of 6 rows")
        expect(page.locator("#problem")).to_be_hidden()


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_shown(
    run_dir: Path, page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir, tmp_path / "half")
    (tmp_path / "half" / "metrics.jsonl").write_text("{half\n")
    (file,) = (tmp_path / "half" / DIRECTORY).iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with served(tmp_path / "half", run_dir) as address:
        page.goto(address)
        expect(page.locator("#problem")).to_contain_text("line 1 is no line of metrics")
        expect(page.locator(".panel canvas").first).to_be_visible()
        page.goto(f"{address}#/samples")
        expect(page.locator("#num-rows")).to_contain_text("6 of")
    assert main([str(tmp_path / "half"), str(run_dir), "--text", "sum-1"]) == 0
    assert "sum-1: epoch" in capsys.readouterr().out
    report = tmp_path / "report.html"
    assert main([str(tmp_path / "half"), str(run_dir), "--export", str(report)]) == 0
    assert "line 1 is no line of metrics" in capsys.readouterr().err
    page.goto(report.as_uri())
    expect(page.locator(".panel canvas").first).to_be_visible()
    assert page.evaluate("overview.runs.map((run) => run.name)") == [run_dir.name]


def test_mistakes_are_named(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "name the directory of a run" in capsys.readouterr().err
    with served(run_dir) as address:
        port = address.rstrip("/").rpartition(":")[2]
        assert main([str(run_dir), "--port", port, "--no-browser"]) == 2
        assert f"port {port} of 127.0.0.1 cannot be had" in capsys.readouterr().err
    assert main([str(run_dir), "--export", str(tmp_path / "nowhere" / "report.html")]) == 2
    assert "name a file in a directory that exists" in capsys.readouterr().err
    booting = tmp_path / "booting"
    booting.mkdir()
    (booting / "config.yaml").write_text("training:\n  lr: 0.001\n")
    assert main([str(booting), "--export", str(tmp_path / "report.html")]) == 0
    (run_dir / "metrics.jsonl").write_text("{half\n")
    assert main([str(run_dir), "--export", str(tmp_path / "report.html")]) == 0, "its samples are whole"
    assert "line 1 is no line of metrics" in capsys.readouterr().err


def test_the_recorded_run_that_ships_shows_alarms_calls_branches_failures_and_a_death(page: Page) -> None:
    with served("--demo") as address:
        page.goto(address)
        expect(page.locator(".panel canvas").first).to_be_visible()
        expect(page.locator(".alarm").first).to_contain_text("of the samples without a reward")
        page.goto(f"{address}#/time")
        page.locator("#waits table").wait_for()
        page.evaluate("setWindow(0, time.spans.last), loadTime()")
        assert page.evaluate("time.spans.spans.some((span) => span.name === 'death')")
        page.goto(f"{address}#/samples")
        page.locator(".row:not(.head)").nth(5).click()
        expect(page.locator(".turn.assistant .token").first).to_be_visible()
        expect(page.locator(".call b").first).to_have_text("look")
        assert page.evaluate("browse.samples[0].some((s) => s.branch) && browse.samples[0].some((s) => s.reason)")
