"""Time of the sampling kernels for 64 rows of a large vocabulary."""

from __future__ import annotations

import torch

from paceline.bench.gpu.cases import arguments, median_ms, report
from paceline.kernels import SamplingParams, choose_tokens

ROWS, VOCAB = 64, 151_936
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_p": {"temperature": 1.1, "top_p": 0.9},
    "all": {"temperature": 0.7, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
}
"""Sampling parameters by name."""


def main() -> None:
    """Report milliseconds by kind."""
    device = arguments()
    vocab = VOCAB if device.type == "cuda" else 1024
    logits = torch.randn(ROWS, vocab, device=device).bfloat16()
    times = {}
    for kind, fields in KINDS.items():
        params = [SamplingParams(**fields, seed=row) for row in range(ROWS)]  # type: ignore[arg-type]

        def choose(params: list[SamplingParams] = params) -> None:
            choose_tokens(logits, params, range(ROWS))

        times[kind] = median_ms(choose, device, repeats=5)
    report(f"ms_{ROWS}_rows_of_{vocab}", times)


if __name__ == "__main__":
    main()
