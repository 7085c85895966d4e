"""Services on a GPU, and texts of the demo models through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from paceline.client import Client
    from paceline.harness import ServiceProcess

DEMO = Path(__file__).parents[3] / "models" / "demo"
METHODS = ("ngram", "lm", "longspec", "dspark", "selfspec")
TOKENS = 64

_PACKAGES = (
    *("grpc", "google.rpc", "grpc_status", "grpc_health", "grpc_reflection", "google.protobuf"),
    *("safetensors", "tokenizers", "transformers"),
)


def require_services() -> None:
    """Fail where services cannot run: without a GPU, tests were skipped before."""
    if missing := [name for name in _PACKAGES if not _installed(name)]:
        pytest.fail(
            f"not installed: {', '.join(missing)}; `make gpu-packages` on a machine with a package "
            "index fetches what `make gpu-check` then installs"
        )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    temperature: float
    seed: int


def demo_jobs() -> list[Job]:
    from paceline.bench.prompts import demo_prompts

    prompts = demo_prompts(DEMO / "prompts", DEMO / "target")[:4]
    return [Job(ids[-300:], 0.8 * (n % 2), n) for n, ids in enumerate(prompts)]


@dataclass(frozen=True)
class Pair:
    verifier: ServiceProcess
    drafter: ServiceProcess

    def client(self, timeout: float = 20.0) -> Client:
        from paceline.client import Client, DraftOptions

        always = DraftOptions(adaptive=False, timeout=timeout)
        return Client(self.verifier.address, drafting=always)


@contextmanager
def pair(
    verifier_device: str,
    drafter_device: str,
    methods: Sequence[str],
    *,
    kv: str = "auto",
    drafter_environment: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """Services of the demo models in float32 for the body; `kv` is that option of drafters."""
    from paceline.harness import ServiceProcess

    target = DEMO / "target"
    specs = {
        "ngram": "ngram",
        "lm": f"lm:{DEMO / 'lm'}",
        "longspec": f"longspec:{DEMO / 'longspec'},target={target},kv={kv}",
        "dspark": f"dspark:{DEMO / 'dspark'},target={target}",
        "selfspec": f"selfspec:{target},kv={kv}",
    }
    target_arguments = ["--target", str(target), "--weights", "float32", "--kv-bytes", "256MiB"]
    with (
        ServiceProcess("verifier", [*target_arguments, "--device", verifier_device]) as verifier,
        ServiceProcess(
            "drafter",
            [
                *(f"--load={name}={specs[name]}" for name in methods),
                *("--device", drafter_device, "--verifier", verifier.address),
            ],
            environment=drafter_environment,
        ) as drafter,
    ):
        yield Pair(verifier, drafter)


@dataclass(frozen=True)
class Written:
    """Tokens of every job, tokens drafted, and bytes of KV that the drafter received over gRPC."""

    texts: list[list[int]]
    drafted: int
    received: int


async def write(services: Pair, drafter: str, jobs: Sequence[Job], tokens: int = TOKENS) -> Written:
    """Continue all jobs, one after the other."""
    async with services.client() as client:
        results = [
            await client.generate(
                job.prompt, max_new_tokens=tokens, temperature=job.temperature, seed=job.seed,
                drafter=drafter, ignore_eos=True,
            )
            for job in jobs
        ]  # fmt: skip
    return Written(
        texts=[list(result.token_ids) for result in results],
        drafted=sum(result.stats.drafted for result in results),
        received=sum(entry.kv_bytes for result in results for entry in result.stats.rounds),
    )
