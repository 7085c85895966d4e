"""Which rounds of a generation have spans, and how many series there are."""

from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from spans import Recorder

from paceline.telemetry.names import Attribute
from paceline.telemetry.tracing import child_traceparent
from paceline.text import Text
from paceline.tree import TokenTree
from paceline.v1.verifier_pb2 import GetModelResponse
from paceline.verifier.engine.drafted import DraftedText
from paceline.verifier.engine.report import (
    Draft,
    DraftCall,
    DrafterVersion,
    NoDraft,
    StepOutput,
    StepReport,
    StepTimes,
    TracedRounds,
    merge,
)
from paceline.verifier.metrics import VerifierMetrics
from paceline.verifier.options import round_sampling
from paceline.verifier.telemetry import add_round

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    ("rounds", "traced"),
    [("3:5", [0, 1, 2, 5, 10, 15]), ("0:8", [0, 8, 16]), ("all", list(range(20)))],
)
def test_the_first_rounds_and_then_one_in_so_many(rounds: str, traced: list[int]) -> None:
    trace = TracedRounds(PARENT, *round_sampling(rounds))
    text = DraftedText(Text([1, 2], limit=99), trace=trace)
    step = StepTimes(0.0, 1.0)
    assert [n for n in range(20) if text.report(StepOutput([2]), step).traced] == traced


def spans_of(report: StepReport) -> dict[str, Any]:
    """Spans of a round, by name."""
    recorder = Recorder()
    add_round(recorder.tracer, report, TracedRounds(PARENT), {})
    return {span.name: span for span in recorder.spans}


def test_a_span_that_is_made_later_is_the_parent_that_was_told() -> None:
    named = child_traceparent(PARENT)
    call = DraftCall(named, 1.0, 2.0, "lm", "socket", "map", NoDraft.LATE)
    spans = spans_of(replace(drafted(()), draft=None, call=call))
    draft = spans["specdec.draft"]
    told = [f"{draft.context.trace_id:032x}", f"{draft.context.span_id:016x}"]
    assert named.split("-")[1:3] == told
    assert draft.attributes[Attribute.NO_DRAFT] == "late"
    for name in ("specdec.draft", "specdec.verify"):
        assert spans[name].parent.span_id == spans["specdec.round"].context.span_id


def test_plain_steps_that_are_sent_together_have_a_span_if_one_of_them_has() -> None:
    steps = [StepReport(StepOutput([1]), 0, 1, traced=traced) for traced in (False, True, False)]
    assert merge(steps).traced
    assert not merge(steps[:1]).traced


def drafted(sources: tuple[str, ...]) -> StepReport:
    """A step with three drafted tokens: two were checked, and the first was accepted."""
    tree = TokenTree((1, 2, 3), (-1, 0, -1), (0.9, 0.8, 0.7), (), sources)
    draft = Draft(tree, DrafterVersion("local", "1", "local"))
    output = StepOutput([1, 7], [0], checked=2)
    return StepReport(output, 0, 2, [0], sources[:2], draft)


def counted(reports: Iterable[StepReport]) -> CollectorRegistry:
    """The metrics of steps."""
    registry = CollectorRegistry()
    model: Any = GetModelResponse(name="m")
    nothing: Any = SimpleNamespace(request=None, device="cpu")
    metrics = VerifierMetrics(registry, model, nothing, nothing, nothing, list)
    for report in reports:
        metrics.answered(nothing, report)
    return registry


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ((), {"drafter": (3, 2, 1)}),
        (("ngram", "", "ngram"), {"ngram": (2, 1, 1), "drafter": (1, 1, 0)}),
        (("grammar", "grammar", "ngram"), {"grammar": (2, 2, 1), "ngram": (1, 0, 0)}),
    ],
)
def test_metrics_and_spans_say_what_each_source_added(
    sources: tuple[str, ...], expected: dict[str, tuple[int, int, int]]
) -> None:
    registry = counted([drafted(sources)])
    for source, counts in expected.items():
        for stage, count in zip(("drafted", "checked", "accepted"), counts, strict=True):
            labels = {"model_name": "m", "source": source, "stage": stage}
            assert registry.get_sample_value("specdec_source_tokens_total", labels) == count

    facts = spans_of(drafted(sources))["specdec.round"].attributes
    found = zip(
        facts[Attribute.SOURCES],
        facts[Attribute.SOURCES_DRAFTED],
        facts[Attribute.SOURCES_ACCEPTED],
        strict=True,
    )
    assert {name: pair for name, *pair in found} == {
        name: [count, accepted] for name, (count, _, accepted) in expected.items()
    }


@pytest.mark.parametrize("text", ["", "5", "5:0", "5:", ":5", "-1:5", "a:b", "1:2:3"])
def test_other_words_name_no_rounds(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="all"):
        round_sampling(text)


def test_a_service_with_many_versions_does_not_fill_the_memory_with_series() -> None:
    drafters = (DrafterVersion("lm", str(version), "lm") for version in range(200))
    registry = counted(
        StepReport(StepOutput([1]), 0, 1, no_draft=NoDraft.LATE, drafter=each) for each in drafters
    )
    rounds = next(family for family in registry.collect() if family.name == "specdec_rounds")
    versions = {sample.labels["version"] for sample in rounds.samples}
    assert "199" in versions
    assert len(versions) < 100
