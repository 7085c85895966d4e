"""Generating through compose files: no failure of a drafter container changes a token."""

import asyncio
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest
from calls import eventually

from paceline.client import Client, PacelineError, RetryOptions, TlsOptions

from .conftest import DEMO, Deployment, secret

# It repeats itself, so that ngram finds something to draft.
PROMPT = "import asyncio\nimport collections\nimport contextlib\n" * 8
WANTED = {"max_new_tokens": 96, "temperature": 0.0}
DRAFTED = ("--draft-always", "--draft-timeout", "60")  # however slow the machine is
SAMPLED = {"max_new_tokens": 96, "temperature": 0.7, "seed": 3}


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    async with deployment.client() as client:
        yield client


@pytest.fixture(scope="session")
def longspec(deployment: Deployment) -> str:
    """Name of a drafter that reads KV, loaded while the one of the file runs."""
    return load_longspec(deployment)


@pytest.fixture
async def plain(client: Client) -> list[int]:
    result = await client.generate(PROMPT, drafter="none", **WANTED)
    return list(result.token_ids)


async def test_tokens_are_the_same_with_and_without_a_drafter(
    client: Client, plain: list[int]
) -> None:
    drafted = await client.generate(PROMPT, **WANTED)
    assert drafted.token_ids == plain
    assert drafted.stats.drafted_rounds
    assert not drafted.stats.fallbacks
    sampled = [await client.generate(PROMPT, drafter=name, **SAMPLED) for name in ("none", None)]
    assert sampled[0].token_ids == sampled[1].token_ids != plain


async def test_the_gateway_answers_who_has_its_key(
    deployment: Deployment, client: Client, plain: list[int]
) -> None:
    deployment.until("gateway", "healthy")
    expected = (await client.generate(PROMPT, **WANTED)).text
    url = f"http://127.0.0.1:{deployment.ports['GATEWAY']}"
    asked = {"model": "target", "prompt": PROMPT, "max_tokens": 96, "temperature": 0}

    def post(key: str) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(asked).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    answer = await asyncio.to_thread(post, secret(deployment, "api-key").strip())
    assert answer["choices"][0]["text"] == expected
    with pytest.raises(urllib.error.HTTPError, match="401"):
        await asyncio.to_thread(post, deployment.token)


async def test_calls_need_the_token_and_the_certificate(deployment: Deployment) -> None:
    verifier = f"127.0.0.1:{deployment.ports['VERIFIER']}"
    trusted = TlsOptions(ca=deployment.ca)
    for refused in ({"tls": trusted}, {"tls": trusted, "token": "wrong"}, {"token": "x"}):
        async with Client(verifier, **refused) as client:
            with pytest.raises(PacelineError):
                await client.generate(PROMPT, max_new_tokens=1, deadline=5)


def load_longspec(deployment: Deployment) -> str:
    """Checked on recorded prompts before it is there for others."""
    words = ("longspec", "longspec", f"{DEMO}/longspec", "--option", f"target={DEMO}/target")
    check = ("--check", f"{DEMO}/prompts/heldout.jsonl", "--json")
    (info,) = json.loads(deployment.cli("drafters", "load", *words, *check))
    assert info["check"]["rounds"] > 0
    return words[0]


def traced(deployment: Deployment) -> list[dict[str, Any]]:
    lines = deployment.run("logs", "--no-color", "collector").splitlines()
    return [json.loads(line[line.index("{") :]) for line in lines if '"span"' in line]


async def test_a_drafter_reads_the_kv_of_the_verifier_and_a_collector_hears_of_it(
    deployment: Deployment, client: Client, plain: list[int], longspec: str
) -> None:
    drafted = await client.generate(PROMPT, drafter=longspec, **WANTED)
    assert drafted.token_ids == plain
    assert {*drafted.stats.drafter_versions} - {"local@1"} == {"longspec@1"}
    assert not drafted.stats.fallbacks

    words = ("--raw", "--max-new-tokens", "24", "--drafter", longspec, *DRAFTED, "--json")
    deployment.cli("generate", PROMPT, *words)

    def complete() -> bool:
        """All three processes told of one generation."""
        spans = traced(deployment)
        mapped = {s["trace"] for s in spans if s["name"] == "specdec.drafter.open"}
        services = {"paceline-client", "paceline-verifier", "paceline-drafter"}
        return any(
            services == {s["service"] for s in of_it}
            and any(s["name"].startswith("text_completion") for s in of_it)
            for of_it in ([s for s in spans if s["trace"] == trace] for trace in mapped)
        )

    eventually(complete, "a generation was traced through all processes")
    opened = [s for s in traced(deployment) if s["name"] == "specdec.drafter.open"]
    facts = opened[-1]["attributes"]
    assert (facts["specdec.drafter.name"], facts["specdec.kv.transport"]) == (longspec, "map")


def test_a_drafter_follows_kv_over_a_network(far_apart: Deployment) -> None:
    far_apart.until_joined("stream")
    length = ("--raw", "--max-new-tokens", "96", "--temperature", "0")
    plain, drafted = (
        json.loads(far_apart.cli("generate", PROMPT, *length, "--json", *words).splitlines()[-1])
        for words in (("--drafter", "none"), ("--drafter", load_longspec(far_apart), *DRAFTED))
    )
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["drafted_rounds"]
    assert not drafted["stats"]["fallbacks"]


@pytest.mark.parametrize(
    "words",
    [
        ("restart", "drafter"),
        ("restart", "gateway"),
        ("restart", "verifier"),
        ("restart",),
        ("kill", "verifier"),
        ("stop", "verifier"),
        ("up", "--detach", "--force-recreate", "--no-deps", "drafter"),
    ],
)
async def test_services_come_and_go_while_text_streams(
    deployment: Deployment, plain: list[int], longspec: str, words: tuple[str, ...]
) -> None:
    """Each alone and all together; the tokens stay the same, and drafting is back afterwards."""
    retry = RetryOptions(budget=300)
    async with deployment.client(retry) as client:
        generation = client.generate(PROMPT, drafter=longspec, **WANTED)
        chunks = aiter(generation)
        await anext(chunks)

        def disturb() -> None:
            deployment.run(*words)
            deployment.run("start", "verifier", "drafter", "gateway")

        disturbing = asyncio.create_task(asyncio.to_thread(disturb))
        async for _ in chunks:
            pass
        assert (await generation).token_ids == plain
        await disturbing
    for service in ("verifier", "drafter", "gateway"):
        await asyncio.to_thread(deployment.until, service, "healthy")
    await asyncio.to_thread(deployment.until_joined, "socket")
    # A service that restarted has the drafters of its command line.
    if longspec not in deployment.cli("drafters", "list"):
        load_longspec(deployment)
    async with deployment.client() as fresh:
        drafted = await fresh.generate(PROMPT, drafter=longspec, **WANTED)
    assert drafted.token_ids == plain
    assert drafted.stats.drafted_rounds


def test_a_stop_during_start_up_is_immediate(deployment: Deployment) -> None:
    """The service is process 1 of its container, which no signal ends by default."""
    for service in ("verifier", "drafter"):
        container = deployment.run("run", "--detach", "--no-deps", service).split()[-1]
        try:
            subprocess.run(["docker", "stop", "-t", "60", container], check=True)
            look = ["docker", "inspect", "--format", "{{.State.ExitCode}}", container]
            done = subprocess.run(look, capture_output=True, text=True, check=True)
            assert done.stdout.strip() == "143", "it was not killed, and did not serve"
        finally:
            subprocess.run(["docker", "rm", "--force", container], check=True)


def test_a_failed_start_says_why(deployment: Deployment) -> None:
    words = ["run", "--detach", "--no-deps", "verifier", "--device", "cuda"]
    container = deployment.run(*words).strip().splitlines()[-1]
    try:
        look = ["docker", "exec", container, "paceline", "health", "127.0.0.1:7431"]

        def said() -> bool:
            done = subprocess.run(look, capture_output=True, text=True, check=False)
            return "it does not start: device is 'cuda'" in done.stderr

        eventually(said, "the health check says why")
    finally:
        subprocess.run(["docker", "rm", "--force", container], check=True)


def test_final_images_hold_no_build_tools_and_run_unprivileged(deployment: Deployment) -> None:
    for service in ("verifier", "drafter", "gateway"):
        look = "id -u; command -v gcc cc ld pip || echo none; touch /x 2> /dev/null || echo sealed"
        assert deployment.run("exec", "-T", service, "sh", "-c", look).split() == [
            *("10001", "none", "sealed")
        ]


def test_kernels_were_compiled_with_the_image(deployment: Deployment) -> None:
    probe = "from paceline.kernels import cpu_kernels; print(cpu_kernels().origin)"
    assert deployment.run("exec", "-T", "verifier", "python", "-c", probe).strip() == "the wheel"


def test_metrics_stay_inside(deployment: Deployment) -> None:
    fetch = "import urllib.request as u; print(u.urlopen('http://verifier:9431/metrics').status)"
    assert deployment.run("exec", "-T", "drafter", "python", "-c", fetch).strip() == "200"
    open_ports = subprocess.run(
        ["docker", "port", deployment.run("ps", "--quiet", "verifier").strip()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(line.split(" -> ")[1].startswith("127.0.0.1:") for line in open_ports.splitlines())
    assert "9431" not in open_ports
