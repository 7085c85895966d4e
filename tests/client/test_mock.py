"""The mock transport behaves as a verifier."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.client import Client, MockTransport


async def test_text_tokens_and_functions() -> None:
    for reply in ("Hallo", b"Hallo", lambda prompt: "Hal" + prompt):
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


@given(reply=st.text(max_size=60), stop=st.text(min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_streamed_text_is_whole(reply: str, stop: str) -> None:
    """Any text, through tokens, chunks and stop strings."""

    async def run() -> None:
        async with Client(transport=MockTransport(reply)) as client:
            streamed = [chunk.text async for chunk in client.generate("x", max_new_tokens=500)]
            assert "".join(streamed) == reply
            result = await client.generate("x", max_new_tokens=500, stop=stop)
            assert result.text == reply.split(stop)[0]
            assert (result.stop_string == stop) == (stop in reply)

    asyncio.run(run())
