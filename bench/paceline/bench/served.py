"""Paceline as its users run it: two service processes, one client."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.client import Client, DraftOptions, RoundStats, Stats
from paceline.harness import ServiceProcess


@dataclass(frozen=True)
class Sample:
    """One generation: its tokens, the seconds from call to result, and what its rounds cost."""

    tokens: list[int]
    seconds: float
    stats: Stats

    @property
    def decode_seconds(self) -> float:
        """Time after the first token."""
        return self.seconds - self.stats.first_token_ms / 1e3


class Services(AbstractContextManager["Services"]):
    """A verifier and a drafter process for the length of a with-block.

    `load` are drafter specifications, NAME=METHOD[:DIR]; `dtype` is the target's; `verifier` are
    more arguments of the verifier, `extra` of the drafter.
    """

    def __init__(
        self,
        target: Path,
        load: Sequence[str],
        dtype: str,
        *extra: str,
        verifier: Sequence[str] = (),
    ) -> None:
        given = ["--target", str(target), "--dtype", dtype]
        drafter = [argument for spec in load for argument in ("--load", spec)]
        self._processes = [
            ServiceProcess("verifier", ["--device=cpu", *given, *verifier]),
            ServiceProcess("drafter", ["--device=cpu", *drafter, *extra]),
        ]
        self._running = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            for process in self._processes:
                starting.enter_context(process)
            self._running = starting.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running.close()

    @property
    def addresses(self) -> tuple[str, str]:
        """Of the verifier and the drafter."""
        verifier, drafter = (process.address for process in self._processes)
        return verifier, drafter

    def client(self, drafting: DraftOptions | None = None) -> Client:
        """A client of both services."""
        verifier, drafter = self.addresses
        return Client(verifier, drafter=drafter, drafting=drafting)


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


def overhead_ms(entry: RoundStats) -> float:
    """What a round cost beyond the computing of drafter and verifier."""
    return entry.round_ms - entry.draft_ms - entry.verify_ms
