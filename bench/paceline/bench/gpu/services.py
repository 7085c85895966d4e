"""End to end on one GPU: every method's texts are the CPU's, whoever is killed."""

from __future__ import annotations

import asyncio

import torch

from paceline.bench.gpu.checking import arguments, finish, report, require
from paceline.bench.gpu.running import (
    METHODS,
    Job,
    Pair,
    demo_jobs,
    differences,
    drafters,
    first_difference,
    obstacle,
    texts,
)

TOKENS = 64
LONG_TOKENS = 200
_SMALL = 64 << 20
"""What a driver may keep of a process for a while. Unit: bytes."""


async def check(device: torch.device) -> None:
    """All methods, then the deaths."""
    jobs = demo_jobs()
    with Pair("cpu", "cpu", drafters(["ngram"])) as pair:
        right = (await texts(pair, "none", jobs, TOKENS)).texts
        long = (await texts(pair, "none", jobs[:1], LONG_TOKENS)).texts[0]
    with Pair(str(device), str(device), drafters(METHODS)) as pair:
        for name in ("none", *METHODS):
            found = await texts(pair, name, jobs, TOKENS)
            report(name, found.figures())
            require(found.texts == right, f"{name}: {differences(found.texts, right)}")
            require(bool(found.drafted) == (name != "none"), f"{name} drafted {found.drafted}")
            require(not found.received, f"{name} was sent {found.received} bytes of KV, not mapped")
        await _kill(pair, "drafter", jobs[0], long)
        await _kill(pair, "verifier", jobs[0], long)
    with Pair(str(device), "cpu", drafters(["longspec"])) as pair:
        found = await texts(pair, "longspec", jobs, TOKENS)
        report("drafter on the CPU", found.figures())
        require(found.texts == right, f"drafter on the CPU: {differences(found.texts, right)}")
        require(found.drafted > 0, "a drafter on the CPU drafted nothing")
        if device.type == "cuda":
            require(found.received > 0, "a drafter on the CPU was sent no KV")


async def _kill(pair: Pair, victim: str, job: Job, right: list[int]) -> None:
    """Kill one of the processes in the middle of a text; it goes on, and so does the other one."""
    from paceline.client import Client, DraftOptions

    process, other = pair.drafter, pair.verifier
    if victim == "verifier":
        process, other = other, process
    address = pair.drafter.address
    drafting = DraftOptions(adaptive=False)
    restart: asyncio.Task[object] | None = None
    async with Client(pair.verifier.address, drafter=address, drafting=drafting) as client:
        text = client.generate(
            job.prompt, max_new_tokens=len(right), temperature=job.temperature, seed=job.seed,
            drafter="longspec", ignore_eos=True,
        )  # fmt: skip
        tokens: list[int] = []
        async for chunk in text:
            tokens += chunk.token_ids
            if restart is None and len(tokens) > 20:
                process.kill()
                restart = asyncio.create_task(asyncio.to_thread(process.start))
        assert restart is not None
        await restart
    at = first_difference(tokens, right)
    require(tokens == right, f"{victim} killed: the text differs from token {at}")
    require(other.returncode is None, f"{victim} killed: the other process ended too")
    found = await texts(pair, "longspec", [job], len(right))
    require(found.texts[0] == right, f"after the {victim}'s death: another text")
    require(found.drafted > 0, f"after the {victim}'s death nothing is drafted")
    require(not found.received, f"after the {victim}'s death KV is mapped no more")
    report(f"{victim} killed", "the text went on")


def main() -> None:
    """Texts and deaths, and all memory came back."""
    device, _ = arguments()
    why = obstacle()
    if why is not None:
        report("skipped", why)
        finish()
    free = 0
    if device.type == "cuda":
        torch.zeros(1, device=device)
        free = torch.cuda.mem_get_info()[0]
    asyncio.run(check(device))
    if device.type == "cuda":
        lost = free - torch.cuda.mem_get_info()[0]
        report("bytes_lost", lost)
        require(lost < _SMALL, f"{lost} bytes of GPU memory did not come back")
    finish()


if __name__ == "__main__":
    main()
