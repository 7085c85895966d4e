"""Failures between client and verifier do not change the tokens, or raise a clear error."""

from itertools import count

import grpc
import pytest

from paceline.client import (
    CapacityError,
    Client,
    DeadlineError,
    InvalidRequestError,
    RetryOptions,
    ServerError,
    TargetChangedError,
    UnavailableError,
)

from .fake_target import continuation
from .statuses import status
from .world import World

PROMPT = [104, 105, 106]
SEED = 5
QUICK = RetryOptions(budget=0.2, first_delay=0.01)


@pytest.mark.parametrize("what", ["reset", "end", grpc.StatusCode.UNAVAILABLE])
@pytest.mark.parametrize(
    ("drafter", "round_id", "messages"),
    [
        ("none", 1, 0),
        ("none", 1, 1),
        ("none", 1, 3),
        ("none", 2, 0),
        ("fake", 1, 0),
        ("fake", 2, 0),
    ],
)
async def test_broken_streams_are_resumed(
    world: World,
    client: Client,
    what: grpc.StatusCode | str,
    drafter: str,
    round_id: int,
    messages: int,
) -> None:
    world.verifier.fail_once(round_id, messages, what)
    tokens: list[int] = []
    async for chunk in (
        generation := client.generate(PROMPT, max_new_tokens=140, seed=SEED, drafter=drafter)
    ):
        tokens += chunk.token_ids
    result = await generation
    assert tokens == result.token_ids == continuation(PROMPT, 140, SEED)
    assert result.stats.fallbacks == {"verifier_resumed": 1}
    assert len(world.verifier.creates) == 1
    repeated = [request for request in world.verifier.rounds if request.round_id == round_id]
    assert len(repeated) == 2
    assert repeated[1].handle
    assert not world.verifier.caches


@pytest.mark.parametrize("messages", [0, 1, 30])
async def test_logprobs_survive_a_resumed_free_run(
    world: World, client: Client, messages: int
) -> None:
    world.verifier.fail_once(1, messages, "reset")
    result = await client.generate(PROMPT, max_new_tokens=70, seed=SEED, drafter="none", logprobs=2)
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    assert all(entry.logprob == -entry.token_id for entry in result.logprobs)
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in result.logprobs)


@pytest.mark.parametrize(
    ("drafter", "messages"), [("none", 0), ("none", 1), ("none", 3), ("fake", 0)]
)
@pytest.mark.parametrize("reason", ["verifier_restarted", "step_failed"])
async def test_a_lost_cache_is_prefilled_again(
    world: World, client: Client, messages: int, drafter: str, reason: str
) -> None:
    """After a restart of the verifier on the same address, and after a failed step."""
    if reason == "verifier_restarted":
        world.verifier.restart_once(1, messages)
    else:
        failed = status(grpc.StatusCode.INTERNAL, "STEP_FAILED", "a bug there")
        world.verifier.fail_once(1, messages, failed)
    result = await client.generate(PROMPT, max_new_tokens=140, seed=SEED, drafter=drafter)
    assert result.stats.batch_invariant is (reason == "step_failed")
    assert result.token_ids == continuation(PROMPT, 140, SEED)
    assert result.stats.fallbacks[reason] == 1
    first, again = world.verifier.creates
    assert not first.output_tokens
    assert list(again.output_tokens) == result.token_ids[: 1 + messages]
    assert result.usage.completion_tokens == 140
    assert not world.drafter.out_of_step
    assert not world.verifier.caches


async def test_a_new_cache_is_shown_to_the_drafter(world: World, eager: Client) -> None:
    world.verifier.restart_once(3, 0)
    result = await eager.generate(PROMPT, max_new_tokens=140, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 140, SEED)
    first, second = world.drafter.attaches
    assert first.read_grant != second.read_grant
    assert len(second.tokens) > len(first.tokens)
    assert not world.drafter.out_of_step


async def test_another_model_after_a_restart_is_an_error(world: World, client: Client) -> None:
    world.verifier.restart_once(1, 2, fingerprint="0" * 64)
    with pytest.raises(TargetChangedError, match="start a new generation"):
        await client.generate(PROMPT, max_new_tokens=100, seed=SEED, drafter="none")


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of retries advances by 0.1 s with each read."""
    clock = count()
    monkeypatch.setattr("paceline.client._retry.monotonic", lambda: next(clock) / 10)


@pytest.mark.usefixtures("ticks")
async def test_constant_failures_exhaust_the_retry_budget(world: World) -> None:
    world.verifier.fault = lambda *_: grpc.StatusCode.UNAVAILABLE
    async with Client(*world.addresses, cache_dir=None, retry=QUICK) as client:
        with pytest.raises(UnavailableError):
            await client.generate(PROMPT, max_new_tokens=100, seed=SEED)
    assert len(world.verifier.rounds) > 1
    assert not world.verifier.caches


@pytest.mark.usefixtures("ticks")
async def test_progress_resets_the_retry_budget(world: World) -> None:
    """The budget is for time without progress, not for the whole generation."""
    world.verifier.fault = lambda _, sent: "reset" if sent == 1 else None
    async with Client(*world.addresses, cache_dir=None, retry=QUICK) as client:
        result = await client.generate(PROMPT, max_new_tokens=60, seed=SEED, drafter="none")
    assert result.token_ids == continuation(PROMPT, 60, SEED)
    assert result.stats.fallbacks["verifier_resumed"] > 3


async def test_a_full_verifier_is_retried(world: World, client: Client) -> None:
    world.verifier.full = 3
    result = await client.generate(PROMPT, max_new_tokens=20, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 20, SEED)
    assert result.stats.fallbacks["verifier_full"] == 3


async def test_a_verifier_that_stays_full_is_an_error(world: World) -> None:
    world.verifier.full = 10**6
    async with Client(*world.addresses, cache_dir=None, retry=QUICK) as client:
        with pytest.raises(CapacityError) as caught:
            await client.generate(PROMPT)
        assert caught.value.reason == "KV_FULL"
        assert caught.value.retry_after == pytest.approx(0.01)
        assert caught.value.metadata == {"k": "v"}
        with pytest.raises(DeadlineError):
            await client.generate(PROMPT, deadline=0.4)


async def test_a_request_that_never_fits_is_not_retried(world: World, client: Client) -> None:
    world.verifier.full, world.verifier.retry_after = 10**6, None
    with pytest.raises(CapacityError):
        await client.generate(PROMPT)
    assert len(world.verifier.creates) == 1


async def test_a_deadline_ends_the_generation_and_frees_the_cache(
    world: World, client: Client
) -> None:
    world.verifier.step_seconds = 0.05
    with pytest.raises(DeadlineError, match="tokens"):
        async for _ in client.generate(PROMPT, max_new_tokens=1000, deadline=0.3):
            pass
    assert not world.verifier.caches


@pytest.mark.parametrize(("reason", "creates"), [("STEP_FAILED", 2), ("A_BUG", 1)])
async def test_a_second_fault_is_raised(
    world: World, client: Client, reason: str, creates: int
) -> None:
    failed = status(grpc.StatusCode.INTERNAL, reason, "a bug there")
    world.verifier.fault = lambda *_: failed
    with pytest.raises(ServerError, match="a bug there") as caught:
        await client.generate(PROMPT)
    assert caught.value.reason == reason
    assert len(world.verifier.creates) == creates
    assert not world.verifier.caches


async def test_a_failed_prefill_is_retried_once(world: World, client: Client) -> None:
    failed = status(grpc.StatusCode.INTERNAL, "STEP_FAILED", "a bug there")
    world.verifier.create_faults = [failed]
    result = await client.generate(PROMPT, max_new_tokens=20, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 20, SEED)
    world.verifier.create_faults = [failed] * 3
    with pytest.raises(ServerError, match="a bug there"):
        await client.generate(PROMPT)
    assert len(world.verifier.create_faults) == 1


async def test_a_refused_prompt_is_an_invalid_request(world: World, client: Client) -> None:
    refused = status(grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "too long")
    world.verifier.create_faults = [refused]
    with pytest.raises(InvalidRequestError) as caught:
        await client.generate(PROMPT)
    assert caught.value.reason == "PROMPT_TOO_LONG"


async def test_a_broken_release_is_retried(world: World, client: Client) -> None:
    world.verifier.release_faults = [grpc.StatusCode.UNAVAILABLE] * 2
    await client.generate(PROMPT, max_new_tokens=5)
    assert not world.verifier.caches
    assert not world.verifier.release_faults


async def test_a_failed_release_is_not_retried(world: World, client: Client) -> None:
    world.verifier.release_faults = [grpc.StatusCode.PERMISSION_DENIED]
    result = await client.generate(PROMPT, max_new_tokens=5, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 5, SEED)
    assert world.verifier.caches
