"""The chat of the gateway's page. Run by `make browser`."""

import re
from collections.abc import Callable
from functools import partial

import pytest
from fakes.transport import MockTransport

from paceline.client import Client

from .conftest import Open, Services, Unending, give_key

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = pytest.mark.browser
expect = playwright.expect
expect.set_options(timeout=60_000)

PROMPT = "import os\nimport sys\nimport os\nimport sys\nimport os\n"
FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
MARKDOWN = """# A title

**Bold**, `code` and 1 < 2.

| a | b |
| - | - |
| 1 | 2 |

```python
print("<b>")
```

<script>window.ran = 1</script>

<img src="x" onerror="window.ran = 1"> and [a link](javascript:window.ran=1)
and ![a picture](https://example.org/p.png)
"""


def noted(answer: str) -> tuple[list[str], Callable[[str], str]]:
    """A list, and what answers each prompt with a text, or its number, and notes it there."""
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return answer.format(len(prompts))

    return prompts, reply


async def send(page: playwright.Page, text: str) -> None:
    await page.fill("#chat .composer textarea", text)
    await page.press("#chat .composer textarea", "Enter")


async def answered(page: playwright.Page, turns: int) -> None:
    """Waits until this many answers are complete."""
    await expect(page.locator(".turn.assistant[aria-busy=false]")).to_have_count(turns)
    await expect(page.locator("#chat [name=send]")).to_be_enabled()


async def ask(page: playwright.Page, text: str, turns: int = 1) -> None:
    await send(page, text)
    await answered(page, turns)


async def test_turns_keep_their_history(chat_gateway, open_page: Open) -> None:
    prompts, reply = noted("Answer *{}*")
    async with chat_gateway(reply) as address, open_page(address) as page:
        await page.click("#settings summary")
        await page.fill("#settings [name=system]", "Be brief.")
        await ask(page, "First")
        await ask(page, "Second", 2)
        turns = await page.locator(".turn .markdown, .turn.user .said").all_text_contents()
        assert [turn.strip() for turn in turns] == ["First", "Answer 1", "Second", "Answer 2"]
        assert prompts[-1] == (
            "<system>Be brief.<user>First<assistant>Answer *1*<user>Second<assistant>"
        )
        await page.click("#chat [name=new]")
        await ask(page, "Third")
        assert prompts[-1] == "<system>Be brief.<user>Third<assistant>"


async def test_markdown_is_rendered_and_nothing_in_it_runs(chat_gateway, open_page: Open) -> None:
    async with chat_gateway(lambda prompt: MARKDOWN) as address, open_page(address) as page:
        await ask(page, "Show me")
        answer = page.locator(".turn .markdown")
        assert await answer.locator("h1").text_content() == "A title"
        assert await answer.locator("strong").text_content() == "Bold"
        assert await answer.locator("table td").all_text_contents() == ["1", "2"]
        assert await answer.locator("pre code").text_content() == 'print("<b>")\n'
        assert await answer.locator(".bar").text_content() == "pythonCopy"
        await answer.locator(".bar button").click()
        await expect(answer.locator(".bar")).to_contain_text("Cop")
        text = await answer.text_content()
        assert "1 < 2" in text
        assert "<script>window.ran = 1</script>" in text
        assert '<img src="x" onerror="window.ran = 1">' in text
        assert await answer.locator("script, img, b").count() == 0
        links = answer.locator("a")
        assert await links.all_text_contents() == ["a link", "a picture"]
        assert await links.nth(0).get_attribute("href") is None
        await links.nth(0).click()
        assert await page.evaluate("window.ran") is None


async def test_tokens_are_marked_by_who_wrote_them(open_page: Open, services: Services) -> None:
    """A model without a chat template continues the text."""
    async with open_page(services.gateway) as page:
        await give_key(page)
        await expect(page.locator("#notice")).to_contain_text("no chat template")
        await page.fill("#settings [name=max_tokens]", "384")
        drafted = page.locator(".turn .answer .drafter")
        for _ in range(20):
            # The drafter may not be ready before the text ends: once more.
            await page.click("#chat [name=new]")
            await ask(page, PROMPT)
            if await drafted.count():
                break
        else:
            pytest.fail("no token of 20 texts was drafted")
        async with Client(services.verifier, cache_dir=None) as client:
            result = await client.generate(PROMPT, max_new_tokens=384, seed=1)
        assert await page.locator(".turn .answer").text_content() == result.text
        colours = [
            await page.evaluate("e => getComputedStyle(e).color", await place.element_handle())
            for place in (drafted.first, page.locator(".turn .answer"))
        ]
        assert colours[0] != colours[1]
        # Colour is not the only mark.
        line = "e => getComputedStyle(e).textDecorationLine"
        assert await drafted.first.evaluate(line) == "underline"
        assert await page.locator(".turn .answer .verifier").first.evaluate(line) == "none"
        figures = await page.locator(".turn .figures").text_content()
        assert "tokens/s" in figures
        assert f"{len(result.token_ids)} tokens" in figures
        assert "cut at 384 tokens" in figures
        assert await page.locator("#chat .tree .node").count() > 0
        assert await page.locator("#chat .steps .drafted").count() > 0
        assert "ngram" in await page.locator("#chat .panel dl").text_content()
        await steps_can_be_picked(page)


async def steps_can_be_picked(page: playwright.Page) -> None:
    """By keyboard, by its bar, and by a token of the text; each shows that step's tree."""
    steps, shown = page.locator("#chat .steps"), page.locator("#chat .panel .step")
    count = int(await steps.get_attribute("aria-valuemax"))
    newest = await shown.text_content()
    await page.locator("#chat .scroll").focus()
    await page.keyboard.press("Tab")
    await expect(steps).to_be_focused()
    for key, step in (("Home", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", count)):
        await page.keyboard.press(key)
        await expect(steps).to_have_attribute("aria-valuenow", str(step))
        await expect(shown).to_contain_text(f"Step {step} of {count}: ")
        assert await steps.get_attribute("aria-valuetext") == await shown.text_content()

    # The first bar, and once more: the newest tree again.
    for expected in (f"Step 1 of {count}: ", newest):
        await steps.click(position={"x": 1, "y": 40})
        await expect(shown).to_contain_text(expected)

    # A token of the drafter was accepted in its step, and the step's tree has it.
    token = page.locator(".turn .answer .drafter").first
    await token.hover()
    await expect(shown).not_to_contain_text(", 0 accepted")
    title = await token.get_attribute("title")
    await expect(shown).to_have_text(title)
    found = re.search(r"(\d+) drafted, (\d+) accepted", title)
    assert found is not None
    drawn = min(int(found[2]), 20)  # columns of the drawing
    await expect(page.locator("#chat .tree .accepted")).to_have_count(drawn)
    # The tree is there in words too.
    paths = await page.get_by_role("list", name="Paths of the tree").locator("li").all_inner_texts()
    assert paths[0].startswith("accepted ")
    assert len(paths) <= int(found[1])
    previewed = await shown.text_content()
    await page.locator("#chat textarea").hover()
    await expect(shown).to_have_text(newest)
    await token.click()
    await page.locator("#chat textarea").hover()
    await expect(shown).to_have_text(previewed)


async def test_a_reload_keeps_the_chat(chat_gateway, open_page: Open) -> None:
    prompts, reply = noted("An *answer*")
    async with chat_gateway(reply) as address, open_page(address) as page:
        await page.click("#settings summary")
        await page.fill("#settings [name=system]", "Be brief.")
        await page.fill("#settings [name=key]", "private")
        await ask(page, "First")
        before = await page.locator(".thread").inner_html()
        await page.reload()
        await answered(page, 1)
        assert await page.locator(".thread").inner_html() == before
        await expect(page.locator("#chat .welcome")).to_be_hidden()
        stored = "JSON.stringify([{...sessionStorage}, {...localStorage}])"
        assert "private" not in await page.evaluate(stored)
        await page.locator(".turn .answer em [data-token]").first.hover()
        await expect(page.locator("#chat .panel .step")).to_contain_text("Step ")
        await ask(page, "Second", 2)
        assert prompts[-1] == (
            "<system>Be brief.<user>First<assistant>An *answer*<user>Second<assistant>"
        )
        await page.click("#chat [name=new]")
        await page.reload()
        await expect(page.locator("#chat .welcome")).to_be_visible()
        assert await page.locator(".turn").count() == 0


async def test_chats_are_kept_until_they_are_deleted(chat_gateway, open_page: Open) -> None:
    async with chat_gateway(str.upper) as address, open_page(address) as page:
        choice, said = page.locator("#chat [name=chats]"), page.locator(".turn.user .said")
        for text in ("First", "Second"):
            await page.click("#chat [name=new]")
            await ask(page, text)
        await page.evaluate("sessionStorage.clear()")  # as in another tab
        await page.reload()
        await expect(page.locator("#chat .welcome")).to_be_visible()
        assert await choice.locator("option").all_text_contents() == ["New chat", "Second", "First"]
        await choice.select_option("First")
        await expect(said).to_have_text("First")
        await ask(page, "Third", 2)
        await page.reload()
        await answered(page, 2)
        assert await said.all_text_contents() == ["First", "Third"]
        await page.click("#chat [name=delete]")
        await expect(page.locator("#chat .welcome")).to_be_visible()
        await expect(page.locator("#chat [name=delete]")).to_be_disabled()
        assert await page.locator("#chat .steps rect, #chat dl dd").count() == 0
        await page.reload()
        assert await choice.locator("option").all_text_contents() == ["New chat", "Second"]
        assert "Third" not in await page.evaluate("JSON.stringify({...localStorage})")


async def test_edit_and_regenerate(chat_gateway, open_page: Open) -> None:
    prompts, reply = noted("Answer {}")
    async with chat_gateway(reply) as address, open_page(address) as page:
        for turn, text in enumerate(("First", "Second"), start=1):
            await ask(page, text, turn)
        await page.locator(".turn.assistant").nth(1).get_by_text("Regenerate").click()
        await expect(page.locator(".turn .answer").nth(1)).to_have_text("Answer 3")
        assert prompts[2] == prompts[1]
        await answered(page, 2)
        await page.locator(".turn.user").first.get_by_text("Edit").click()
        message = page.locator("#chat .composer textarea")
        assert await message.input_value() == "First"
        await page.locator(".turn.user").first.get_by_text("Edit").click()
        assert await message.input_value() == ""
        await page.locator(".turn.user").first.get_by_text("Edit").click()
        await ask(page, "Other")
        assert prompts[3] == "<user>Other<assistant>"
        await expect(page.locator(".turn.user .said")).to_have_text("Other")
        # What was there stays if nothing is answered.
        await page.context.set_offline(True)
        await page.get_by_text("Regenerate").click()
        await expect(page.locator("#chat .error")).to_contain_text("cannot be reached")
        await expect(page.locator(".turn .answer")).to_have_text("Answer 4")
        await page.context.set_offline(False)


async def test_a_cut_answer_is_continued(chat_gateway, open_page: Open) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "A long answer"[len(prompt.partition("<assistant>")[2]) :]

    async with chat_gateway(reply) as address, open_page(address) as page:
        await page.click("#settings summary")
        await page.fill("#settings [name=max_tokens]", "6")
        await send(page, "Hi")
        answer, figures = page.locator(".turn .answer"), page.locator(".turn .figures")
        goes_on = page.locator(".turn").get_by_text("Continue")
        for text, cut in (("A long", True), ("A long answe", True), ("A long answer", False)):
            await answered(page, 1)
            await expect(answer).to_have_text(text)
            await expect(goes_on).to_be_visible(visible=cut)
            assert ("cut at" in await figures.text_content()) == cut
            if cut:
                await goes_on.click()
        assert prompts == [f"<user>Hi<assistant>{text}" for text in ("", "A long", "A long answe")]
        assert await page.locator("#chat .steps .plain").count() > 6
        await page.reload()
        await expect(answer).to_have_text("A long answer")


async def test_thoughts_are_apart(chat_gateway, open_page: Open) -> None:
    """The marks around them are shown nowhere, and none is sent again."""
    prompts, reply = noted("<think>I wonder</think>It *is*")
    async with chat_gateway(reply) as address, open_page(address) as page:
        await send(page, "Is it?")
        for _ in range(2):  # then after a reload
            await answered(page, 1)
            await expect(page.locator(".turn .answer")).to_have_text("It is")
            thoughts = page.locator(".turn .thoughts")
            await expect(thoughts.locator(".thought")).to_be_hidden()
            await thoughts.locator("summary").click()
            await expect(thoughts.locator(".thought")).to_have_text("I wonder")
            await thoughts.locator("[data-token]").last.hover()
            await expect(page.locator("#chat .panel .step")).to_contain_text('"r"')
            await page.reload()
        await ask(page, "More", 2)
        assert prompts[-1] == "<user>Is it?<assistant>It *is*<user>More<assistant>"


async def test_a_reload_keeps_what_was_written_of_an_answer(chat_gateway, open_page: Open) -> None:
    async with chat_gateway(lambda prompt: "A text", Unending) as address:
        async with open_page(address) as page:
            await send(page, "First")
            await expect(page.locator(".turn .answer")).to_have_text("A")
            await page.reload()
            await answered(page, 1)
            assert await page.locator(".turn.user .said").text_content() == "First"
            await expect(page.locator(".turn .answer")).to_have_text("A")
            await expect(page.locator(".turn .figures")).to_contain_text("stopped")


async def test_stop_keeps_what_was_written(chat_gateway, open_page: Open) -> None:
    prompts, reply = noted("A text without end")
    async with chat_gateway(reply, Unending) as address, open_page(address) as page:
        for turn, text in enumerate(("First", "Second")):
            await send(page, text)
            await expect(page.locator(".turn .answer").nth(turn)).to_contain_text("A")
            await page.keyboard.press("Escape")
            await answered(page, turn + 1)
            await expect(page.locator(".turn .figures").nth(turn)).to_contain_text("stopped")
            assert await page.locator("#chat .error").text_content() == ""
        assert prompts[-1] == "<user>First<assistant>A<user>Second<assistant>"


async def test_an_error_is_shown_and_the_message_given_back(
    open_page: Open, services: Services
) -> None:
    async with open_page(services.gateway) as page:
        error, message = page.locator("#chat .error"), page.locator("#chat textarea")
        await give_key(page)
        await send(page, "word " * 5000)
        await expect(error).to_contain_text("The context is full")
        assert (await message.input_value()).startswith("word word")
        assert await page.locator(".turn").count() == 0
        await page.fill("#settings [name=key]", "wrong")
        await page.press("#settings [name=key]", "Tab")
        await send(page, "x")
        await expect(error).to_contain_text("key")
        await page.context.set_offline(True)
        await send(page, "x")
        await expect(error).to_contain_text("cannot be reached")
        await page.context.set_offline(False)


async def test_an_answer_has_no_limit_but_the_context(chat_gateway, open_page: Open) -> None:
    """The page says in words what cut an answer, also after the last frame was drawn."""
    context, prompt = 600, "<user>Hi<assistant>"
    for reply, limit, cut in (
        ("x" * 500, "", ""),
        ("x" * 500, "450", "cut at 450 tokens"),
        ("x" * context, "", "cut: the context is full"),
        ("x" * context, "32000", "cut: the context is full"),
    ):
        length = min(len(reply), int(limit or context), context - len(prompt))
        kind = partial(MockTransport, context=context)
        async with chat_gateway(lambda _, reply=reply: reply, kind) as address:
            async with open_page(address) as page:
                await page.click("#settings summary")
                await page.fill("#settings [name=max_tokens]", limit)
                await ask(page, "Hi")
                await page.evaluate(FRAMES)
                await expect(page.locator(".turn .answer")).to_have_text("x" * length)
                figures = await page.locator(".turn .figures").text_content()
                assert figures.endswith(cut or "0% drafted"), figures
                await page.reload()
                await answered(page, 1)
                assert await page.locator(".turn .figures").text_content() == figures
                await send(page, "x" * context)
                error = page.locator("#chat .error")
                await expect(error).to_contain_text("The context is full")


async def test_why_nothing_is_drafted(chat_gateway, open_page: Open, services: Services) -> None:
    async with chat_gateway(lambda prompt: "Hello") as address, open_page(address) as page:
        await expect(page.locator("#notice")).to_contain_text("no drafter")
        await ask(page, "Hi")
        await expect(page.locator("#chat .why")).to_contain_text("finds no drafter")
    async with open_page(services.gateway) as page:
        await give_key(page)
        await page.select_option("#settings [name=drafter]", "none")
        await page.fill("#settings [name=max_tokens]", "8")
        await ask(page, PROMPT)
        await expect(page.locator("#chat .why")).to_contain_text("settings say")
        assert await page.locator("#chat .tree .node").count() == 0


async def test_keyboard_and_small_screens(chat_gateway, open_page: Open) -> None:
    screen = {"width": 360, "height": 640}
    async with chat_gateway(lambda prompt: f"`{'long' * 90}`\n\n{MARKDOWN}") as address:
        async with open_page(address, viewport=screen, color_scheme="dark") as page:
            await expect(page.locator("#chat textarea")).to_be_focused()
            await page.keyboard.type("one")
            await page.keyboard.press("Shift+Enter")
            await page.keyboard.type("two")
            assert await page.locator("#chat textarea").input_value() == "one\ntwo"
            await page.keyboard.press("Enter")
            await answered(page, 1)
            assert await page.locator(".turn.user .said").text_content() == "one\ntwo"
            await page.keyboard.press("Tab")
            await expect(page.locator("#chat [name=chats]")).to_be_focused()
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert await page.evaluate(outline) == "solid"
            await page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            width = await page.evaluate("document.documentElement.scrollWidth")
            assert width <= screen["width"]


async def test_steps_are_those_of_the_verifier(chat_gateway, open_page: Open) -> None:
    """Also those that travel together: each of the letters and the end is one, but the prompt's."""
    async with chat_gateway(lambda prompt: "x" * 200) as address, open_page(address) as page:
        await ask(page, "one")
        sums = page.locator("#chat .panel dl")
        await expect(sums).to_contain_text("200, of which 0 had a draft")
        assert await page.locator("#chat .steps .plain").count() == 200
