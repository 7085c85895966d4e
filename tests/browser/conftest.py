"""Real headless browsers, real services, and gateways whose model's text is known."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fakes.transport import MockTransport
from gateway.conftest import serve_gateway

from paceline.harness import ServiceProcess, local_services

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@dataclass
class Services:
    verifier: str
    gateway: str  # its gateway asks for the key "secret"


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    environment = {"PACELINE_API_KEY": "secret"}
    with (
        local_services(["--target", str(TARGET), "--schedule", "off"], ["--load=ngram"]) as (
            verifier,
            _,
        ),
        ServiceProcess(
            "gateway", [f"--verifier-address={verifier.address}"], environment=environment
        ) as gateway,
    ):
        yield Services(verifier.address, gateway.address)


class Unending(MockTransport):
    """Emits the first token of each text, and nothing more."""

    def __init__(self, reply: Any) -> None:
        super().__init__(reply)
        self.step_seconds = 3600.0


@contextlib.asynccontextmanager
async def _chat_gateway(
    reply: Callable[[str], str], kind: type[MockTransport] = MockTransport
) -> AsyncIterator[str]:
    async with serve_gateway(kind(reply), chat_template=TEMPLATE) as served:
        yield served.url.removeprefix("http://")


@pytest.fixture
def chat_gateway() -> Callable[..., AbstractAsyncContextManager[str]]:
    """Starts a gateway without drafters whose model answers `reply(prompt)`; its address."""
    return _chat_gateway


PROGRAMS = {"chromium": ("chromium", "google-chrome"), "firefox": ("firefox-esr", "firefox")}
OPTIONS: dict[str, dict[str, Any]] = {
    "chromium": {"args": ["--no-sandbox", "--disable-gpu"]},
    "firefox": {"channel": "moz-firefox"},  # as Debian and Mozilla build it
}


@pytest.fixture(params=PROGRAMS)
async def browser(request: pytest.FixtureRequest) -> AsyncIterator[Browser]:
    """Each of the browsers; skips those that are not installed."""
    program = next(filter(None, map(shutil.which, PROGRAMS[request.param])), None)
    if program is None:
        pytest.skip(f"there is no {request.param}")
    from playwright.async_api import async_playwright

    async with async_playwright() as started:
        kind = getattr(started, request.param)
        yield await kind.launch(executable_path=program, **OPTIONS[request.param])


Open = Callable[..., AbstractAsyncContextManager["Page"]]


@pytest.fixture
def open_page(browser: Browser) -> Open:
    """Opens the page of a gateway: `open_page(address, view="chat", **options of the context)`.

    An error that the page logs fails the test, but for refused requests. So does a request to
    another host.
    """

    @contextlib.asynccontextmanager
    async def opened(address: str, view: str = "chat", **options: Any) -> AsyncIterator[Page]:
        wrong: list[str] = []
        page = await browser.new_page(**options)
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        origin = f"http://{address}/"
        page.on("request", lambda r: None if _inside(r.url, origin) else wrong.append(r.url))
        await page.goto(f"{origin}#/{view}")
        await page.bring_to_front()
        yield page
        await page.close()
        expected = ("status of 4", "ERR_INTERNET_DISCONNECTED")
        assert [text for text in wrong if not any(part in text for part in expected)] == []

    return opened


def _inside(url: str, origin: str) -> bool:
    return url.startswith((origin, "data:"))


async def give_key(page: Page) -> None:
    """Enters the key that the gateway of `services` asks for."""
    from playwright.async_api import expect

    await expect(page.locator("#settings [name=key]")).to_be_focused(timeout=60_000)
    await page.keyboard.type("secret")
    await page.keyboard.press("Tab")
    await expect(page.locator("#settings [name=drafter] option")).to_have_count(3)
