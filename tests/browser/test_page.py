"""The gateway's page in a real headless browser, before real services. Run by `make browser`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from paceline.client import Client
from paceline.harness import ServiceProcess

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"
PROMPT = "import os\nimport sys\nimport os\nimport sys\nimport os\n"
TOKENS = 64
playwright.expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[str, str, str]]:
    """Addresses of a verifier, a drafter and a gateway that asks for a key."""
    verifier = ServiceProcess("verifier", ["--target", str(TARGET), "--schedule", "off"])
    drafter = ServiceProcess("drafter", ["--load", "ngram=ngram"])
    with verifier, drafter:
        arguments = ["--verifier-address", verifier.address, "--drafter-address", drafter.address]
        environment = {"PACELINE_API_KEY": "secret"}
        with ServiceProcess("gateway", arguments, environment=environment) as gateway:
            yield verifier.address, drafter.address, gateway.address


@pytest.fixture
async def page(services: tuple[str, str, str]) -> AsyncIterator[playwright.Page]:
    """The page, open. Whatever it logs as an error fails the test, but for a refused key."""
    errors: list[str] = []
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        await page.goto(f"http://{services[2]}/")
        yield page
        await browser.close()
    assert [error for error in errors if "401" not in error] == []


async def begin(page: playwright.Page, *, tokens: int) -> None:
    """Fill the form in and press Generate."""
    expect = playwright.expect
    await expect(page.locator("#error")).to_contain_text("key")
    await page.fill("#key", "secret")
    await page.locator("#key").dispatch_event("change")
    await expect(page.locator("#drafter option")).to_have_count(2)
    await page.fill("#prompt", PROMPT)
    await page.fill("#tokens", str(tokens))
    await page.select_option("#drafter", "ngram")
    await page.click("#go")


async def test_a_generation_is_shown_as_it_is_made(
    page: playwright.Page, services: tuple[str, str, str]
) -> None:
    expect = playwright.expect
    await begin(page, tokens=TOKENS)
    await expect(page.locator("#figures")).to_contain_text(f"{TOKENS} tokens")
    async with asyncio.timeout(120):
        while not await page.locator("#text .drafter").count():
            # The drafter was not ready before the text ended: once more.
            await page.click("#go")
            await expect(page.locator("#figures")).to_contain_text(f"{TOKENS} tokens")
    async with Client(services[0], drafter=services[1], cache_dir=None) as client:
        result = await client.generate(PROMPT, max_new_tokens=TOKENS, seed=1, drafter="none")
    assert await page.locator("#text").text_content() == PROMPT + result.text
    assert await page.locator("#error").text_content() == ""
    # Who proposed what, the newest tree with its accepted path, and both curves.
    assert await page.locator("#text .verifier").count() > 0
    assert await page.locator("#tree text").count() > 1
    assert float(await page.locator("#tau").text_content() or "") >= 1
    for plot in ("tau", "speed"):
        points = await page.locator(f"#{plot}-plot polyline").get_attribute("points")
        assert points
    colour = "c => getComputedStyle(document.querySelector('#text .' + c)).color"
    colours = await page.evaluate(f"['drafter', 'verifier'].map({colour})")
    assert len(set(colours)) == 2, colours


async def test_stopping_ends_it(page: playwright.Page) -> None:
    expect = playwright.expect
    await begin(page, tokens=4000)
    await expect(page.locator("#text span")).not_to_have_count(1)
    await page.click("#stop")
    await expect(page.locator("#go")).to_be_enabled()
    assert await page.locator("#error").text_content() == ""
    assert await page.locator("#figures").text_content() == ""
