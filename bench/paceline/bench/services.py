"""A verifier and a drafter as processes, and generations through them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.client import Client, DraftOptions, RoundStats, Stats
from paceline.harness import ServiceProcess

ALWAYS = DraftOptions(timeout=20.0, adaptive=False)
"""Drafts in every round."""


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
