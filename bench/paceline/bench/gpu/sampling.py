"""The fused sampling kernel names the tokens that the CPU names, and how long it takes."""

from __future__ import annotations

import random

import torch

from paceline.bench.gpu.checking import arguments, finish, median_ms, report, require
from paceline.kernels import History, SamplingParams, choose_token, choose_tokens

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_p": {"temperature": 1.1, "top_p": 0.9},
    "all": {"temperature": 0.7, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
}


def main() -> None:
    """Many rows of every kind, over small and large vocabularies."""
    device, seed = arguments()
    rng = random.Random(seed)
    nothing = History([])
    compared = 0
    for kind, fields in KINDS.items():
        for vocab, rows in ((4096, 100), (151_936, 12)):
            logits = 4 * torch.randn(rows, vocab)
            logits = logits.bfloat16() if vocab > 5000 else logits  # with many ties
            params = [SamplingParams(**fields, seed=rng.getrandbits(64)) for _ in range(rows)]  # type: ignore[arg-type]
            positions = [rng.getrandbits(30) for _ in range(rows)]
            found = choose_tokens(logits.to(device), params, positions)
            right = [
                choose_token(row, each, at, nothing)
                for row, each, at in zip(logits, params, positions, strict=True)
            ]
            differ = sum(a != b for a, b in zip(found, right, strict=True))
            require(not differ, f"{kind}: {differ} of {rows} tokens of {vocab} differ")
            compared += rows
    report("tokens_compared", compared)
    logits = torch.randn(64, 151_936, device=device).bfloat16()
    times = {}
    for kind, fields in KINDS.items():
        params = [SamplingParams(**fields, seed=row) for row in range(64)]  # type: ignore[arg-type]
        times[kind] = median_ms(
            lambda params=params: choose_tokens(logits, params, range(64)),  # type: ignore[misc]
            device, repeats=5,
        )  # fmt: skip
    report("ms_64_rows_of_151936", times)
    finish()


if __name__ == "__main__":
    main()
