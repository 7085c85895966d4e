"""Verifier and drafter on two GPUs: KV is mapped with peer access, and followed without it."""

from __future__ import annotations

import asyncio
import os

import torch

from paceline.bench.gpu.checking import arguments, finish, report, require
from paceline.bench.gpu.running import Pair, demo_jobs, differences, drafters, obstacle, texts

TOKENS = 64
METHODS = ("longspec", "selfspec")


async def check(reaches: bool) -> None:
    """With both GPUs in sight, then with a drafter that cannot see the verifier's."""
    jobs = demo_jobs()
    with Pair("cuda:0", "cuda:1", drafters(METHODS)) as pair:
        right = (await texts(pair, "none", jobs, TOKENS)).texts
        for name in METHODS:
            found = await texts(pair, name, jobs, TOKENS)
            report(f"{name}, KV {'followed' if found.received else 'mapped'}", found.figures())
            require(found.texts == right, f"{name}: {differences(found.texts, right)}")
            require(found.drafted > 0, f"{name} drafted nothing")
            if reaches:
                require(not found.received, f"{name}: KV was sent although it could be mapped")
            else:
                require(found.received > 0, f"{name}: no KV came although it cannot be mapped")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    apart = {"CUDA_VISIBLE_DEVICES": seen[1]}
    with Pair("cuda:0", "cuda:0", drafters(METHODS), drafter_environment=apart) as pair:
        for name in METHODS:
            found = await texts(pair, name, jobs, TOKENS)
            report(f"{name}, the other GPU out of sight", found.figures())
            require(found.texts == right, f"{name} apart: {differences(found.texts, right)}")
            require(found.drafted > 0, f"{name} apart drafted nothing")
            require(found.received > 0, f"{name} apart: no KV came")
    refusing = drafters(("longspec",), kv="map")
    with Pair("cuda:0", "cuda:0", refusing, drafter_environment=apart) as pair:
        found = await texts(pair, "longspec", jobs, TOKENS)
        require(found.texts == right, f"kv=map apart: {differences(found.texts, right)}")
        require(not found.drafted, "kv=map drafted although nothing can be mapped")
    report("kv=map where nothing can be mapped", "refused, and the text went on")


def main() -> None:
    """Where there are two GPUs."""
    device, _ = arguments()
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count < 2:
        report("skipped", f"needs two GPUs, and there are {count}")
        finish()
    why = obstacle()
    if why is not None:
        report("skipped", why)
        finish()
    from paceline.kv.cuda_driver import cuda_driver

    reaches = cuda_driver().reach(1, 0)
    report("peer_access", reaches)
    asyncio.run(check(reaches))
    finish()


if __name__ == "__main__":
    main()
