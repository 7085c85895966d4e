"""Metrics and traces of real processes: they equal the client's statistics, and spans of all
processes make one tree in a collector of the test."""

import asyncio
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from calls import eventually
from collector import Collector, Received, collecting
from documented_metrics import described, documented
from openai import AsyncOpenAI
from programs import PACELINE, run_python
from prometheus_client.parser import text_string_to_metric_families
from system_support import EAGER, generate_all, make_prompts

from paceline.client import Client, GenerationResult
from paceline.harness import ServiceProcess, local_services, with_port
from paceline.telemetry.names import Attribute
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

PROMPT = "round and round and round and round"
TOKENS = 40
SHARED = {("specdec_rpcs_total", "counter")}  # what all services report
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Endpoint:
    def __init__(self) -> None:
        self.address = with_port("127.0.0.1:0")
        self.arguments = ["--metrics-address", self.address]
        self.samples: Samples = {}

    def scrape(self) -> None:
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=60) as response:
            self.families = [*text_string_to_metric_families(response.read().decode())]
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        found = [v for (n, has), v in self.samples.items() if n == name and labels.items() <= has]
        assert found, f"no {name} with {labels}"
        return sum(found)

    async def eventually(self, true: Callable[[], bool]) -> None:
        """Scrape until a condition holds: metrics are updated after the answer is sent."""

        def now() -> bool:
            self.scrape()
            return true()

        await asyncio.to_thread(eventually, now, "the metrics have these values")


@dataclass
class Observed:
    """A verifier and a drafter service, their metrics, and the collector of their spans."""

    collector: Collector
    verifier: ServiceProcess
    drafter: ServiceProcess
    metrics: tuple[Endpoint, Endpoint]


def services(
    models: dict[str, Path], environment: dict[str, str], metrics: tuple[Endpoint, Endpoint]
) -> AbstractContextManager[tuple[ServiceProcess, ServiceProcess]]:
    """A verifier, and a drafter with the target as draft model and a method that maps KV."""
    target = ["--target", str(models["llama"]), "--weights", "float32", "--kv-bytes", "64MiB"]
    target += ["--schedule", "auto", "--sources", "none"]
    # The target drafts for itself, so that much is accepted, at every depth.
    load = [f"--load=lm=lm:{models['llama']}", "--load=ngram=ngram", "--load=kv-reader"]
    verifier, drafter = metrics
    return local_services([*target, *verifier.arguments], [*load, *drafter.arguments], environment)


@pytest.fixture(scope="module")
def observed(models: dict[str, Path], environment: dict[str, str]) -> Iterator[Observed]:
    metrics = Endpoint(), Endpoint()
    with collecting() as collector:
        exported = {**environment, **collector.environment}
        with services(models, exported, metrics) as (verifier, drafter):
            yield Observed(collector, verifier, drafter, metrics)


async def test_numbers_equal_the_clients(observed: Observed) -> None:
    """The first test of this file, as metrics count from the start of a process."""
    verifier, drafter = observed.metrics
    address = observed.verifier.address
    async with Client(address, drafting=EAGER) as client:
        prompts = make_prompts(6)
        results = [
            result
            for name in ("lm", "ngram", "none")
            for result in await generate_all(client, prompts, name, TOKENS)
        ]
        await verifier.eventually(lambda: verifier.value("specdec_leases") == 0)
        expect_verifier(verifier, results, sum(map(len, prompts)) * 3)
        await expect_caches(verifier, client)
        await drafter.eventually(lambda: drafter.value("specdec_drafter_streams") == 0)
        expect_drafter(drafter, results)
        expect_dashboard(verifier, drafter)
        assert described(verifier.families) - SHARED == documented("Verifier")
        assert described(drafter.families) - SHARED == documented("Drafter")
    await expect_unloaded(drafter, observed.drafter.address)


def expect_verifier(
    endpoint: Endpoint, results: list[GenerationResult], prompt_tokens: int
) -> None:
    endpoint.scrape()
    stats = [result.stats for result in results]
    value = endpoint.value
    assert value("specdec_num_drafts_total") == sum(s.drafted_rounds for s in stats) > 0
    assert value("specdec_num_draft_tokens_total") == sum(s.drafted for s in stats)
    assert value("specdec_num_checked_tokens_total") == sum(s.checked for s in stats) > 0
    assert value("specdec_node_budget_tokens_count") == sum(len(s.rounds) for s in stats)
    assert value("specdec_schedule_seconds_count") > 0
    assert value("specdec_num_accepted_tokens_total") == sum(s.accepted for s in stats) > 0
    depths = max(len(s.accepted_per_position) for s in stats)
    for position in range(depths):
        expected = sum(sum(s.accepted_per_position[position : position + 1]) for s in stats)
        name = "specdec_num_accepted_tokens_per_pos_total"
        assert value(name, position=str(position)) == expected
    assert value("specdec_rounds_total") == sum(len(s.rounds) for s in stats)
    for name in ("lm", "ngram"):
        labels = {"drafter": name, "version": "1"}
        drafted = sum(s.drafted_rounds for s in stats if f"{name}@1" in s.drafter_versions)
        assert value("specdec_num_drafts_total", **labels) == drafted
        assert value("specdec_draft_seconds_count", **labels) == drafted
        assert value("specdec_rounds_total", **labels, no_draft="") == drafted
    assert value("specdec_rounds_total", drafter="", no_draft="no_drafter") > 0
    assert value("specdec_requests_total", finish_reason="length") == len(results)
    assert value("specdec_free_run_tokens_total") == sum(s.free_run_tokens for s in stats)
    assert value("specdec_generation_tokens_total") == len(results) * TOKENS
    assert value("specdec_prompt_tokens_total") == prompt_tokens
    labels = {"gen_ai_request_model": "llama", "gen_ai_operation_name": "text_completion"}
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert value(f"gen_ai_server_{name}_seconds_count", **labels) == len(results)
    assert value("gen_ai_server_request_duration_seconds_count", error_type="") == len(results)
    verify_ms = sum(r.verify_ms for s in stats for r in s.rounds if r.drafted)
    assert abs(value("specdec_verify_seconds_sum") - verify_ms / 1e3) < 1e-3
    assert value("specdec_engine_steps_total") <= value("specdec_engine_batch_tokens_sum")
    assert value("specdec_draft_links", carrier="socket") == 1
    assert value("specdec_draft_links", carrier="stream") == 0
    assert value("specdec_target_info", model_name="llama", batch_invariant="true") == 1


async def expect_caches(endpoint: Endpoint, client: Client) -> None:
    """Memory and leases of a cache that is kept, and after its release."""
    kept = client.generate(make_prompts(1)[0], max_new_tokens=300, keep_cache=True)
    await kept
    value = endpoint.value
    await endpoint.eventually(lambda: value("specdec_num_requests_running") == 0)
    assert value("specdec_leases") == 1
    assert value("specdec_num_requests_waiting") == 0
    assert value("specdec_kv_cache_limit_bytes", device="cpu") == 64 << 20
    used = value("specdec_kv_cache_used_bytes", device="cpu")
    prefixes = value("specdec_kv_cache_prefix_bytes", device="cpu")
    assert 0 < used < used + prefixes < 64 << 20
    assert value("specdec_kv_cache_usage_ratio", device="cpu") == used / (64 << 20)
    await kept.aclose()
    await endpoint.eventually(lambda: value("specdec_kv_cache_used_bytes") == 0)
    assert value("specdec_leases") == 0
    assert value("specdec_kv_cache_prefix_bytes", device="cpu") > 0
    assert value("specdec_leases_expired_total") == 0


def expect_drafter(endpoint: Endpoint, results: list[GenerationResult]) -> None:
    """The drafter also counts trees that came too late to be verified."""
    value = endpoint.value
    for name in ("lm", "ngram"):
        labels = {"drafter": name, "version": "1", "method": name}
        stats = [r.stats for r in results if r.stats.drafter_versions == [f"{name}@1"]]
        assert value("specdec_drafter_rounds_total", **labels) >= sum(
            s.drafted_rounds for s in stats
        )
        drafted = sum(s.drafted for s in stats)
        assert value("specdec_drafter_draft_tokens_total", **labels) >= drafted
        rounds = value("specdec_drafter_rounds_total", **labels)
        assert value("specdec_drafter_draft_seconds_count", **labels) == rounds
        assert value("specdec_drafter_traffic_ratio", **labels) == 1
        assert value("specdec_drafter_state", **labels, state="active") == 1
        assert value("specdec_drafter_state", **labels, state="draining") == 0
    assert value("specdec_drafter_draft_tokens_total", drafter="lm") > 0
    assert value("specdec_drafter_weight_bytes", drafter="lm") > 0
    assert value("specdec_drafter_queue_length") == 0
    assert value("specdec_drafter_links", carrier="socket") == 1


def expect_dashboard(*endpoints: Endpoint) -> None:
    """Each metric that the dashboard asks services for exists, with the labels it is grouped by."""
    file = Path(__file__).parents[2] / "compose/observability/dashboards/paceline.json"
    there: dict[str, set[str]] = {}
    for endpoint in endpoints:
        for name, labels in endpoint.samples:
            there.setdefault(name, set()).update(label for label, _ in labels)
    queries = [
        target["expr"]
        for panel in json.loads(file.read_text())["panels"]
        for target in panel["targets"]
        if "specdec_gateway" not in target["expr"]
    ]
    assert queries
    for query in queries:
        names = set(re.findall(r"\b(?:specdec|gen_ai)_\w+", query))
        assert names <= there.keys(), query
        for by in re.findall(r"sum by \(([^)]*)\)", query):
            assert any(set(by.split(", ")) <= there[name] for name in names), query


async def expect_unloaded(endpoint: Endpoint, address: str) -> None:
    """The series of an unloaded version are removed."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)
        await stub.UnloadDrafter(drafter_pb2.UnloadDrafterRequest(name="ngram"))
    await asyncio.to_thread(endpoint.scrape)
    assert not any(("drafter", "ngram") in labels for _, labels in endpoint.samples)
    assert endpoint.value("specdec_drafter_rounds_total", drafter="lm") > 0


# Traces


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


async def test_a_callers_trace_continues_behind_the_gateway(observed: Observed) -> None:
    collector, verifier = observed.collector, observed.verifier
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


def test_three_processes_make_one_tree(observed: Observed) -> None:
    collector, verifier = observed.collector, observed.verifier
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


def expect_nested(tree: Tree) -> None:
    """No span outlasts its parent, but for that of a drafter whose tree came too late."""
    for parent in tree.spans:
        if parent.attributes.get("specdec.no_draft") == "late":
            continue
        for child in tree.children(parent):
            assert parent.began_ns <= child.began_ns, (parent, child)
            if not child.name.endswith("ReleaseCache"):  # the result does not wait for it
                assert child.ended_ns <= parent.ended_ns, (parent, child)


def expect_numbers(tree: Tree, stats: dict[str, Any]) -> None:
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


def test_mapping_the_kv_is_a_span_of_the_drafter(observed: Observed) -> None:
    collector, verifier = observed.collector, observed.verifier
    collector.spans.clear()
    generate(verifier, "kv-reader", collector.environment)
    collector.wait(
        lambda spans: released(spans) and any(s.name == "specdec.drafter.open" for s in spans)
    )
    tree = Tree(collector.spans)
    (opened,) = tree.named("specdec.drafter.open")
    assert opened.attributes["specdec.kv.transport"] == "map"


@pytest.mark.slow
def test_an_unreachable_collector_changes_nothing(
    models: dict[str, Path], environment: dict[str, str]
) -> None:
    """The same tokens, and every process exits with 0."""
    nowhere = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "20"}
    metrics = Endpoint(), Endpoint()
    with services(models, {**environment, **nowhere}, metrics) as (verifier, drafter):
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
