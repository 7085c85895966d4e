"""Takes the documentation's pictures of the page: screenshots.py GATEWAY [FOLDER]

They show a gateway that runs, such as that of `paceline serve smollm2`, in a headless Chromium. It
should have been started for them: texts of earlier runs would be drafted from.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
QUESTIONS = [
    "Write a Python function that computes the factorial of a number.",
    "Now write the same function again, with a docstring.",
]
DARK_QUESTIONS = [
    "List the planets of the solar system in a table with their order.",
    "Now the same table, with the largest planet first.",
]
PHONE_QUESTIONS = ["Explain why the sky is blue in three short paragraphs."]
MOST_BYTES = 150_000
TIMEOUT = 300_000


def chat(page: Page, questions: list[str]) -> None:
    """Asks the questions and picks a step that was drafted well."""
    for number, question in enumerate(questions, start=1):
        page.fill("#chat textarea", question)
        page.press("#chat textarea", "Enter")
        answers = page.locator(".turn.assistant[aria-busy=false]")
        expect(answers).to_have_count(number, timeout=TIMEOUT)
    page.locator(".turn").last.locator(".drafter").first.click()
    page.locator("#chat textarea").hover()


def take(browser: Browser, address: str, folder: Path) -> None:
    def opened(tokens: int, **options: object) -> Page:
        page = browser.new_page(reduced_motion="reduce", **options)  # type: ignore[arg-type]
        page.goto(address)
        expect(page.locator("#settings option")).not_to_have_count(0)
        page.click("#settings summary")
        page.fill("#settings [name=max_tokens]", str(tokens))
        page.click("#settings summary")
        return page

    def picture(page: Page, name: str) -> None:
        path = folder / f"{name}.png"
        size = len(page.screenshot(path=path))
        assert size < MOST_BYTES, f"{path} has {size} bytes; below {MOST_BYTES} were expected"
        print(path, size)

    page = opened(96, viewport=DESKTOP)
    chat(page, QUESTIONS)
    picture(page, "chat")
    page.locator("#chat .steps").focus()
    page.keyboard.press("Home")
    picture(page, "chat-keyboard")
    page.close()

    page = opened(96, viewport=DESKTOP, color_scheme="dark")
    chat(page, DARK_QUESTIONS)
    picture(page, "chat-dark")
    page.close()

    page = opened(96, viewport=PHONE)
    chat(page, PHONE_QUESTIONS)
    picture(page, "chat-mobile")
    page.close()


def main() -> None:
    address = sys.argv[1].rstrip("/")
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "docs/images")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        take(browser, address, folder)
        browser.close()


if __name__ == "__main__":
    main()
