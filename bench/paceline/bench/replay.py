"""The system apart from any drafter: a recorded continuation, right with a chosen probability."""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.bench.served import Services, generate, overhead_ms
from paceline.decoder import Decoder, LocalCache
from paceline.kernels import TreeSegment, plan_trees

HALF_BILLION: dict[str, Any] = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""A 0.5B target's shape."""


@dataclass(frozen=True)
class Efficiency:
    """What the services make of an ideal drafter; times in milliseconds, medians over rounds.

    `efficiency` is measured tokens/s over ideal tokens/s, the ideal being the accepted length over
    (the time of a bare forward pass of anchor and nodes + the draft's).
    """

    acceptance: float
    nodes: int
    tokens: int
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    mean_accepted_length: float
    bare_forward_ms: float
    bare_step_ms: float
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    ideal_tokens_per_second: float
    efficiency: float
    identical: bool


async def measure(
    work: Path, *, acceptance: float = 0.8, nodes: int = 8, tokens: int = 256, prompt: int = 256
) -> dict[str, object]:
    """Measure `Efficiency` on a target of 0.5B shape with random weights in bf16.

    `work` takes the weights (1 GB) and the recording. `prompt` and `tokens` are lengths in tokens.
    """
    target = work / "target"
    if not target.exists():
        _write_target(target)
    text = torch.randint(
        HALF_BILLION["vocab_size"], (prompt,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    recording = work / "recording.jsonl"
    with Services(target, ["ngram=ngram"], "bfloat16") as services:
        async with services.client() as client:
            await generate(client, text, 8, "none")
            plain = await generate(client, text, tokens, "none")
    recording.write_text(json.dumps({"prompt": text, "tokens": plain.tokens}) + "\n")
    spec = f"replay=replay:{recording},p={acceptance},max_nodes={nodes},seed=1"
    with Services(target, [spec], "bfloat16") as services:
        async with services.client() as client:
            # Warm up, and let the client learn what plain and drafted rounds cost.
            await generate(client, text, 32, "replay")
            plain = await generate(client, text, tokens, "none")
            drafted = await generate(client, text, tokens, "replay")
    rounds = [entry for entry in drafted.stats.rounds if entry.drafted]
    draft_ms = statistics.median(entry.draft_ms for entry in rounds)
    bare_step, bare_forward = _bare_forward_ms(target, prompt + tokens // 2, (1, nodes + 1))
    length = drafted.stats.mean_accepted_length
    ideal = length / (bare_forward + draft_ms) * 1e3
    rate = (tokens - 1) / drafted.decode_seconds
    plain_rate = (tokens - 1) / plain.decode_seconds
    return asdict(
        Efficiency(
            acceptance=acceptance,
            nodes=nodes,
            tokens=tokens,
            plain_tokens_per_second=plain_rate,
            tokens_per_second=rate,
            speedup=rate / plain_rate,
            mean_accepted_length=length,
            bare_forward_ms=bare_forward,
            bare_step_ms=bare_step,
            draft_ms=draft_ms,
            verify_ms=statistics.median(entry.verify_ms for entry in rounds),
            overhead_ms=statistics.median(map(overhead_ms, rounds)),
            ideal_tokens_per_second=ideal,
            efficiency=rate / ideal,
            identical=drafted.tokens == plain.tokens,
        )
    )


def _write_target(folder: Path) -> None:
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen2ForCausalLM(Qwen2Config(**HALF_BILLION))
    finally:
        torch.set_default_dtype(previous)
    model.save_pretrained(folder)


def _bare_forward_ms(target: Path, context: int, counts: tuple[int, ...]) -> list[float]:
    """Median time of a forward pass of n chained nodes behind `context` tokens, for each n."""
    decoder = Decoder.load(target, dtype=torch.bfloat16)
    cache = LocalCache(decoder.config)
    cache.reserve(context)
    cache.commit(range(context))
    cache.reserve(max(counts))
    medians = []
    for count in counts:
        tokens = torch.arange(count)
        times = []
        for _ in range(15):
            plan = plan_trees([TreeSegment(0, context, None, count)])
            start = time.perf_counter()
            decoder.forward(tokens, plan, [cache], logit_rows=None)
            times.append((time.perf_counter() - start) * 1e3)
        medians.append(statistics.median(times[3:]))
    return medians
