"""The mock transport behaves as a verifier; stop strings end texts."""

import asyncio

from fakes.transport import MockTransport
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.client import Client


async def test_text_tokens_and_functions() -> None:
    for reply in ("Hallo", [*b"Hallo"], lambda prompt: "Hal" + prompt):
        async with Client(transport=MockTransport(reply)) as client:
            result = await client.generate("lo", logprobs=True)
            assert result.text == "Hallo"
            assert result.token_ids == [*b"Hallo", MockTransport.END]
            assert result.finish_reason == "stop"
            assert [entry.logprob for entry in result.logprobs or ()] == [0.0] * 6


async def test_limits_and_stops() -> None:
    async with Client(transport=MockTransport("0123456789" * 30)) as client:
        short = await client.generate("x", max_new_tokens=100)
        assert (short.text, short.finish_reason) == ("0123456789" * 10, "length")
        stopped = await client.generate("x", stop="456")
        assert (stopped.text, stopped.stop_string) == ("0123", "456")
        token = await client.generate("x", stop_token_ids=[ord("3")])
        assert token.text == "0123"


async def test_requests_are_kept_and_caches_counted() -> None:
    transport = MockTransport("x" * 1000)
    async with Client(transport=transport) as client:
        async for _ in client.generate("Hi", temperature=0.5, max_new_tokens=1000):
            assert transport.open_caches == 1
            break
        async with asyncio.timeout(60):
            while transport.open_caches:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert transport.requests[0].sampling.temperature == 0.5
    assert bytes(transport.requests[0].prompt_tokens) == b"Hi"


@given(reply=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_streamed_text_is_whole(reply: str) -> None:
    """Any text, through tokens and chunks."""

    async def run() -> None:
        async with Client(transport=MockTransport(reply)) as client:
            streamed = [chunk.text async for chunk in client.generate("x", max_new_tokens=500)]
            assert "".join(streamed) == reply

    asyncio.run(run())


def stopped(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text and stop string, found by growing the text a character at a time."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(
    reply=st.text("abc", max_size=60),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
@settings(max_examples=100, deadline=None)
def test_a_stop_string_ends_the_text_and_no_more_than_its_beginning_is_held_back(
    reply: str, stops: list[str]
) -> None:
    async def run() -> None:
        async with Client(transport=MockTransport(reply)) as client:
            generation = client.generate("x", max_new_tokens=500, stop=stops)
            seen = shown = ""
            async for chunk in generation:
                seen += bytes(token for token in chunk.token_ids if token < 256).decode()
                shown += chunk.text
                held = seen.removeprefix(shown)
                assert seen.startswith(shown)
                assert any(stop.startswith(held) for stop in ("", *stops))
            result = await generation
            assert shown == result.text
            assert (result.text, result.stop_string) == stopped(reply, stops)

    asyncio.run(run())
