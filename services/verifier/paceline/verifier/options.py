"""Options of a verifier, which are also arguments of `paceline verifier`. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from paceline.formats import KV_CACHE_DTYPES, WEIGHTS
from paceline.service.options import byte_count, option
from paceline.tree import MAX_NODES

CUDA_GRAPHS = ("auto", "on", "off")
GPU_MEMORY = 0.8  # share of a GPU's memory by default
SOURCES = ("ngram", "recycle", "grammar")
SCHEDULES = ("off", "auto", "profile")
NUMERICS = ("auto", "portable", "fast")


def round_sampling(text: str) -> tuple[int, int]:
    """Parse `N:M` or `all`; an argparse type. Raises ``argparse.ArgumentTypeError``: it is
    neither, or M is 0."""
    first, _, every = ("0:1" if text == "all" else text).partition(":")
    if not (first.isdecimal() and every.isdecimal() and int(every)):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no rounds: give N:M, the first N and then one in M, or all"
        )
    return int(first), int(every)


def source_names(text: str) -> tuple[str, ...]:
    """Parse `NAME,NAME` or `none`; an argparse type. Raises ``argparse.ArgumentTypeError``: a name
    is unknown."""
    names = () if text == "none" else tuple(text.split(","))
    for name in names:
        if name not in SOURCES:
            raise argparse.ArgumentTypeError(
                f"there is no source {name!r}: give some of {', '.join(SOURCES)}, or none"
            )
    return names


@dataclass(frozen=True)
class VerifierOptions:
    """Checked options of one verifier. Raises ``ValueError`` if an option is out of range."""

    model_name: str | None = option(
        None,
        "the model's name for clients (default: the name it was given by, such as smollm2, or "
        "that of its file or folder)",
        metavar="NAME",
    )
    device: str = option(
        "cpu",
        "device of the model and its KV: auto (default of the command: the first GPU; the CPU "
        "without a GPU or with --share-weights), cpu, cuda or cuda:N",
        metavar="D",
    )
    weights: str = option(
        "auto",
        "auto: as stored, or int8 for a GGUF file that is faster so on this processor; int8 and "
        "int4: quantised when packed, int8 with one scale an output, int4 in blocks of 32; float32 "
        "and bfloat16 are also the type of hidden states",
        choices=WEIGHTS,
    )
    lora: Path | None = option(
        None,
        "PEFT folder of a LoRA adapter for the target, merged into its weights when it is loaded",
        metavar="DIR",
    )
    numerics: str = option(
        "auto",
        "order of additions. auto: texts do not depend on drafts or on other texts; bits are those "
        "of the kind of GPU, and on CPUs the fastest ones, of their own for bfloat16 weights with "
        "AMX and for bfloat16 caches with AVX512_BF16. "
        "portable: the same tokens on every x86-64 and ARM processor; fast: for GPUs, what their "
        "libraries choose, so that texts may depend on drafts",
        choices=NUMERICS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of KV caches. auto: that of hidden states; int8: a scale for each position and head, "
        "about half the memory of bfloat16. Others than auto are supported on the CPU",
        choices=KV_CACHE_DTYPES,
    )
    kv_bytes: int | None = option(
        None,
        "memory for all KV caches, such as 4GiB; it also bounds the context (default: half of the "
        "main memory that is free; on a GPU by gpu_memory)",
        type=byte_count,
        metavar="N",
    )
    gpu_memory: float = option(
        GPU_MEMORY,
        "share of a GPU's memory for the verifier's weights and KV, where kv_bytes is not given; "
        "the rest is for graphs, activations and drafters on this GPU",
        metavar="SHARE",
    )
    max_context: int | None = option(
        None, "maximum tokens of prompt and output together (default: the model's)", metavar="N"
    )
    max_sequences: int = option(256, "maximum number of caches at once", metavar="N")
    prefix_caching: bool = option(
        True,
        "free the KV of ended texts at once; by default it is kept while there is memory, and a "
        "prompt of the same client that begins in the same way takes it over",
    )
    lease_seconds: float = option(
        30.0, "lifetime of a cache without a Generate stream or a renewal", metavar="S"
    )
    node_budget: int = option(MAX_NODES, "maximum number of drafted nodes in a tree", metavar="N")
    step_token_limit: int = option(
        2048,
        "maximum tokens of rounds in one forward pass; further rounds wait for the next one",
        metavar="N",
    )
    prefill_token_limit: int = option(
        512,
        "maximum tokens of prompts in one forward pass; beside texts that run there are fewer, so "
        "that it takes about as long as four without prompts",
        metavar="N",
    )
    share_weights: bool = option(
        False,
        "have one copy of the weights with the drafters on this host, also where the system has no "
        "huge pages for files, which makes steps slower",
    )
    schedule: str = option(
        "auto",
        "auto: verify the nodes that raise tokens per second under the current load, and draft "
        "only where it pays, by a table of step times that the first start with a model measures; "
        "profile: measure the table again; off: verify every node; a GPU always does",
        choices=SCHEDULES,
    )
    sources: tuple[str, ...] = option(
        ("ngram", "grammar"),
        "what the verifier guesses by itself, beside any drafter, separated by commas, or none. "
        "ngram: what followed the newest tokens earlier in the text, or in other texts of its "
        "owner; recycle: what the model found likely after the same tokens before; grammar: what a "
        "schema, regex or grammar forces, or left as open before (default: ngram,grammar)",
        type=source_names,
        metavar="NAMES",
    )
    cuda_graphs: str = option(
        "auto",
        "steps as CUDA graphs on a GPU. auto: batches whose graph cannot be captured run kernel by "
        "kernel; on: a start without all graphs fails; off: none",
        choices=CUDA_GRAPHS,
    )
    draft_socket: str | None = option(
        None,
        "file of the Unix socket for drafter services on this host, which they must see under the "
        "same path (default: an abstract name, for services in this network namespace)",
        type=expanduser,
        metavar="PATH",
    )
    trace_rounds: tuple[int, int] = option(
        (100, 10),
        "rounds of a traced generation that have spans. N:M: the first N, then one in M; all: each "
        "one (default: 100:10)",
        type=round_sampling,
        metavar="N:M",
    )
    threads: int | None = None  # threads of one operation; None: PyTorch's setting
    paged_kv: bool = False
    """Keep KV in pages of one pool on the CPU too, as always on a GPU. Drafters cannot map it
    there. For tests."""

    def __post_init__(self) -> None:
        positive = ("lease_seconds", "max_sequences", "step_token_limit", "prefill_token_limit")
        for name in (*positive, "kv_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, expected a finite number above 0")
        if not 0 < self.gpu_memory <= 1:
            raise ValueError(f"gpu_memory is {self.gpu_memory}, expected a share above 0, up to 1")
        if not 0 <= self.node_budget <= MAX_NODES:
            raise ValueError(f"node_budget is {self.node_budget}, expected 0 to {MAX_NODES}")
        choices = {"schedule": SCHEDULES, "numerics": NUMERICS, "cuda_graphs": CUDA_GRAPHS}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} is {value!r}, expected {', '.join(known)}")
        if self.cuda_graphs == "on" and self.device == "cpu":
            raise ValueError("cuda_graphs is 'on', and device is cpu: expected auto or off")
        if self.gpu_memory != GPU_MEMORY and (self.kv_bytes is not None or self.device == "cpu"):
            instead = "device is cpu" if self.kv_bytes is None else "kv_bytes is given"
            raise ValueError(
                f"gpu_memory is {self.gpu_memory}, which has no effect where {instead}: give one "
                "of them"
            )
        for name in self.sources:
            if name not in SOURCES:
                raise ValueError(f"sources has {name!r}, expected some of {', '.join(SOURCES)}")
        if self.paged_kv and self.kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}, expected auto: KV in pages has the "
                "type of hidden states"
            )
        if self.share_weights and self.device not in ("auto", "cpu"):
            raise ValueError(
                f"weights are shared in main memory, and device is {self.device!r}; expected auto "
                "or cpu"
            )
