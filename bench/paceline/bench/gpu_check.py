"""`make gpu-check`: is the code that runs on a GPU right there, and how fast is it?

Needs torch, transformers, numpy and safetensors, no network, and ten minutes at most. Every tensor
is drawn anew from a seed that is printed, and outputs are poisoned before they are written.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench import machine
from paceline.decoder import Decoder, LocalCache
from paceline.kernels import TreePlan, TreeSegment, plan_trees, tree_attention
from paceline.kernels.reference import reference_attention

_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1280,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
}


def check_attention(device: str, generator: torch.Generator) -> dict[str, dict[str, float]]:
    """Errors against the fp64 reference, ours and a plain computation's, by type and head size.

    The largest of a hundred thousand errors is half chance, hence its wider bound.

    Raises:
        AssertionError: Ours is over twice that of the plain computation in the same type by root
            mean square, or over four times by the largest value.
    """
    errors = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for dim in (64, 80, 96, 128, 256):
            parents = [-1]
            for node in range(1, 24):
                parents.append(int(torch.randint(-1, node, (1,), generator=generator)))
            segments = [
                TreeSegment(0, 300, tuple(parents), len(parents)),
                TreeSegment(1, 0, None, 40),
                TreeSegment(2, 255, None, 7),
            ]

            def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.randn(*shape, generator=generator).to(dtype).to(device)

            plan = plan_trees(segments, device=device)
            q = draw(plan.rows, 8, dim)
            keys = [draw(2, segment.stop, dim) for segment in segments]
            values = [draw(2, segment.stop, dim) for segment in segments]
            out = torch.full_like(q, float("nan"))
            tree_attention(q, keys, values, plan, scale=dim**-0.5, window=None, out=out)
            expected, _ = reference_attention(
                q.cpu(),
                [key.cpu() for key in keys],
                [value.cpu() for value in values],
                plan_trees(segments),
                scale=dim**-0.5,
            )
            ours, plain = (
                found.cpu().double() - expected
                for found in (out, _plain_attention(q, keys, values, plan))
            )
            name = f"{str(dtype).removeprefix('torch.')}/{dim}"
            errors[name] = {
                "rms": float(ours.square().mean().sqrt()),
                "plain_rms": float(plain.square().mean().sqrt()),
                "max": float(ours.abs().max()),
                "plain_max": float(plain.abs().max()),
            }
            for kind, factor in (("rms", 2), ("max", 4)):
                error, bound = errors[name][kind], factor * errors[name][f"plain_{kind}"]
                assert error <= bound, f"{name}: {kind} error {error:.2e}, expected <= {bound:.2e}"
    return errors


def _plain_attention(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], plan: TreePlan
) -> torch.Tensor:
    """Masked softmax attention as one would write it, every step in the type of ``q``."""
    parts = []
    for rows, segment in zip(
        q.split([s.length for s in plan.segments]), plan.segments, strict=True
    ):
        group = q.shape[1] // keys[segment.sequence].shape[0]
        key = keys[segment.sequence].repeat_interleave(group, 0)
        value = values[segment.sequence].repeat_interleave(group, 0)
        seen = torch.ones(segment.length, segment.stop, dtype=torch.bool)
        seen[:, segment.start :] = torch.from_numpy(segment.ancestors())
        scores = rows.transpose(0, 1) @ key.transpose(1, 2) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~seen.to(q.device), float("-inf")).softmax(-1)
        parts.append((weights @ value).transpose(0, 1))
    return torch.cat(parts)


def check_tokens(device: str, folder: Path, tokens: int = 64) -> int:
    """Greedy fp32 text equals the CPU's, plain and through trees; returns the tokens compared."""
    prompt = torch.arange(7, 207)
    expected = _greedy(Decoder.load(folder, torch.float32), prompt, tokens)
    found = _greedy(Decoder.load(folder, torch.float32, device), prompt, tokens)
    assert found == expected, "fp32 text on the GPU differs from the CPU's"
    return tokens


def _greedy(decoder: Decoder, prompt: torch.Tensor, tokens: int) -> list[int]:
    cache = LocalCache(decoder.config, decoder.device)
    block, output = prompt, list[int]()
    while len(output) < tokens:
        logits = _forward(decoder, cache, block)
        cache.commit(range(len(block)))
        output.append(int(logits[-1].argmax()))
        block = torch.tensor(output[-1:])
    return output


def _forward(decoder: Decoder, cache: LocalCache, block: torch.Tensor) -> torch.Tensor:
    cache.reserve(len(block))
    plan = plan_trees([TreeSegment(0, len(cache), None, len(block))], device=decoder.device)
    result = decoder.forward(block.to(decoder.device), plan, [cache], logit_rows=None)
    return result.logits


def time_forward(device: str, folder: Path) -> dict[str, float]:
    """Median milliseconds of a bf16 forward of n chained tokens behind 2,048, by n."""
    decoder = Decoder.load(folder, torch.bfloat16, device)
    cache = LocalCache(decoder.config, device)
    for start in range(0, 2048, 256):
        _forward(decoder, cache, torch.arange(start, start + 256))
        cache.commit(range(256))

    def run(count: int) -> None:
        _forward(decoder, cache, torch.arange(count))
        if device != "cpu":
            torch.cuda.synchronize()

    return {str(n): _median_ms(lambda n=n: run(n)) for n in (1, 8, 16, 64)}  # type: ignore[misc]


def _median_ms(action: Callable[[], None], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats + 5):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[5:])


def main() -> int:
    """Run all checks; write JSON; 0 when everything holds, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the checks")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    seed = time.time_ns() % 2**31
    print(f"seed {seed}", flush=True)
    generator = torch.Generator().manual_seed(seed)
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    results: dict[str, Any] = {"machine": machine.describe(), "device": name, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as scratch:
        folder = Path(scratch)
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**_SHAPE)).save_pretrained(folder)
        for part, action in (
            ("attention_error", lambda: check_attention(args.device, generator)),
            ("tokens_equal", lambda: check_tokens(args.device, folder)),
            ("forward_ms", lambda: time_forward(args.device, folder)),
        ):
            results[part] = action()
            print(part, json.dumps(results[part]), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    kind = "-".join(name.lower().split())
    (args.output / f"{kind}.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
