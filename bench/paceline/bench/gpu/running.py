"""Services on a GPU as real processes, and texts of the demo models through them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.bench.gpu.checking import broken, report

MODELS = Path(__file__).parents[4] / "models" / "demo"
NEEDED = (
    *("grpc", "google.rpc", "grpc_status", "grpc_health", "grpc_reflection", "google.protobuf"),
    *("safetensors", "tokenizers", "transformers"),
)
METHODS = ("ngram", "lm", "longspec", "dspark", "selfspec")


def obstacle() -> str | None:
    """Why services cannot run here; None if they can."""
    missing = [name for name in NEEDED if not _installed(name)]
    if missing:
        return (
            f"not installed: {', '.join(missing)}; `make gpu-packages` on a machine with a package "
            "index fetches what gpu-check then installs for itself"
        )
    return None if MODELS.is_dir() else f"the demo models are not in {MODELS}"


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


@dataclass(frozen=True)
class Job:
    """A text to be continued."""

    prompt: list[int]
    temperature: float
    seed: int


def demo_jobs() -> list[Job]:
    """Two demo prompts greedily, two sampled."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    lines = (MODELS / "prompts" / "heldout.jsonl").read_text().splitlines()[:4]
    prompts = [tokenizer.encode(json.loads(line)["text"]).ids[-300:] for line in lines]
    return [Job(ids, 0.8 * (index % 2), index) for index, ids in enumerate(prompts)]


def drafters(methods: Sequence[str], **options: str) -> list[str]:
    """``--load`` arguments of the demo drafters, with more options for those that read KV."""
    target = MODELS / "target"
    folders = {
        "ngram": "", "lm": f":{MODELS / 'lm'}", "selfspec": f":{target}",
        "longspec": f":{MODELS / 'longspec'},target={target}",
        "dspark": f":{MODELS / 'dspark'},target={target}",
    }  # fmt: skip
    more = "".join(f",{name}={value}" for name, value in options.items())
    return [
        f"--load={name}={name}{folders[name]}{more if name in ('longspec', 'selfspec') else ''}"
        for name in methods
    ]


class Pair:
    """A verifier and a drafter for the length of a with-block, in float32.

    Where something did not hold, the ends of their logs are reported.
    """

    def __init__(
        self,
        verifier_device: str,
        drafter_device: str,
        loads: Sequence[str],
        drafter_environment: Mapping[str, str] | None = None,
    ) -> None:
        from paceline.harness import ServiceProcess

        self.verifier = ServiceProcess(
            "verifier",
            [
                *("--target", str(MODELS / "target"), "--dtype", "float32"),
                *("--device", verifier_device, "--kv-bytes", "256MiB"),
            ],
        )
        self.drafter = ServiceProcess(
            "drafter",
            [*loads, "--device", drafter_device],
            environment=drafter_environment,
        )
        self._running = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            for process in (self.verifier, self.drafter):
                starting.enter_context(process)
            self._running = starting.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or broken():
            for process in (self.verifier, self.drafter):
                report(f"log of the {process.kind}", process.log_tail(30).splitlines())
        self._running.close()


@dataclass(frozen=True)
class Outcome:
    """What became of all jobs with one drafter.

    Attributes:
        texts: Tokens of each.
        drafted: Tokens drafted.
        accepted_length: Tokens a drafted round.
        tokens_per_second: Over all, after the first token of each.
        received: Bytes of the target's KV that came to the drafter over a wire.
    """

    texts: list[list[int]]
    drafted: int
    accepted_length: float
    tokens_per_second: float
    received: int

    def figures(self) -> dict[str, float]:
        """What is worth recording."""
        return {
            "drafted": self.drafted,
            "accepted_length": round(self.accepted_length, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "kv_bytes_received": self.received,
        }


def differences(found: list[list[int]], right: list[list[int]]) -> str:
    """Where texts differ, in words."""
    firsts = [first_difference(a, b) for a, b in zip(found, right, strict=True) if a != b]
    return f"{len(firsts)} of {len(right)} texts differ, from tokens {firsts}"


def first_difference(found: list[int], right: list[int]) -> int:
    """Index of the first token that is another."""
    pairs = zip(found, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(found), len(right)))


async def texts(pair: Pair, drafter: str, jobs: Sequence[Job], tokens: int) -> Outcome:
    """Continue all prompts, one after the other."""
    from paceline.client import Client, DraftOptions

    patient = DraftOptions(adaptive=False, timeout=20.0)
    address = pair.drafter.address
    async with Client(pair.verifier.address, drafter=address, drafting=patient) as client:
        results = [
            await client.generate(
                job.prompt, max_new_tokens=tokens, temperature=job.temperature, seed=job.seed,
                drafter=drafter, ignore_eos=True,
            )
            for job in jobs
        ]  # fmt: skip
    stats = [result.stats for result in results]
    seconds = sum(each.total_ms - each.first_token_ms for each in stats) / 1e3
    rounds = sum(each.drafted_rounds for each in stats)
    emitted = sum(entry.emitted for each in stats for entry in each.rounds if entry.drafted)
    return Outcome(
        texts=[list(result.token_ids) for result in results],
        drafted=sum(each.drafted for each in stats),
        accepted_length=emitted / rounds if rounds else 0.0,
        tokens_per_second=len(jobs) * (tokens - 1) / max(seconds, 1e-9),
        received=sum(entry.kv_bytes for each in stats for entry in each.rounds),
    )
