"""Requests under load, against a client without services."""

import io

import pytest
from rich.console import Console

from paceline.bench.load.requests import NEW_TOKENS, Load, Request, Window
from paceline.bench.load.run import MODES, show, summary
from paceline.bench.prompts import Prompt
from paceline.client import Client, MockTransport, PacelineError, RoundStats


def entry(drafted: int, checked: int, emitted: int) -> RoundStats:
    return RoundStats(
        drafted, max(0, emitted - 1), emitted, round_ms=4.0, draft_ms=1.0, verify_ms=2.0,
        queue_ms=0.0, checked=checked,
    )  # fmt: skip


def test_a_window_counts_what_came_inside_it() -> None:
    rounds = [entry(8, 4, 3), entry(0, 0, 1)]
    requests = [Request(5.0, [10.0, 30.0], 8, rounds), Request()]
    found = Window(1.0, 3.0, 16, requests).summary()
    assert (found["tokens_per_second"], found["requests"]) == (8.0, 1)
    assert (found["ttft_ms"]["p50"], found["tpot_ms"]["p50"], found["itl_ms"]["p50"]) == (5, 5, 20)
    assert found["drafted_share"] == 0.75
    assert (found["drafted_nodes"], found["checked_nodes"]) == (8, 4)
    runs = {mode: [{**found, "tokens_per_second": rate} for rate in (8.0, 4.0)] for mode in MODES}
    runs["scheduled"] = [{**found, "tokens_per_second": rate} for rate in (12.0, 8.0)]
    modes = summary(runs)
    assert modes["scheduled"]["against_none"] == 1.75
    screen = io.StringIO()
    show("ngram", {"concurrency 4": modes}, Console(file=screen, width=160))
    assert screen.getvalue().count("concurrency 4") == len(MODES)


async def test_concurrent_and_arriving_requests() -> None:
    prompts = [Prompt("x", [1, 2, 3]), Prompt("x", [4, 5], 1.0, 2)]
    transport = MockTransport(lambda prompt: [7] * (2 * NEW_TOKENS))
    async with Client(transport=transport, cache_dir=None) as client:
        load = Load(client, prompts, "none")
        window = await load.concurrent(3, 5)
        assert window.begin < window.end
        assert window.tokens > 0
        window = await load.arriving(50.0, 0.3)
        assert window.end - window.begin == pytest.approx(0.3)
        assert window.summary()["ttft_ms"] is not None


async def test_a_request_that_fails_ends_the_measurement() -> None:
    def fail(prompt: list[int]) -> list[int]:
        raise RuntimeError("no text")

    async with Client(transport=MockTransport(fail), cache_dir=None) as client:
        with pytest.raises(ExceptionGroup) as failure:
            await Load(client, [Prompt("x", [1])], "none").concurrent(1, 1)
    assert failure.value.subgroup((RuntimeError, PacelineError))
