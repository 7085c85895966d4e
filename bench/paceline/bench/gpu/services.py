"""Rounds, texts and starts of both services as processes.

The target of rounds has random weights but for its head: after a token, the next one has by far the
largest logit. So a text counts, ties are impossible on any device, and the method ``count`` drafts
chains whose tokens are right with a set probability. LongSpec and DSpark folders of the target's
shape are random: their drafts take the time of trained ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from paceline.bench.gpu.cases import (
    DRAFTED,
    EIGHT_BILLION,
    SMALL,
    RandomWeights,
    Targets,
    fail_if_missed,
    missed_targets,
    report,
)
from paceline.bench.prompts import demo_prompts
from paceline.bench.services import ALWAYS
from paceline.client import Client
from paceline.decoder import DecoderConfig
from paceline.drafter import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    Resources,
    TokenTree,
    Update,
)
from paceline.drafter.methods.base import parse_options
from paceline.harness import ServiceProcess

SEQUENCES = (1, 8, 32)
SAMPLING: dict[str, dict[str, Any]] = {
    "T = 0": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}
ACCEPTED = 0.8  # probability that a token of `count` is right
# Tokens of a prompt, of a text, and of the text that is written before, whose time does not count.
# Texts are long beside their prompts, so that rounds do not wait for prompts of other texts.
PROMPT, TOKENS, FIRST_TOKENS = 128, 256, 48
START_SECONDS = 100.0
SECONDS = 170.0  # no case begins later after both services are ready
# Tokens a round of a trained drafter; the folders here are random and accept almost none.
USUAL_ROUND = 3.5
WARM = "seconds_to_start_warm"
# Largest medians on an H100, in microseconds, and over plain rounds; and the longest start of a
# verifier whose kernels were compiled before, in seconds.
TARGETS: Targets = {
    ("1 x none, T = 0", "round_us"): 6600,
    ("32 x none, T = 0", "round_us"): 32 / 3000 * 1e6,
    ("1 x count, T = 0", "rest_us"): 300,
    ("32 x count, T = 0", "rest_us"): 1000,
    ("1 x longspec, T = 0", "draft_us"): 1800,
    ("8 x longspec, T = 0", "draft_us"): 2500,
    ("32 x longspec, T = 0", "draft_us"): 4000,
    ("1 x dspark, T = 0", "draft_us"): 1400,
    ("8 x dspark, T = 0", "draft_us"): 2000,
    ("32 x dspark, T = 0", "draft_us"): 3500,
    # With usual rounds: 370 tokens a second for one user, and 1.8 and 1.5 times plain decoding.
    ("1 x longspec, T = 0", "round_us"): USUAL_ROUND / 370 * 1e6,
    ("8 x longspec, T = 0", "round_over_plain"): USUAL_ROUND / 1.8,
    ("32 x longspec, T = 0", "round_over_plain"): USUAL_ROUND / 1.5,
    ("1 x dspark, T = 0", "round_us"): USUAL_ROUND / 370 * 1e6,
    ("8 x dspark, T = 0", "round_over_plain"): USUAL_ROUND / 1.8,
    ("32 x dspark, T = 0", "round_over_plain"): USUAL_ROUND / 1.5,
    (WARM, "verifier"): 25.0,
}
TRANSFORMERS_TOKENS = 32
COLD = "seconds_to_start_cold"
# Longest start with no kernel compiled, on an H100. Unit: seconds.
START_TARGETS: Targets = {(COLD, "both"): 20.0}
START_DRAFTERS = ("longspec", "dspark")
DEMO = Path("models/demo")
FORMATS = ("bfloat16", "int8")
TEXT_DRAFTERS = ("ngram", "longspec", "dspark")
AT_ONCE = (1, 7, 32)
TEXTS, TEXT_TOKENS = 32, 160
ALONE = 12  # texts that each drafter writes one at a time: the first of all


@dataclass(frozen=True)
class CountOptions:
    """Options of ``count``: the probability, and the most nodes of a chain."""

    p: float = ACCEPTED
    max_nodes: int = 8


class CountSequence(DraftSequence):
    """A text that counts."""

    def __init__(self, options: CountOptions, generation: GenerationInfo) -> None:
        self._options, self._vocab_size = options, generation.vocab_size
        self._last, self._length = generation.tokens[-1], len(generation.tokens)

    def extend(self, update: Update) -> None:
        self._length += len(update.tokens)
        self._last = (self._last, *update.tokens)[-1]

    def draft(self, budget: Budget) -> TokenTree:
        chain = []
        for level in range(min(budget.nodes, budget.depth, self._options.max_nodes)):
            right = random.Random(self._length + level).random() < self._options.p
            chain.append((self._last + 1 + level + (not right)) % self._vocab_size)
        return TokenTree.chain(chain)


class CountDrafter(Drafter):
    """Needs no folder."""

    method: ClassVar[str] = "count"

    def __init__(self, options: CountOptions) -> None:
        self.options = options

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> CountDrafter:
        return cls(parse_options(CountOptions, options))

    def start(self, generation: GenerationInfo) -> CountSequence:
        return CountSequence(self.options, generation)


def write_target(folder: Path, config: DecoderConfig, device: torch.device, seed: int) -> None:
    """Write a folder of Hugging Face's form, a file for each layer."""
    folder.mkdir()
    weights = RandomWeights(config, device, seed)
    embedding = torch.randn(config.vocab_size, config.hidden, device=device)
    ends = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.roll(1, 0) * (30 / config.hidden),
        "model.norm.weight": weights["model.norm.weight"],
    }
    parts: dict[str, dict[str, Tensor]] = {"ends": ends}
    index: dict[str, str] = {}
    layers: dict[str, list[str]] = {}
    for name in weights:
        if ".layers." in name:
            layers.setdefault(name.split(".")[2], []).append(name)
    for part in ("ends", *layers):
        tensors = parts.pop(part, None) or {name: weights[name] for name in layers[part]}
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] *= 0.01  # what layers add leaves the embedding recognisable
        file = f"model-{part}.safetensors"
        index |= dict.fromkeys(tensors, file)
        save_file(
            {name: tensor.to("cpu", config.dtype).contiguous() for name, tensor in tensors.items()},
            folder / file,
            metadata={"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    vocabulary = {f"t{token}": token for token in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config_fields(config)))


def config_fields(config: DecoderConfig) -> dict[str, Any]:
    """Return what a folder of Hugging Face's form says of a target."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(config.dtype).removeprefix("torch."),
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_inv_freq[1] ** (-config.head_dim / 2),
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def write_drafters(folder: Path, target: Path, config: DecoderConfig) -> dict[str, str]:
    """Write random drafters of the target's shape; returns their specifications by name."""
    from paceline.convert.drafters import DRAFT_TOKENS
    from paceline.drafter.methods.checkpoint import TargetRef, save_drafter
    from paceline.drafter.methods.dspark import DSparkConfig
    from paceline.drafter.methods.longspec import LongSpecConfig
    from paceline.train.modules import DSparkModel, LongSpecModel

    reference = TargetRef.of(target)
    count = min(DRAFTED, config.vocab_size // 2)
    long = LongSpecConfig.for_target(target, draft_vocab_size=count)
    weights = LongSpecModel(long).state_dict() | {DRAFT_TOKENS: torch.arange(count)}
    save_drafter(folder / "longspec", long, weights, reference, dtype=config.dtype)
    last = config.layers - 1
    taps = sorted({round(share * last / 4) for share in range(5)})
    block = DSparkConfig.for_target(
        target, taps=taps, layers=len(taps), block=7, mask_token=0, markov_rank=128
    )
    weights = DSparkModel(block).state_dict()
    save_drafter(folder / "dspark", block, weights, reference, dtype=config.dtype)
    # The method ``count`` is that of a distribution, found on the path.
    about = folder / "paceline_count-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline-count\nVersion: 1\n")
    entry = "[paceline.methods]\ncount = paceline.bench.gpu.services:CountDrafter\n"
    (about / "entry_points.txt").write_text(entry)
    return {
        "count": "count",
        "longspec": f"longspec:{folder / 'longspec'},target={target}",
        "dspark": f"dspark:{folder / 'dspark'},target={target}",
    }


async def measure(
    client: Client,
    drafter: str,
    sequences: int,
    vocab_size: int,
    sampling: Mapping[str, Any],
    tokens: int = TOKENS,
) -> tuple[list[list[int]], dict[str, float]]:
    """Return texts, and medians in microseconds over rounds; without drafts over steps."""
    firsts = [100 + number * 37 for number in range(sequences)]
    results = await asyncio.gather(
        *(
            client.generate(
                [token % vocab_size for token in range(first, first + PROMPT)],
                max_new_tokens=tokens, seed=first, drafter=drafter, ignore_eos=True, **sampling,
            )
            for first in firsts
        )
    )  # fmt: skip
    rounds = [entry for result in results for entry in result.stats.rounds[1:]]
    if drafter != "none":
        rounds = [entry for entry in rounds if entry.drafted]
    texts = [list(result.token_ids) for result in results]
    if not rounds:
        return texts, {"rounds": 0}
    times = {
        "round": [entry.round_ms / entry.steps for entry in rounds],
        "draft": [entry.draft_ms / entry.steps for entry in rounds],
        "verify": [entry.verify_ms / entry.steps for entry in rounds],
        "queue": [entry.queue_ms / entry.steps for entry in rounds],
        "rest": [entry.transport_ms / entry.steps for entry in rounds],
    }
    seconds = max(r.stats.total_ms - r.stats.first_token_ms for r in results) / 1e3
    drafted = 1.0 if drafter == "none" else USUAL_ROUND
    return texts, {
        **{f"{part}_us": round(median(values) * 1e3, 1) for part, values in times.items()},
        f"tokens_a_second_at_{drafted:g}_a_round": round(
            sequences * drafted / median(times["round"]) * 1e3, 1
        ),
        "tokens_a_round": round(sum(e.emitted for e in rounds) / sum(e.steps for e in rounds), 2),
        "tokens_a_second": round(sequences * (tokens - 1) / seconds, 1),
        "rounds": len(rounds),
    }


def drafters_by_sequences(config: DecoderConfig, names: Sequence[str]) -> dict[int, list[str]]:
    """Return drafters, and ``none``, by the number of sequences. A small target has 32 sequences
    for ``none`` and ``count`` alone."""
    if config is EIGHT_BILLION:
        return {sequences: ["none", *names] for sequences in SEQUENCES}
    return {1: ["none", *names], 2: ["none", *names], SEQUENCES[-1]: ["none", "count"]}


async def measure_all(
    address: str, names: Sequence[str], config: DecoderConfig, ends: float
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Report every case.

    Args:

    Returns:
        Figures by case, and what was left out.
    """
    cases = [
        (sequences, name)
        for sequences, drafters in drafters_by_sequences(config, names).items()
        for name in drafters
    ]
    by_case: dict[str, dict[str, float]] = {}
    left_out: list[str] = []
    texts: dict[tuple[str, int], list[list[int]]] = {}
    async with Client(address, drafting=ALWAYS) as client:
        for (label, sampling), (sequences, name) in product(SAMPLING.items(), cases):
            case = f"{sequences} x {name}, {label}"
            if time.monotonic() > ends:
                left_out.append(f"{case}: no time is left")
                continue
            common = (client, name, sequences, config.vocab_size, sampling)
            await measure(*common, FIRST_TOKENS)
            written, figures = await measure(*common)
            if written != texts.setdefault((label, sequences), written):
                raise AssertionError(f"{case}: the texts are not those without drafts")
            if not figures["rounds"]:
                left_out.append(f"{case}: no round had a draft")
            elif plain := by_case.get(f"{sequences} x none, {label}"):
                figures["round_over_plain"] = round(figures["round_us"] / plain["round_us"], 3)
            by_case[case] = figures
            report(case, figures)
    return by_case, left_out


def transformers_rate(target: Path, device: torch.device, config: DecoderConfig) -> float:
    """Return milliseconds a token of `transformers` for one text, whose tokens count too."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=config.dtype)
    model.to(device)
    prompt = torch.arange(100, 100 + PROMPT, device=device)[None]
    times = []
    for tokens in (TRANSFORMERS_TOKENS, 1, TRANSFORMERS_TOKENS):
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
        times.append(time.perf_counter() - began)
        assert out[0].tolist() == list(range(100, 100 + PROMPT + tokens)), "the text does not count"
    return (times[2] - times[1]) * 1e3 / (TRANSFORMERS_TOKENS - 1)


def rounds(device: torch.device) -> None:
    """Report rounds of both services over an 8B target made on this machine, by their parts.

    Fails if a text depends on the drafter, or, with an 8B target on a GPU, if one of `TARGETS` is
    missed or has no figure, or anything was left out.
    """
    large = device.type == "cuda"
    config = EIGHT_BILLION if large else replace(SMALL, layers=2, windows=(None, None), tied=False)
    with tempfile.TemporaryDirectory(prefix="pl") as temporary:
        folder = Path(temporary)
        target = folder / "target"
        began = time.monotonic()
        write_target(target, config, device, torch.initial_seed())
        specs = write_drafters(folder, target, config)
        if large:
            torch.cuda.empty_cache()
        report("seconds_to_write_models", round(time.monotonic() - began, 1))
        paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))  # of the method `count`
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        on = f"--device={device.type}"
        given = [
            f"--target={target}", on, f"--kv-bytes={'8GiB' if large else '256MiB'}",
            "--max-context=4096", "--no-prefix-caching",
        ]  # fmt: skip
        load = [argument for name in specs for argument in ("--load", f"{name}={specs[name]}")]
        began = time.monotonic()
        with ServiceProcess(
            "verifier", given, environment=environment, ready_seconds=START_SECONDS
        ) as verifier:
            ready = time.monotonic()
            with ServiceProcess(
                "drafter", [on, f"--verifier={verifier.address}", *load],
                environment=environment, ready_seconds=START_SECONDS,
            ):  # fmt: skip
                joined = time.monotonic()
                report("seconds_to_start", {"verifier": ready - began, "drafter": joined - ready})
                ends = joined + SECONDS
                names = list(specs)
                by_case, left_out = asyncio.run(measure_all(verifier.address, names, config, ends))
        began = time.monotonic()
        with ServiceProcess("verifier", given, ready_seconds=START_SECONDS):
            by_case[WARM] = {"verifier": time.monotonic() - began}
        report(WARM, by_case[WARM])
        if find_spec("transformers") is None:
            left_out.append("transformers: it is not installed")
        else:
            report("transformers", {"ms_a_token": transformers_rate(target, device, config)})
    report("left_out", left_out)
    fail_if_missed([*left_out, *missed_targets(by_case, TARGETS)], device)


def seconds_to_start(device: str, kernels: str) -> dict[str, float]:
    """Return the seconds of the verifier's start, of the drafter's behind it, and of both;
    ``kernels`` is the folder of compiled kernels, those of the CPU too."""
    target, on = DEMO / "target", f"--device={device}"
    load = [f"--load={name}={name}:{DEMO / name},target={target}" for name in START_DRAFTERS]
    environment = {"TRITON_CACHE_DIR": f"{kernels}/triton", "XDG_CACHE_HOME": kernels}
    began = time.monotonic()
    with ServiceProcess(
        "verifier", [f"--target={target}", on, "--kv-bytes=512MiB"], environment=environment
    ) as verifier:
        ready = time.monotonic()
        with ServiceProcess(
            "drafter", [on, f"--verifier={verifier.address}", *load], environment=environment
        ):
            ended = time.monotonic()
    seconds = {"verifier": ready - began, "drafter": ended - ready, "both": ended - began}
    return {name: round(value, 1) for name, value in seconds.items()}


def start(device: torch.device) -> None:
    """Report the seconds until both services of the demo are ready, with no kernel compiled and
    with all. Fails if a start on a GPU misses one of `START_TARGETS`."""
    with tempfile.TemporaryDirectory(prefix="pl") as kernels:
        cold = seconds_to_start(device.type, kernels)
        report(COLD, cold)
        report(WARM, seconds_to_start(device.type, kernels))
    fail_if_missed(missed_targets({COLD: cold}, START_TARGETS), device)


@dataclass(frozen=True)
class Job:
    """A text to be continued, greedily or sampled."""

    prompt: list[int]
    temperature: float
    seed: int


def jobs(count: int) -> list[Job]:
    """Return ends of demo prompts of different lengths; every second text is sampled."""
    prompts = demo_prompts(DEMO / "prompts", DEMO / "target")
    chosen = [prompts[index % len(prompts)] for index in range(count)]
    return [Job(ids[-300 + 7 * n :], 0.8 * (n % 2), n) for n, ids in enumerate(chosen)]


async def write(
    client: Client, drafter: str, texts: Sequence[Job], at_once: int, tokens: int
) -> tuple[list[list[int]], float]:
    """Generate texts; returns their tokens, and tokens a drafted round."""
    gate = asyncio.Semaphore(at_once)

    async def one(job: Job) -> Any:
        async with gate:
            return await client.generate(
                job.prompt, max_new_tokens=tokens, temperature=job.temperature,
                seed=job.seed, drafter=drafter, ignore_eos=True,
            )  # fmt: skip

    results = await asyncio.gather(*map(one, texts))
    rounds = [entry for result in results for entry in result.stats.rounds if entry.drafted]
    emitted = sum(entry.emitted for entry in rounds) / max(1, len(rounds))
    return [list(result.token_ids) for result in results], round(emitted, 2)


async def compare(verifier: str, weights: str, count: int, tokens: int) -> list[str]:
    """Report each way of writing the texts; returns those that changed one."""
    changed = []
    texts = jobs(count)
    async with Client(verifier, drafting=ALWAYS) as client:
        right, _ = await write(client, "none", texts, 1, tokens)
        ways = [
            (name, n)
            for name in ("none", *TEXT_DRAFTERS)
            for n in AT_ONCE
            if (name, n) != ("none", 1)
        ]
        for name, at_once in ways:
            some = texts[: ALONE if at_once == 1 else count]
            written, emitted = await write(client, name, some, at_once, tokens)
            pairs = list(zip(right, written, strict=False))
            firsts = [
                next(at for at, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
                for pair in pairs
                if pair[0] != pair[1]
            ]
            case = f"{weights}, {name}, {at_once} at once"
            report(
                case,
                {
                    "texts": len(some), "different": len(firsts),
                    "tokens_a_round": emitted, "first_different_tokens": sorted(firsts)[:8],
                },
            )  # fmt: skip
            if firsts:
                changed.append(case)
    return changed


def texts(device: torch.device) -> None:
    """Compare texts of the demo model with and without drafts, alone and beside others, as served.

    One text at a time without a drafter is what every other way must give: each drafter, with trees
    as it drafts them by default, for several texts at once, in each format of weights. Fails if a
    text differs.
    """
    target = DEMO / "target"
    specs = {name: f"{name}:{DEMO / name},target={target}" for name in TEXT_DRAFTERS} | {
        "ngram": "ngram,shared_tokens=0"  # without the memory of other texts
    }
    count, tokens = (TEXTS, TEXT_TOKENS) if device.type == "cuda" else (4, 24)
    changed: list[str] = []
    for weights in FORMATS:
        given = ["--target", str(target), "--weights", weights, "--device", device.type]
        load = [argument for name in specs for argument in ("--load", f"{name}={specs[name]}")]
        with (
            ServiceProcess("verifier", [*given, "--kv-bytes=512MiB"]) as verifier,
            ServiceProcess(
                "drafter", ["--device", device.type, f"--verifier={verifier.address}", *load]
            ),
        ):
            changed += asyncio.run(compare(verifier.address, weights, count, tokens))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if changed:
        sys.exit(f"texts depend on how they are written: {'; '.join(changed)}")
