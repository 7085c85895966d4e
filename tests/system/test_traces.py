"""Traces of real processes, exported over OTLP to a collector in the test."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from collector import Collector, Received, collecting
from openai import AsyncOpenAI
from programs import PACELINE, run_python

from paceline.harness import ServiceProcess, local_services
from paceline.telemetry.names import Attribute

PROMPT = "round and round and round and round"
TOKENS = 40


def services(
    models: dict[str, Path], environment: dict[str, str]
) -> AbstractContextManager[tuple[ServiceProcess, ServiceProcess]]:
    """A verifier, and a drafter with the target as draft model and a method that reads KV."""
    methods = str(Path(__file__).parent.parent / "drafter")
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), methods]))
    target = ["--target", str(models["llama"]), "--weights", "float32", "--schedule", "off"]
    load = ["--load", f"lm=lm:{models['llama']}", "--load=kv-reader"]
    return local_services(target, load, {**environment, "PYTHONPATH": paths})


@pytest.fixture(scope="module")
def traced(models: dict[str, Path]) -> Iterator[tuple[Collector, ServiceProcess]]:
    with collecting() as collector, services(models, collector.environment) as (verifier, _):
        yield collector, verifier


def generate(verifier: ServiceProcess, name: str, environment: dict[str, str]) -> dict[str, Any]:
    """A generation of `paceline generate`, which drafts in every round. A chat would first ask for
    the model, outside of the generation."""
    words = ["generate", PROMPT, "--max-new-tokens", str(TOKENS), "--drafter", name]
    words += ["--raw", "--seed=1", "--json", "--draft-always", "--draft-timeout=60"]
    words += ["--verifier-address", verifier.address]
    done = run_python(*PACELINE, *words, environment=environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def released(spans: list[Received]) -> bool:
    names = {span.name.rpartition("/")[2] for span in spans}
    return {"ReleaseCache", "text_completion llama"} <= names


async def test_a_callers_trace_continues_behind_the_gateway(
    traced: tuple[Collector, ServiceProcess],
) -> None:
    collector, verifier = traced
    collector.spans.clear()
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    where = ["--verifier-address", verifier.address]
    async with (
        ServiceProcess("gateway", where, environment=collector.environment) as gateway,
        AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="any", max_retries=0) as api,
    ):
        asked: dict[str, Any] = {"model": "llama", "prompt": PROMPT, "max_tokens": 8}
        parents = {f"00-{trace}-{caller}-{flags}" for flags in ("00", "01")}
        for parent in sorted(parents):
            await api.completions.create(**asked, extra_headers={"traceparent": parent})
        await api.completions.create(**asked)

        def complete(spans: list[Received]) -> bool:
            names = Counter(span.name for span in spans)
            there = {span.name for span in spans if span.trace == trace}
            return names["POST /v1/completions"] == 2 and "specdec.round" in there

        await asyncio.to_thread(collector.wait, complete)
    requests = [span for span in collector.spans if span.name == "POST /v1/completions"]
    assert {(span.service, span.kind) for span in requests} == {("paceline-gateway", "SERVER")}
    own, continued = sorted(requests, key=lambda span: span.parent)
    assert (continued.trace, continued.parent) == (trace, caller)
    assert own.trace != trace
    assert own.parent == ""
    assert own.attributes["http.response.status_code"] == 200
    texts = [span for span in collector.spans if span.name == "text_completion llama"]
    assert {text.parent for text in texts} == {own.span, continued.span}


def test_three_processes_make_one_tree(traced: tuple[Collector, ServiceProcess]) -> None:
    collector, verifier = traced
    collector.spans.clear()
    result = generate(verifier, "lm", collector.environment)
    rounds = result["stats"]["rounds"]
    drafted = result["stats"]["drafted_rounds"]

    def complete(spans: list[Received]) -> bool:
        names = Counter(span.name for span in spans)
        return (
            released(spans)
            and names["specdec.round"] == rounds
            and names["specdec.drafter.round"] >= drafted
            and names["specdec.drafter.open"] == 1
        )

    collector.wait(complete)
    tree = Tree(collector.spans)
    assert tree.root.name == "text_completion llama"
    facts = tree.root.attributes
    assert facts["gen_ai.usage.output_tokens"] == TOKENS
    assert facts["gen_ai.usage.input_tokens"] == result["usage"]["prompt_tokens"]
    assert facts["gen_ai.response.finish_reasons"] == ["length"]
    assert facts["gen_ai.provider.name"] == "paceline"
    assert facts["gen_ai.request.model"] == "llama"
    assert PROMPT not in str(facts)
    children = Counter(span.name for span in tree.children(tree.root))
    assert children.pop("paceline.v1.VerifierService/GetModel") > 0
    assert children == {
        "specdec.prefill": 1,
        "specdec.drafter.open": 1,
        "specdec.round": rounds,
        "paceline.v1.VerifierService/ReleaseCache": 1,
    }
    assert tree.parents("specdec.verifier.prefill") == {"specdec.prefill"}
    assert tree.parents("specdec.draft") == tree.parents("specdec.verify") == {"specdec.round"}
    assert tree.parents("specdec.drafter.round") == {"specdec.draft"}
    for span in collector.spans:
        assert not span.failed
        assert span.began_ns <= span.ended_ns
        assert span.attributes.keys() <= {*map(str, vars(Attribute).values())}
        part = span.name.removeprefix("specdec.").partition(".")[0]
        if part in ("verifier", "drafter"):
            assert (span.service, span.kind) == (f"paceline-{part}", "SERVER")
        elif part in ("round", "draft", "verify"):
            assert span.service == "paceline-verifier"
    expect_nested(tree)
    expect_numbers(tree, result["stats"])


def expect_nested(tree: "Tree") -> None:
    """No span outlasts its parent, but for that of a drafter whose tree came too late."""
    for parent in tree.spans:
        if parent.attributes.get("specdec.no_draft") == "late":
            continue
        for child in tree.children(parent):
            assert parent.began_ns <= child.began_ns, (parent, child)
            if not child.name.endswith("ReleaseCache"):  # the result does not wait for it
                assert child.ended_ns <= parent.ended_ns, (parent, child)


def expect_numbers(tree: "Tree", stats: dict[str, Any]) -> None:
    """The rounds of the verifier's spans add up to the client's statistics."""
    drafted = accepted = emitted = 0
    rounds = sorted(tree.named("specdec.round"), key=lambda span: span.began_ns)
    indices = [span.attributes["specdec.round.index"] for span in rounds]
    assert indices == list(range(1, 1 + stats["rounds"]))
    for span in rounds:
        facts, parts = span.attributes, {part.name: part for part in tree.children(span)}
        verify = parts["specdec.verify"]
        assert 0 < verify.attributes["specdec.compute_duration"] < 60
        assert facts["specdec.cache.epoch"] > 0
        assert (
            verify.attributes["specdec.num_emitted_tokens"] == (facts["specdec.num_emitted_tokens"])
        )
        drafted += facts["specdec.num_draft_tokens"]
        accepted += facts["specdec.num_accepted_draft_tokens"]
        emitted += facts["specdec.num_emitted_tokens"]
        if facts["specdec.num_draft_tokens"]:
            draft = parts["specdec.draft"].attributes
            assert draft["specdec.num_draft_tokens"] == facts["specdec.num_draft_tokens"]
            for name, value in (("name", "lm"), ("version", "1"), ("method", "lm")):
                assert draft[f"specdec.drafter.{name}"] == value
                assert facts[f"specdec.drafter.{name}"] == value
            assert draft["specdec.draft.carrier"] == "socket"
            assert facts["specdec.tree.depth"] >= facts["specdec.num_accepted_draft_tokens"]
        else:
            assert facts["specdec.no_draft"]
    assert (drafted, accepted) == (stats["drafted"], stats["accepted"])
    assert emitted == TOKENS - 1, "the first token is the prefill's"
    assert accepted > 0, "no drafted token was accepted"


def test_mapping_the_kv_is_a_span_of_the_drafter(traced: tuple[Collector, ServiceProcess]) -> None:
    collector, verifier = traced
    collector.spans.clear()
    generate(verifier, "kv-reader", collector.environment)
    collector.wait(
        lambda spans: released(spans) and any(s.name == "specdec.drafter.open" for s in spans)
    )
    tree = Tree(collector.spans)
    (opened,) = tree.named("specdec.drafter.open")
    assert opened.attributes["specdec.kv.transport"] == "map"
    assert opened.attributes["specdec.kv.bytes"] > 0


@pytest.mark.slow
def test_an_unreachable_collector_changes_nothing(models: dict[str, Path]) -> None:
    """The same tokens, and every process exits with 0."""
    nowhere = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "20"}
    with services(models, nowhere) as (verifier, drafter):
        traced, plain = (generate(verifier, "lm", e) for e in (nowhere, {}))
        assert verifier.terminate() == 0, verifier.log_tail()
        assert drafter.terminate() == 0, drafter.log_tail()
    assert traced["token_ids"] == plain["token_ids"]
    assert len(plain["token_ids"]) == TOKENS


def test_off_imports_nothing() -> None:
    """Without the variables neither services nor client load OpenTelemetry's SDK, an exporter or
    the Prometheus client."""
    program = """
import sys
import paceline.cli.generate, paceline.cli.service_process
import paceline.drafter.service, paceline.verifier.service
from paceline.client import SyncClient
sys.path.insert(0, sys.argv[1])
from fakes.transport import MockTransport
from paceline.telemetry.exporters import traced
with traced("test"), SyncClient(transport=MockTransport("fine")) as client:
    client.generate("x")
heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "prometheus_client")
print([name for name in sys.modules if name.startswith(heavy)])
"""
    done = run_python("-c", program, Path(__file__).parent.parent)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


class Tree:
    def __init__(self, spans: list[Received]) -> None:
        assert len({span.trace for span in spans}) == 1
        self._spans = {span.span: span for span in spans}
        assert len(self._spans) == len(spans)
        (self.root,) = (span for span in spans if not span.parent)

    @property
    def spans(self) -> list[Received]:
        return list(self._spans.values())

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Received) -> list[Received]:
        return [span for span in self.spans if span.parent == parent.span]

    def parents(self, name: str) -> set[str]:
        """Names of the parents of all spans of a name, which must have some."""
        spans = self.named(name)
        assert spans, f"there is no {name}"
        return {self._spans[span.parent].name for span in spans}
