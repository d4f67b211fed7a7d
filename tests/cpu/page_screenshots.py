"""Takes the pictures of the page for docs/tutorials/07_look.md, from the recorded run: ``python -m tests.cpu.page_screenshots``."""

from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.cpu.view.test_page import CHROMIUM, FLAGS, served

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    with served("--demo") as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 780}, color_scheme="light")
        page.goto(address)
        page.locator(".panel canvas").nth(8).wait_for()
        take(page, "view_run")
        page.goto(f"{address}#/time")
        page.locator("#waits table").wait_for()
        take(page, "view_time")
        show_sample(page, address)
        take(page, "view_samples")
        dark = browser.new_page(viewport={"width": 760, "height": 900}, color_scheme="dark")
        show_sample(dark, address)
        take(dark, "view_dark")
        browser.close()


def show_sample(page: Page, address: str) -> None:
    """A trained sample whose tokens several versions sampled."""
    page.goto(f"{address}#/samples")
    page.fill("#words", "extend")
    page.press("#words", "Enter")
    page.select_option("#of-outcome", "trained")
    page.get_by_role("columnheader", name="tokens").click()
    page.locator(".row:not(.head)", has_text="–").filter(has_text="trained").first.click()
    page.locator(".turn.assistant .token").first.wait_for()


def take(page: Page, name: str) -> None:
    """Write a picture once the page has come to rest."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(600)
    page.screenshot(path=IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
