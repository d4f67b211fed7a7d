"""Takes the pictures of the page for docs/tutorials/07_look.md, from the recorded run: ``python -m tests.cpu.page_screenshots``."""

import io
import json
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.view_page import CHROMIUM, FLAGS
from skyrl_async.view.__main__ import DEMO
from tests.cpu.forked_workers import forking_workers
from tests.cpu.view.test_page import served

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    with (
        sync_playwright() as playwright,
        tempfile.TemporaryDirectory() as directory,
        forking_workers(Path(directory)),
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        with served("--demo") as address:
            take_all(browser, address)
        with served(*two_runs(Path(directory))) as address:
            page = opened(browser, f"{address}#/run", height=900)
            page.locator(".panel canvas").nth(8).wait_for()
            page.evaluate("byId('differences').after(document.querySelector('.panels'))")  # both on one picture
            page.evaluate("byId('differences').style.marginBottom = '16px'")
            take(page, "view_runs")
        browser.close()


def take_all(browser: Browser, address: str) -> None:
    """The pictures of one run."""
    page = opened(browser, address)
    page.locator(".panel canvas").nth(8).wait_for()
    take(page, "view_run")
    for scheme, name in (("light", "view_time"), ("dark", "view_time_dark")):
        page = opened(browser, f"{address}#/time", height=860, color_scheme=scheme)
        page.locator("#waits table").wait_for()
        show_death(page)
        take(page, name)
    page = opened(browser, f"{address}#/samples", height=620)
    page.locator(".row").nth(9).wait_for()
    take(page, "view_table")
    page.set_viewport_size({"width": 1280, "height": 900})
    show_sample(page, "trained", "s.last_version > s.first_version && s.num_turns > 5 && s.reward === 1")
    take(page, "view_samples")
    show_sample(page, "trained", "s.step < 4 && s.num_turns > 4")
    page.get_by_role("button", name="side by side").click()
    page.select_option("#mode", "logprob")
    page.locator(".side > .card .turn").nth(8).wait_for()
    take(page, "view_group")
    page.get_by_role("button", name="side by side").click()
    page.select_option("#mode", "version")
    show_sample(page, "trained", "s.branch")
    page.locator(".tree .tree").first.wait_for()
    take(page, "view_branches")
    page = opened(browser, f"{address}#/samples", width=420, height=900, color_scheme="dark")
    show_sample(page, "trained", "s.last_version > s.first_version && s.num_turns > 5 && s.reward === 1")
    page.evaluate("byId('rows').scrollLeft = 0; document.querySelector('.detail').scrollIntoView()")
    page.evaluate("scrollBy(0, -60)")  # the header stays above
    take(page, "view_dark")


def opened(browser: Browser, address: str, width: int = 1280, height: int = 780, color_scheme: str = "light") -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=color_scheme)
    page.goto(address)
    return page


def show_sample(page: Page, outcome: str, condition: str) -> None:
    """Choose the first sample ``s`` of that outcome for which the condition holds."""
    page.locator(".row").nth(2).wait_for()
    page.select_option("#of-outcome", outcome)
    page.wait_for_timeout(400)
    page.evaluate(f"choose(browse.visible.find((s) => s.num_sampled_tokens && ({condition})))")
    page.locator(".turn.assistant .token").first.wait_for()


def show_death(page: Page) -> None:
    """Half a minute around an engine's death, where there is one."""
    page.evaluate("setWindow(0, time.spans.last), loadTime()")
    page.evaluate(
        "(() => { const death = time.spans.spans.find((one) => one.name === 'death');"
        " if (death) setWindow(death.begin - 12, death.begin + 28); return loadTime(); })()"
    )


def two_runs(directory: Path) -> list[Path]:
    """The recorded run, and a copy that stands for another: its figures change half as fast."""
    for name, lr in (("first", 0.0008), ("second", 0.0004)):
        shutil.copytree(DEMO, directory / name)
        config = directory / name / "config.yaml"
        config.write_text(config.read_text().replace("\n  lr: 0.0008\n", f"\n  lr: {lr}\n"))
    slow = directory / "second" / "metrics.jsonl"
    rows = [json.loads(line) for line in slow.read_text().splitlines()]
    slow.write_text("".join(json.dumps(row | {"step": 2 * row["step"]}) + "\n" for row in rows[: len(rows) // 2 + 1]))
    return [directory / "first", directory / "second"]


def take(page: Page, name: str) -> None:
    """Write a picture once the page has come to rest; 256 colours near to all take a third of the bytes."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(600)
    picture = (
        Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=3)
    )
    picture.save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
