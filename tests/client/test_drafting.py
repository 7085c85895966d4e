"""What a generation says about drafting, and which drafters there are."""

import asyncio
import logging
from collections import Counter
from dataclasses import replace

import pytest
from fakes.verifier import World, continuation, joined

from paceline.client import (
    Client,
    DraftOptions,
    NotFoundError,
    RetryOptions,
    RoundStats,
    SourceStats,
    Stats,
    UnavailableError,
)
from paceline.client._text import Undrafted
from paceline.v1 import verifier_pb2

from .conftest import QUICK

PROMPT = [104, 105, 106]
SEED = 5
ONE_TRY = RetryOptions(budget=0.0)


async def test_statistics_are_those_of_the_responses(world: World, client: Client) -> None:
    result = await client.generate(PROMPT, max_new_tokens=101, seed=SEED)
    stats = result.stats
    assert result.token_ids == continuation(PROMPT, 101, SEED)
    assert sum(entry.emitted for entry in stats.rounds) == 100
    assert stats.drafted_rounds == len(stats.rounds) == 20
    assert stats.accepted == 80
    assert stats.accepted_per_position == [20] * 4
    assert stats.mean_accepted_length == 5
    assert stats.drafted == stats.checked == 160
    assert stats.free_run_tokens == 0
    assert stats.drafter_versions == ["fake@1"]
    assert stats.summary()["accepted"] == 80
    for entry in stats.rounds:
        assert (entry.round_ms, entry.draft_ms, entry.steps) == (0.1, 0.01, 1)
        assert (entry.drafter, entry.version, entry.undrafted) == ("fake", "1", None)
        assert entry.transport_ms == pytest.approx(0.09)


def plain(steps: int, reason: Undrafted, **times: float) -> RoundStats:
    return RoundStats(0, 0, steps, 10.0 * steps, 0, 0, 0, steps=steps, undrafted=reason, **times)


def test_statistics_are_explained_in_words() -> None:
    drafted = RoundStats(4, 1, 2, 16.0, 0, 0, 0, drafter="dspark", version="2", plain_ms=10.0)
    rounds = [drafted, plain(6, "node_budget", plain_ms=60.0), drafted, plain(3, "late")]
    stats = Stats(rounds, fallbacks=Counter(drafter_timeout=3))
    assert stats.speedup == pytest.approx((2 * 20 + 60) / (2 * 16 + 60))
    assert stats.undrafted == {"node_budget": 6, "late": 3}
    assert stats.explain() == (
        "dspark@2 drafted 2 of 11 rounds, which emitted 2.0 tokens each; 9 rounds had no draft: "
        "drafting did not pay (6), the draft came too late (3). About 1.1 times as fast as plain "
        "decoding, which is an estimate: few plain steps were measured. Drafting failed: 3 "
        "drafter_timeout."
    )
    stats.merge(Stats([RoundStats(4, 3, 4, 1.0, 0, 0, 0, drafter="ngram", version="1")]))
    text = stats.explain()
    assert "2 of 12 rounds, which emitted 2.0 tokens each; ngram@1 drafted 1 of 12 rounds" in text
    assert "Too few plain steps were measured" in Stats([replace(drafted, plain_ms=0)]).explain()
    assert Stats([plain(5, "no_drafter")]).explain() == (
        "none of 5 rounds had a draft: no drafter was there (5)."
    )
    assert Stats().explain() == "there were no rounds: the prefill emitted the whole text."


def test_what_each_source_added_is_explained() -> None:
    """Of rounds of local sources by name; of others all is the drafter's."""
    local = RoundStats(
        *(6, 3, 4, 16.0, 0, 0, 0),
        checked=5,
        drafter="local",
        version="1",
        shares=(("grammar", SourceStats(2, 2, 1)), ("ngram", SourceStats(4, 3, 2))),
    )
    alone = RoundStats(4, 1, 2, 16.0, 0, 0, 0, checked=4, drafter="dspark", version="2")
    merged = replace(
        alone, shares=(("ngram", SourceStats(1, 1, 1)), ("dspark", SourceStats(3, 3, 0)))
    )
    stats = Stats([local, alone, merged, plain(2, "empty")])
    assert stats.sources == {
        "ngram": SourceStats(5, 4, 3),
        "grammar": SourceStats(2, 2, 1),
        "dspark": SourceStats(7, 7, 1),
    }
    assert sum(each.accepted for each in stats.sources.values()) == stats.accepted
    assert (
        "Accepted of the checked drafts: 3 of 4 by ngram, 1 of 2 by grammar, 1 of 7 by dspark."
    ) in stats.explain()
    assert stats.summary()["sources"] == {
        name: each._asdict() for name, each in stats.sources.items()
    }
    assert "checked drafts" not in Stats([alone]).explain()


async def test_without_drafting(world: World, client: Client) -> None:
    """Consecutive steps are merged in one response."""
    world.verifier.merged = 16
    result = await client.generate(PROMPT, max_new_tokens=101, seed=SEED, drafter="none")
    assert result.token_ids == continuation(PROMPT, 101, SEED)
    assert [entry.steps for entry in result.stats.rounds] == [16] * 6 + [4]
    assert result.stats.free_run_tokens == 100
    assert result.stats.drafted_rounds == 0
    assert result.stats.undrafted == {"no_drafter": 100}
    assert world.verifier.starts[0].drafter == world.verifier.creates[0].drafter == "none"


@pytest.mark.parametrize("drafter", [None, "fake", "fake@1", "other"])
async def test_the_verifier_is_told_which_drafter_and_how(
    world: World, drafter: str | None
) -> None:
    world.verifier.joined = [joined("fake", "other")]
    drafting = DraftOptions(timeout=0.25, adaptive=False)
    async with Client(world.address, cache_dir=None, drafting=drafting) as client:
        await client.generate(PROMPT, max_new_tokens=40, seed=SEED, drafter=drafter, max_nodes=3)
        await client.generate(PROMPT, max_new_tokens=40, seed=SEED)
    start, other = world.verifier.starts
    for request in (world.verifier.creates[0], start):
        assert request.HasField("drafter") == (drafter is not None)
        assert request.drafter == (drafter or "")
    assert (start.always_draft, start.draft_timeout_ms, start.max_nodes) == (True, 250, 3)
    assert other.max_nodes == 0


async def test_chunks_say_why_they_were_not_drafted(world: World, client: Client) -> None:
    async def reasons(drafter: str | None = None) -> set[str | None]:
        generation = client.generate(PROMPT, max_new_tokens=100, seed=SEED, drafter=drafter)
        first, *chunks = [chunk async for chunk in generation]
        assert first.undrafted is None
        assert all((chunk.tree is None) == (chunk.undrafted is not None) for chunk in chunks)
        return {chunk.undrafted for chunk in chunks}

    assert await reasons() <= {None, "last_token"}
    assert await reasons("none") == {"no_drafter"}
    for value, word in (
        (verifier_pb2.NO_DRAFT_REASON_NOT_READY, "not_ready"),
        (verifier_pb2.NO_DRAFT_REASON_LATE, "late"),
        (verifier_pb2.NO_DRAFT_REASON_EMPTY, "empty"),
    ):
        world.verifier.no_draft = value
        assert await reasons() == {word}
    world.verifier.no_draft, world.verifier.node_budget = 0, 0
    assert await reasons() == {"node_budget", "last_token"}


async def test_failures_of_drafting_are_counted_and_logged(
    world: World, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline.client")
    for _ in range(2):
        world.verifier.fallbacks = ["drafter_timeout", "invalid_tree", "drafter_timeout"]
        result = await client.generate(PROMPT, max_new_tokens=20, seed=SEED)
        assert result.stats.fallbacks == {"drafter_timeout": 2, "invalid_tree": 1}
    levels = [record.levelno for record in caplog.records if "(drafter_timeout)" in record.message]
    assert levels == [logging.WARNING] + [logging.INFO] * 3


async def test_a_drafter_that_is_not_there_costs_drafting_only(
    world: World, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is said where none is wanted."""
    world.verifier.joined = []
    for drafter, problems in (
        (None, []),
        ("none", []),
        ("wanted", ["drafter 'wanted' is not there: no drafter service with it has joined"]),
    ):
        result = await client.generate(PROMPT, max_new_tokens=40, seed=SEED, drafter=drafter)
        assert result.token_ids == continuation(PROMPT, 40, SEED)
        assert result.stats.problems == problems
        assert result.stats.fallbacks == dict.fromkeys(["drafter_unavailable"] * len(problems), 1)
    assert not caplog.records


async def test_a_drafter_that_no_service_ever_had_is_an_error_at_once(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.client._fleet.MAX_AGE", 0.0)
    with pytest.raises(NotFoundError, match="no drafter 'wanted' here; there are: none, fake"):
        await client.generate(PROMPT, drafter="wanted")
    assert not world.verifier.creates
    await client.generate(PROMPT, max_new_tokens=4, drafter="fake")
    world.verifier.joined = [joined("other")]
    result = await client.generate(PROMPT, max_new_tokens=4, drafter="fake", seed=SEED)
    assert result.token_ids == continuation(PROMPT, 4, SEED), "it was there: it may come back"
    assert result.stats.fallbacks == {"drafter_unavailable": 1}


async def test_a_drafter_that_has_just_joined_is_used(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the prefill, since the cache keeps the hidden states that the drafter reads."""
    monkeypatch.setattr("paceline.client._fleet.MAX_AGE", 600.0)
    await client.generate(PROMPT, max_new_tokens=4)
    world.verifier.joined = [joined("fake", "late")]
    results = await asyncio.gather(
        *(client.generate([n, 1], max_new_tokens=40, seed=SEED, drafter="late") for n in range(8))
    )
    assert all(result.stats.drafted_rounds for result in results)
    assert not any(result.stats.fallbacks for result in results)


async def test_drafters_are_listed_default_first(world: World, client: Client) -> None:
    world.verifier.joined = [joined("own", "beta"), joined("alpha", "own")]
    assert await client.drafters() == ("own", "beta", "alpha")
    world.verifier.joined = []
    assert await client.drafters() == ()
    await world.service.stop()
    with pytest.raises(UnavailableError):
        async with Client(world.address, cache_dir=None, retry=ONE_TRY) as other:
            await other.drafters()


async def test_a_verifier_that_guesses_by_itself_has_the_drafter_local(
    world: World, client: Client
) -> None:
    """First, unless a service's default drafter does more than look up."""
    world.verifier.local_sources = ["ngram", "grammar"]
    for services, expected in (
        ([], ("local",)),
        ([joined("lookup", "other", method="ngram")], ("local", "lookup", "other")),
        ([joined("trained", method="dspark")], ("trained", "local")),
    ):
        world.verifier.joined = services
        assert await client.drafters() == expected
    world.verifier.joined = []
    for drafter in (None, "local"):
        result = await client.generate(PROMPT, max_new_tokens=5, seed=SEED, drafter=drafter)
        assert not result.stats.fallbacks
        assert not result.stats.problems
    world.verifier.local_sources = []
    async with Client(world.address, cache_dir=None, retry=QUICK) as other:
        result = await other.generate(PROMPT, max_new_tokens=5, seed=SEED, drafter="local")
        assert result.stats.problems


async def test_a_seed_is_drawn_and_reported(world: World, client: Client) -> None:
    first = await client.generate(PROMPT, max_new_tokens=30)
    second = await client.generate(PROMPT, max_new_tokens=30)
    again = await client.generate(PROMPT, max_new_tokens=30, seed=first.seed)
    assert first.seed != second.seed
    assert again.token_ids == first.token_ids != second.token_ids


def drafted_rounds(count: int, emitted: int, **times: float) -> list[RoundStats]:
    return [RoundStats(4, emitted - 1, emitted, 10.0, 0, 0, 0, drafter="a", **times)] * count


@pytest.mark.parametrize(
    ("rounds", "speedup", "estimate"),
    [
        # Nothing was drafted: nothing was gained or lost.
        ([plain(31, "late", plain_ms=600.0)], None, False),
        ([plain(31, "node_budget", plain_ms=600.0)], None, False),
        ([], None, False),
        # Nothing was measured to compare with.
        (drafted_rounds(5, 2), None, False),
        # Plain steps of the verifier's process, under another load maybe.
        (drafted_rounds(5, 2, plain_ms=8.0), 1.6, True),
        # A step cannot bring more than its tokens.
        (drafted_rounds(5, 2, plain_ms=30.0), 2.0, True),
        ([*drafted_rounds(1, 2, plain_ms=90.0), plain(9, "late", plain_ms=180.0)], 1.1, True),
        # Plain steps of the text itself: 10 ms each.
        ([*drafted_rounds(16, 3, plain_ms=30.0), plain(16, "node_budget")], 2.0, False),
        ([*drafted_rounds(16, 1), plain(16, "node_budget")], 1.0, False),
        ([*drafted_rounds(16, 2), plain(15, "node_budget")], None, False),
        # Steps that waited for a tree are none.
        ([*drafted_rounds(16, 2), plain(30, "late"), plain(30, "empty")], None, False),
    ],
)
def test_the_speedup_is_never_more_than_was_measured(
    rounds: list[RoundStats], speedup: float | None, estimate: bool
) -> None:
    stats = Stats(rounds)
    assert stats.speedup == (None if speedup is None else pytest.approx(speedup))
    assert stats.speedup_is_estimate == estimate
    if stats.speedup is not None:
        assert stats.speedup <= sum(each.emitted for each in rounds) / stats.steps
    text = stats.explain()
    assert ("as plain decoding" in text) == (speedup is not None)
    assert ("estimate" in text) == estimate
    summary = stats.summary()
    assert summary["speedup"] == (None if speedup is None else pytest.approx(speedup, abs=5e-4))
    floats = [value for value in summary.values() if isinstance(value, float)]
    assert floats == [round(value, 3) for value in floats]
