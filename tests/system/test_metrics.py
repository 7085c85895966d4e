"""Metrics scraped from real processes equal the client's statistics."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
from calls import eventually
from documented_metrics import described, documented
from prometheus_client.parser import text_string_to_metric_families
from system_support import EAGER, generate_all, make_prompts

from paceline.client import Client, GenerationResult
from paceline.harness import local_services, with_port
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

TOKENS = 48
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


async def test_numbers_equal_the_clients(models: dict[str, Path]) -> None:
    verifier, drafter = Endpoint(), Endpoint()
    target = ["--target", str(models["llama"]), "--weights", "float32", "--kv-bytes", "64MiB"]
    target += ["--schedule", "auto", "--sources", "none"]
    # The target drafts for itself, so that much is accepted, at every depth.
    load = ["--load", f"lm=lm:{models['llama']}", "--load", "ngram=ngram"]
    arguments = [*target, *verifier.arguments], [*load, *drafter.arguments]
    with local_services(*arguments) as (served, drafting):
        async with Client(served.address, drafting=EAGER) as client:
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
        await expect_unloaded(drafter, drafting.address)


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
        await stub.UnloadDrafter(drafter_pb2.UnloadDrafterRequest(name="lm"))
    await asyncio.to_thread(endpoint.scrape)
    assert not any(("drafter", "lm") in labels for _, labels in endpoint.samples)
    assert endpoint.value("specdec_drafter_rounds_total", drafter="ngram") > 0
