"""Failures of a verifier do not change the tokens, or raise a clear error of the client."""

import asyncio
import tempfile
from pathlib import Path

import grpc
import pytest
from fakes.verifier import Fault, Service, World, continuation, running, status
from hypothesis import given
from hypothesis import strategies as st

from paceline import client as package
from paceline.client import (
    CapacityError,
    Client,
    DeadlineError,
    InvalidRequestError,
    PacelineError,
    PreconditionError,
    RetryOptions,
    ServerError,
    TargetChangedError,
    UnavailableError,
    UnimplementedError,
)
from paceline.client._errors import from_rpc_error, rpc_errors

PROMPT = [104, 105, 106]
SEED = 5
QUICK = RetryOptions(budget=0.2, first_delay=0.01)
FAST = RetryOptions(budget=60, first_delay=0.001, max_delay=0.001)
STEP_FAILED = status(grpc.StatusCode.INTERNAL, "STEP_FAILED", "a bug there")
FULL = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_FULL", "no room", 0.001)


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[int, Fault]]:
    """Faults and their positions, with at most one failed step."""
    kinds = st.sampled_from(["reset", "end", "restart", grpc.StatusCode.UNAVAILABLE, FULL])
    plan = draw(st.lists(st.tuples(st.integers(1, 60), kinds), max_size=5))
    if draw(st.booleans()):
        plan.append((draw(st.integers(1, 60)), STEP_FAILED))
    return sorted(plan, key=lambda fault: fault[0])


@given(
    plan=plans(),
    drafter=st.sampled_from(["none", "fake"]),
    merged=st.integers(1, 7),
    window=st.integers(1, 9),
    streamed=st.booleans(),
    full=st.integers(0, 2),
)
def test_no_token_is_lost_or_repeated(
    plan: list[tuple[int, Fault]], drafter: str, merged: int, window: int, streamed: bool, full: int
) -> None:
    """Wherever streams break, caches are lost and steps fail. A stream is resumed; a cache is
    prefilled again only where it was lost. Each failure is counted."""

    async def run(world: World) -> None:
        verifier = world.verifier
        verifier.merged, verifier.full, verifier.retry_after = merged, full, 0.001
        left = list(plan)

        def fault(position: int) -> Fault | None:
            return left.pop(0)[1] if left and position >= left[0][0] else None

        verifier.fault = fault
        async with Client(
            world.address, cache_dir=None, retry=FAST, unread_chunks=window
        ) as client:
            generation = client.generate(
                PROMPT, max_new_tokens=60, seed=SEED, drafter=drafter, logprobs=2
            )
            if streamed:
                chunks = [chunk async for chunk in generation]
                tokens = [token for chunk in chunks for token in chunk.token_ids]
                assert tokens == continuation(PROMPT, 60, SEED)
                rounds = [chunk.round for chunk in chunks]
                assert rounds == sorted(rounds)
            result = await generation
        assert result.token_ids == continuation(PROMPT, 60, SEED)
        assert result.text == bytes(result.token_ids).decode()
        assert result.usage.completion_tokens == 60
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == result.token_ids
        assert all(entry.top[0] == (entry.token_id, -entry.token_id) for entry in result.logprobs)
        assert sum(entry.emitted for entry in result.stats.rounds) <= 59
        kinds = [kind for _, kind in plan[: len(plan) - len(left)]]
        counted = result.stats.fallbacks
        assert counted["verifier_full"] == full
        assert counted["verifier_restarted"] == kinds.count("restart")
        # A stream that breaks while the reader grants steps may end without its status: it is then
        # resumed without being counted, also where a step had failed.
        failed, resumed = counted["step_failed"], len(kinds) - counted["step_failed"]
        assert failed == kinds.count(STEP_FAILED) or (streamed and not failed)
        assert (0 if streamed else resumed) <= counted["verifier_resumed"] <= resumed
        created = verifier.creates[full:]
        assert len(created) == 1 + kinds.count("restart") + failed
        for request in created:
            assert list(request.output_tokens) == result.token_ids[: len(request.output_tokens)]
            assert request.drafter == drafter
        await verifier.all_released()

    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="pl") as folder:
            async with running(Path(folder)) as world:
                await run(world)

    asyncio.run(main())


async def test_the_statistics_tell_of_a_verifier_without_batch_invariance(
    world: World, client: Client
) -> None:
    world.verifier.fail_at((70, "restart"))
    async for chunk in (generation := client.generate(PROMPT, max_new_tokens=140, seed=SEED)):
        assert generation.stats.batch_invariant is (world.verifier.made == 1)
        world.verifier.batch_invariant = not chunk.round
    assert (await generation).stats.batch_invariant is False


async def test_a_position_that_the_verifier_does_not_have_is_prefilled_again(
    world: World, client: Client
) -> None:
    ahead = status(grpc.StatusCode.FAILED_PRECONDITION, "POSITION_AHEAD", "not emitted")
    world.verifier.fail_at((20, ahead))
    result = await client.generate(PROMPT, max_new_tokens=60, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 60, SEED)
    assert len(world.verifier.creates) == 2


async def test_another_model_after_a_restart_is_an_error(world: World, client: Client) -> None:
    world.verifier.next_fingerprint = "0" * 64
    world.verifier.fail_at((20, "restart"))
    with pytest.raises(TargetChangedError, match="start a new generation"):
        await client.generate(PROMPT, max_new_tokens=100, seed=SEED, drafter="none")


# The first delay is within it, the sum of two never.
ONE_DELAY = RetryOptions(budget=0.005, first_delay=0.005, max_delay=1.0)


async def test_constant_failures_exhaust_the_retry_budget(world: World) -> None:
    world.verifier.start_fault = grpc.StatusCode.UNAVAILABLE
    async with Client(world.address, cache_dir=None, retry=ONE_DELAY) as client:
        with pytest.raises(UnavailableError):
            await client.generate(PROMPT, max_new_tokens=100, seed=SEED)
    assert len(world.verifier.starts) == 2
    await world.verifier.all_released()


async def test_progress_resets_the_retry_budget(world: World) -> None:
    """The budget is for time without progress, not for the whole generation."""
    world.verifier.fault = lambda position: "reset" if position % 5 == 0 else None
    async with Client(world.address, cache_dir=None, retry=ONE_DELAY) as client:
        result = await client.generate(PROMPT, max_new_tokens=60, seed=SEED, drafter="none")
    assert result.token_ids == continuation(PROMPT, 60, SEED)
    assert result.stats.fallbacks["verifier_resumed"] > 3


async def test_a_verifier_that_stays_full_is_an_error(world: World) -> None:
    world.verifier.full = 10**6
    async with Client(world.address, cache_dir=None, retry=QUICK) as client:
        with pytest.raises(CapacityError) as caught:
            await client.generate(PROMPT)
        assert caught.value.reason == "KV_FULL"
        assert caught.value.retry_after == pytest.approx(0.01)
        assert caught.value.metadata == {"k": "v"}
        with pytest.raises(DeadlineError):
            await client.generate(PROMPT, deadline=0.4)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, CapacityError),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
    ],
)
async def test_a_request_that_can_never_succeed_is_not_retried(
    world: World, client: Client, code: grpc.StatusCode, error: type[PacelineError]
) -> None:
    world.verifier.create_faults = [status(code, "WHY", "too long")] * 2
    with pytest.raises(error) as caught:
        await client.generate(PROMPT)
    assert caught.value.reason == "WHY"
    assert len(world.verifier.creates) == 1


async def test_a_deadline_ends_the_generation_and_frees_the_cache(
    world: World, client: Client
) -> None:
    world.verifier.step_seconds = 0.05
    with pytest.raises(DeadlineError, match="tokens"):
        async for _ in client.generate(PROMPT, max_new_tokens=1000, deadline=0.3):
            pass
    await world.verifier.all_released()


@pytest.mark.parametrize(
    ("code", "reason", "creates"),
    [
        (grpc.StatusCode.INTERNAL, "STEP_FAILED", 2),
        (grpc.StatusCode.INTERNAL, "A_BUG", 1),
        (grpc.StatusCode.ABORTED, "STREAM_SUPERSEDED", 1),
    ],
)
async def test_a_second_fault_is_raised(
    world: World, client: Client, code: grpc.StatusCode, reason: str, creates: int
) -> None:
    """At once, where no second try can help."""
    failed = status(code, reason, "a bug there")
    world.verifier.fault = lambda position: failed if position >= 20 else None
    with pytest.raises(ServerError, match="a bug there") as caught:
        await client.generate(PROMPT)
    assert caught.value.reason == reason
    assert len(world.verifier.creates) == creates
    await world.verifier.all_released()


async def test_a_failed_prefill_is_retried_once(world: World, client: Client) -> None:
    world.verifier.create_faults = [STEP_FAILED]
    result = await client.generate(PROMPT, max_new_tokens=20, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 20, SEED)
    world.verifier.create_faults = [STEP_FAILED] * 3
    with pytest.raises(ServerError, match="a bug there"):
        await client.generate(PROMPT)
    assert len(world.verifier.create_faults) == 1


async def test_a_broken_release_is_retried(world: World, client: Client) -> None:
    world.verifier.release_faults = [grpc.StatusCode.UNAVAILABLE] * 2
    await client.generate(PROMPT, max_new_tokens=5)
    await world.verifier.all_released()
    assert not world.verifier.release_faults


async def test_a_failed_release_is_not_retried(world: World, client: Client) -> None:
    world.verifier.release_faults = [grpc.StatusCode.PERMISSION_DENIED]
    result = await client.generate(PROMPT, max_new_tokens=5, seed=SEED)
    assert result.token_ids == continuation(PROMPT, 5, SEED)
    assert world.verifier.caches


def rpc_error(
    code: grpc.StatusCode, reason: str = "", retry_after: float | None = None
) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    if not reason:
        return grpc.aio.AioRpcError(code, empty, empty, details="plain")
    rich = status(code, reason, "what was wrong", retry_after)
    trailing = grpc.aio.Metadata(*rich.trailing_metadata)
    return grpc.aio.AioRpcError(code, empty, trailing, details=rich.details)


def test_the_details_of_a_status_are_read() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_FULL", 1.5))
    assert type(error) is package.CapacityError
    assert (error.reason, error.message, error.retry_after) == ("KV_FULL", "what was wrong", 1.5)
    assert error.metadata == {"k": "v"}


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED]
)
def test_a_reset_connection_is_not_a_fault_of_the_service(code: grpc.StatusCode) -> None:
    """Only an error with an ErrorInfo was sent by the service itself."""
    assert type(from_rpc_error(rpc_error(code))) is UnavailableError
    assert type(from_rpc_error(rpc_error(code, "STEP_FAILED"))) is ServerError


def test_invalid_trailers_do_not_hide_the_code() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, trailing, trailing, details="gone")
    assert type(from_rpc_error(error)) is package.NotFoundError


async def test_errors_name_the_service_its_address_and_what_to_do(
    world: World, short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Service(short_folder / "other", lambda _: None)
    await other.start()
    async with Client(other.address, cache_dir=None) as client:
        with pytest.raises(UnimplementedError, match=f"{other.address} is not a verifier.*swapped"):
            await client.generate("x")
    await other.stop()
    retry = RetryOptions(budget=0.01, first_delay=0.005)
    async with Client("127.0.0.1:9", cache_dir=None, retry=retry) as client:
        expected = "no verifier answers at 127.0.0.1:9: start one with `paceline serve MODEL`"
        with pytest.raises(UnavailableError, match=expected):
            await client.generate("x")
    (warning,) = [record.message for record in caplog.records if "trying again" in record.message]
    assert warning.endswith("trying again for up to 0.01 s")
    world.verifier.protocol_version = 7
    async with Client(world.address, cache_dir=None) as client:
        expected = (
            f"verifier at {world.address} speaks version 7 of the protocol, this client version 1"
        )
        with pytest.raises(PreconditionError, match=expected):
            await client.generate("x")


async def test_an_error_has_the_text_so_far(world: World, client: Client) -> None:
    generation = client.generate([1, 2], max_new_tokens=200)
    chunks = aiter(generation)
    chunk = await anext(chunks)
    generation.fail("stopped here")
    with pytest.raises(PacelineError) as raised:
        await generation
    assert raised.value.token_ids[: len(chunk.token_ids)] == list(chunk.token_ids)
    assert raised.value.text.startswith(chunk.text)


async def test_a_peers_cancellation_is_a_broken_stream_ours_is_not() -> None:
    with pytest.raises(UnavailableError), rpc_errors():
        raise asyncio.CancelledError

    waits = asyncio.Event()

    async def wait() -> None:
        with rpc_errors():
            waits.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
