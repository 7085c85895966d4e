"""End to end in float32: texts of the GPU are those of the CPU, plain, in trees, by graphs."""

from __future__ import annotations

import torch

from paceline.bench.gpu.checking import arguments, finish, report, require
from paceline.bench.gpu.models import SMALL, RandomWeights, Text
from paceline.decoder import Decoder
from paceline.kernels import SamplingParams

TOKENS = 96


def plain_text(decoder: Decoder, sampling: SamplingParams, prompt: list[int]) -> list[int]:
    """Token by token."""
    text = Text(decoder, sampling)
    text.prefill(prompt)
    while len(text.tokens) < len(prompt) + TOKENS:
        text.step([])
    return text.tokens


def main() -> None:
    """Greedy and sampled."""
    device, seed = arguments()
    cpu = torch.device("cpu")
    weights = dict(RandomWeights(SMALL, cpu, seed))
    theirs = Decoder(SMALL, weights, cpu)
    there = {name: tensor.to(device) for name, tensor in weights.items()}
    ours = Decoder(SMALL, there, device)
    prompt = torch.randint(SMALL.vocab_size, (200,)).tolist()
    compared = 0
    with torch.inference_mode():
        for sampling in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.0, top_p=0.95, top_k=300, seed=seed),
        ):
            expected = plain_text(theirs, sampling, prompt)
            found = plain_text(ours, sampling, prompt)
            require(found == expected, f"plain text differs from token {_first(found, expected)}")
            for graphs in (False, True)[: 2 if device.type == "cuda" else 1]:
                text = Text(ours, sampling, graphs)
                text.prefill(prompt)
                rounds = 0
                while len(text.tokens) + 5 < len(expected):
                    at = len(text.tokens)
                    drafted = expected[at : at + 4]
                    if rounds % 3 == 2:  # wrong from its third token on
                        drafted[2] = (drafted[2] + 7) % SMALL.vocab_size
                    text.step(drafted)
                    rounds += 1
                same = text.tokens == expected[: len(text.tokens)]
                at = _first(text.tokens, expected)
                require(same, f"in trees (graphs: {graphs}) it differs from token {at}")
                require(rounds < TOKENS // 2, "drafted tokens are not accepted")
                compared += len(text.tokens) - len(prompt)
    report("tokens_compared", compared + 2 * TOKENS)
    finish()


def _first(found: list[int], expected: list[int]) -> int:
    pairs = zip(found, expected, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))


if __name__ == "__main__":
    main()
