"""The race of the gateway's page. Run by `make browser`."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from paceline.client import Client

from .conftest import Open, Services, Unending, give_key

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = pytest.mark.browser
expect = playwright.expect
expect.set_options(timeout=60_000)

PROMPT = "import os\nimport sys\nimport os\nimport sys\nimport os"
TOKENS = 96


async def prepare(page: playwright.Page) -> None:
    await give_key(page)
    await page.fill("#settings [name=max_tokens]", str(TOKENS))
    await page.fill("#race textarea", PROMPT)


async def start(page: playwright.Page) -> None:
    await page.click("#race [name=start]")
    await expect(page.locator("#race [name=start]")).to_be_enabled()


async def stream(route: playwright.Route, rounds: list[dict[str, Any]]) -> None:
    """Answers a request with rounds, as the gateway streams them."""
    events = [json.dumps({"choices": [{"rounds": [each]}]}) for each in rounds]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    await route.fulfill(content_type="text/event-stream", body=body)


@pytest.mark.parametrize("order", ["turns", "together"])
async def test_both_give_the_same_tokens(open_page: Open, services: Services, order: str) -> None:
    async with open_page(services.gateway, "race") as page:
        await prepare(page)
        await page.select_option("#race [name=order]", order)
        drafted = page.locator("#race .lane .drafter")
        asked: list[dict[str, Any]] = []
        page.on("request", lambda r: asked.append(r.post_data_json) if r.post_data else None)
        for _ in range(20):
            await start(page)
            await expect(page.locator("#race .verdict .same")).to_contain_text(
                f"All {TOKENS} tokens are the same"
            )
            await expect(page.locator("#race .lane.ended")).to_have_count(2)
            if await drafted.count():
                break
        async with Client(services.verifier, cache_dir=None) as client:
            result = await client.generate(PROMPT, max_new_tokens=TOKENS, seed=1)
        texts = page.locator("#race .lane .text")
        assert await texts.all_text_contents() == [result.text, result.text]
        assert await drafted.count() > 0
        assert await texts.nth(0).locator(".drafter").count() == 0
        assert await page.locator("#race .tree .node").count() > 0
        # A token of the drafter shows the tree of its step.
        await drafted.first.hover()
        await expect(page.locator("#race .panel .step")).not_to_contain_text(", 0 accepted")
        await expect(page.locator("#race .tree .accepted").first).to_be_visible()
        # The headline is the ratio of the clocks.
        plain, fast = map(float, await page.locator("#race .seconds").all_text_contents())
        headline = await page.locator("#race .headline").text_content()
        ratio = float((re.search(r"([\d.]+) times", headline) or "11")[1])
        if "Slower" in headline:
            ratio = 1 / ratio
        assert ratio == pytest.approx(plain / fast, rel=0.1)
        # It is the median of three, none of which drafts from the answer of another.
        verdict = await page.locator("#race .verdict").text_content()
        found = re.search(r"median of 3 runs \(([\d.]+)×, ([\d.]+)×, ([\d.]+)×\)", verdict)
        low, middle, high = (float(text) for text in found.groups())
        assert low <= middle <= high
        assert middle == pytest.approx(plain / fast, rel=0.1)
        assert "one prompt" in await page.locator("#race .caveat").text_content()
        assert len(asked) % 7 == 0
        assert all(body["isolated"] for body in asked)
        how = "same time" if order == "together" else "one after the other"
        assert how in await page.locator("#race .verdict").text_content()
        # The replay shows any time of both.
        await page.locator("#race [name=time]").fill("0")
        assert await texts.all_text_contents() == ["", ""]
        assert await page.locator("#race .seconds").all_text_contents() == ["0.00", "0.00"]
        await page.click("#race [name=play]")
        await expect(page.locator("#race .lane.ended")).to_have_count(2)
        assert await texts.all_text_contents() == [result.text, result.text]


async def test_a_difference_is_shown_loudly(open_page: Open, services: Services) -> None:
    async def answer(route: playwright.Route) -> None:
        body = json.loads(route.request.post_data)
        words = ["same", "one" if body["drafter"] == "none" else "other", "end"]
        rounds = [
            {
                "steps": 1,
                "token_ids": [len(word)],
                "pieces": [f"{word} "],
                "proposed_by": ["verifier"],
                "tree": None,
                "undrafted": "empty",
            }
            for word in words
        ]
        await stream(route, rounds)

    async with open_page(services.gateway, "race") as page:
        await prepare(page)
        await page.route("**/v1/completions", answer)
        await start(page)
        verdict = page.locator("#race .verdict.different")
        await expect(verdict).to_contain_text("differ from token 2 on")
        await expect(verdict).to_contain_text('it is "one ", with local "other "')
        await expect(page.locator("#race .lane .differs")).to_have_count(4)
        assert await page.locator("#race .same").count() == 0


async def test_a_run_without_drafts_is_not_called_slower(
    open_page: Open, services: Services
) -> None:
    """Whatever time it took."""

    async def answer(route: playwright.Route) -> None:
        if json.loads(route.request.post_data)["drafter"] != "none":
            await asyncio.sleep(0.3)
        step = {
            "steps": 1,
            "token_ids": [1],
            "pieces": ["word "],
            "proposed_by": ["verifier"],
            "tree": None,
            "undrafted": "node_budget",
        }
        await stream(route, [step, step])

    async with open_page(services.gateway, "race") as page:
        await prepare(page)
        await page.route("**/v1/completions", answer)
        await start(page)
        headline = page.locator("#race .headline")
        await expect(headline).to_have_text("With local nothing was drafted")
        await expect(page.locator("#race .verdict")).to_contain_text("expected no gain")


async def test_without_a_drafter_there_is_no_race(chat_gateway, open_page: Open) -> None:
    async with chat_gateway(lambda prompt: "Hello") as address:
        async with open_page(address, "race") as page:
            await expect(page.locator("#model")).to_contain_text("mock")
            await start(page)
            await expect(page.locator("#race .error")).to_contain_text("needs a drafter")


async def test_stop(chat_gateway, open_page: Open) -> None:
    async def with_drafter(route: playwright.Route) -> None:
        answer = await (await route.fetch()).json()
        answer["data"][0]["drafters"] = ["ngram"]
        await route.fulfill(json=answer)

    async with chat_gateway(lambda prompt: "A text without end", Unending) as address:
        async with open_page(address, "race") as page:
            await page.route("**/v1/models", with_drafter)
            await page.reload()
            await expect(page.locator("#model")).to_contain_text("mock")
            await page.click("#race [name=start]")
            figures = page.locator("#race .lane .figures").first
            await expect(figures).to_contain_text(re.compile(r"[1-9]\d* tokens"))
            await page.keyboard.press("Escape")
            await expect(page.locator("#race .verdict")).to_contain_text("Stopped")
            await expect(page.locator("#race [name=start]")).to_be_enabled()
            assert await page.locator("#race .error").text_content() == ""
