"""The client's spans, against fakes."""

import pytest
from fakes.verifier import World
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode
from spans import Recorder, record

from paceline.client import Client, DeadlineError, PacelineError

PROMPT = [104, 105, 106]
SEED = 5


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return record(monkeypatch, "paceline.client._stats.tracer")


def facts(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_it_is_part_of_the_callers_trace(client: Client, recording: Recorder) -> None:
    outer = recording.tracer.start_span("handle request")
    with trace.use_span(outer, end_on_exit=True):
        await client.generate(PROMPT, max_new_tokens=4, seed=SEED)
        assert trace.get_current_span() is outer, "the generation's span stays in its own task"
    (root,) = recording.named("text_completion fake")
    assert root.parent == outer.get_span_context()


async def test_an_unsampled_trace_is_not_propagated(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test")
    monkeypatch.setattr("paceline.client._stats.tracer", lambda: source)
    await client.generate(PROMPT, max_new_tokens=40, seed=SEED)
    assert not any(request.traceparent for request in world.verifier.starts)
    assert not any(request.traceparent for request in world.verifier.creates)
    assert not any("traceparent" in metadata for metadata in world.verifier.metadata)


async def test_a_failed_prefill_and_its_generation_are_failed(
    world: World, client: Client, recording: Recorder
) -> None:
    world.verifier.full, world.verifier.retry_after = 1, None
    with pytest.raises(PacelineError) as caught:
        await client.generate(PROMPT, max_new_tokens=4, seed=SEED)
    (prefill,) = recording.named("specdec.prefill")
    (root,) = recording.named("text_completion fake")
    for span in (prefill, root):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == str(caught.value)
    assert facts(root)["error.type"]


async def test_a_failure_before_the_model_is_known(client: Client, recording: Recorder) -> None:
    with pytest.raises(DeadlineError):
        await client.generate(PROMPT, max_new_tokens=4, deadline=1e-9)
    (root,) = recording.named("text_completion")
    assert root.status.status_code is StatusCode.ERROR


async def test_a_generation_cut_short_ends_its_spans(client: Client, recording: Recorder) -> None:
    generation = client.generate(PROMPT, max_new_tokens=150, seed=SEED)
    async for _ in generation:
        generation.cancel()
        break
    await client.aclose()
    (root,) = recording.named("text_completion fake")
    assert root.status.status_code is StatusCode.UNSET
    assert facts(root)["gen_ai.response.finish_reasons"] == ("cancelled",)
