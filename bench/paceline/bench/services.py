"""A verifier and a drafter as processes, and generations through them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.client import Client, DraftOptions, RoundStats, Stats
from paceline.harness import ServiceProcess

ALWAYS = DraftOptions(timeout=20.0, adaptive=False)
"""Drafts in every round."""

_READY_SECONDS = 600.0  # a new profile of the model's steps takes minutes on a busy machine


@dataclass(frozen=True)
class Services:
    """Two running processes."""

    verifier: ServiceProcess
    drafter: ServiceProcess

    def client(self, drafting: DraftOptions | None = None) -> Client:
        """A client of both."""
        return Client(self.verifier.address, drafter=self.drafter.address, drafting=drafting)


@contextmanager
def services(
    target: Path,
    drafters: Mapping[str, str],
    weights: str,
    *,
    verifier: Sequence[str] = (),
    drafter: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Services]:
    """Start both services on the CPU for the body.

    Args:
        target: A Hugging Face folder.
        drafters: Specifications METHOD[:DIR][,KEY=VALUE...] by name.
        weights: Format of the target's weights.
        verifier: More arguments of the verifier.
        drafter: More arguments of the drafter.
        environment: Variables of both processes.
    """
    load = [
        argument for name, spec in drafters.items() for argument in ("--load", f"{name}={spec}")
    ]
    given = ["--device=cpu", "--target", str(target), "--weights", weights, *verifier]
    with (
        ServiceProcess("verifier", given, environment=environment) as first,
        ServiceProcess(
            "drafter",
            ["--device=cpu", f"--verifier={first.address}", *load, *drafter],
            environment=environment,
        ) as second,
    ):
        yield Services(first, second)


@contextmanager
def gateway(
    target: Path, *, verifier: Sequence[str] = (), drafter: Sequence[str] = ()
) -> Iterator[tuple[str, list[ServiceProcess]]]:
    """Start both services and a gateway for the body, as `paceline serve` does.

    Args:
        target: A Hugging Face folder or a GGUF file.
        verifier: More arguments of the verifier.
        drafter: More arguments of the drafter; without ``--load``, the target's own drafters.

    Yields:
        The gateway's URL, and the processes.
    """
    with ExitStack() as stack:

        def start(kind: Literal["verifier", "drafter", "gateway"], *given: str) -> ServiceProcess:
            process = ServiceProcess(kind, given, ready_seconds=_READY_SECONDS)
            return stack.enter_context(process)

        first = start("verifier", f"--target={target}", *verifier)
        second = start("drafter", f"--target={target}", *drafter)
        addresses = f"--verifier-address={first.address}", f"--drafter-address={second.address}"
        third = start("gateway", *addresses)
        yield f"http://{third.address}/v1", [first, second, third]


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory of a process, which a leak increases."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no RssAnon")


@dataclass(frozen=True)
class Sample:
    """One generation: its tokens, seconds from the call to the result, and its rounds."""

    tokens: list[int]
    seconds: float
    stats: Stats

    @property
    def drafted(self) -> list[RoundStats]:
        """Rounds with a tree."""
        return [entry for entry in self.stats.rounds if entry.drafted]


async def generate(
    client: Client, prompt: list[int], tokens: int, drafter: str, **options: object
) -> Sample:
    """A continuation of exactly `tokens` tokens with a named drafter, or "none"."""
    start = time.perf_counter()
    result = await client.generate(
        prompt,
        max_new_tokens=tokens,
        drafter=drafter,
        ignore_eos=True,
        **options,  # type: ignore[arg-type]
    )
    return Sample(result.token_ids, time.perf_counter() - start, result.stats)


async def recording(
    target: Path, weights: str, prompt: list[int], tokens: int, **options: object
) -> str:
    """A continuation without a drafter, as a line of a file that the method ``replay`` reads."""
    with services(target, {"ngram": "ngram"}, weights) as pair:
        async with pair.client() as client:
            sample = await generate(client, prompt, tokens, "none", **options)
    return json.dumps({"prompt": prompt, "tokens": sample.tokens}) + "\n"
