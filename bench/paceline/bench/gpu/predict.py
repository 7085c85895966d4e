"""Predicted times of a step on one H100, from counted bytes, kernels, copies and waits.

Nothing here was measured on a GPU. Bytes, products, kernels, copies and waits are counted; rates
are those of the data sheet with usual shares; times of the host were measured on a CPU. Figures of
`make gpu-check` belong beside these.

    python -m paceline.bench.gpu.predict        # prints the tables of docs/gpu.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.bench.gpu.cases import EIGHT_BILLION
from paceline.decoder import DecoderConfig

SEVENTY_BILLION = replace(
    EIGHT_BILLION, layers=80, hidden=8192, intermediate=28672, q_heads=64, windows=(None,) * 80
)

BYTES_PER_US = 3.35e6 * 0.88
"""Of reading weights: the data sheet's rate, and the share that copies reach."""

KV_SHARE = 0.85
"""Of it, in attention."""

FLOP_PER_US = 989e6 * 0.6
"""Of products in bfloat16."""

ATTENTION_US = 6.0
"""Of the two attention kernels of a layer, beside reading."""

KERNEL_US = 1.2
"""Between two kernels of a CUDA graph."""

KERNELS = 8
"""Of a layer, beside attention: see tests/kernels/triton/test_graphs.py."""

SAMPLING_US = 30.0
"""Of choosing tokens at T = 0: one reduction, of any number of rows."""

COPY_US, WAIT_US = 8.0, 15.0
COPIES, WAITS = 3, 1
"""Of a step, however many sequences: tables, what moves in the KV, and tokens for the host. See
tests/verifier/on_another_device.py."""

STEP_US, SEQUENCE_US, ROW_US = 90.0, 13.0, 2.5
"""Of Python on the host for a step, each of its sequences, and each of its rows, between a wait and
the next CUDA graph: walks, answers, decisions of the scheduler, tables. What the host does between
a graph and the wait is hidden behind the graph."""

SCALED = 4
"""Kernels of a layer more in fp8: one quantises the rows of each product."""

NODES = 8
"""Drafted nodes of each sequence in a step with trees."""


@dataclass(frozen=True)
class Step:
    """A step of sequences that have some context and some rows each.

    Attributes:
        config: Shape of the target, in bfloat16 or fp8.
        sequences: Number of sequences.
        context: Tokens of each. Unit: tokens.
        rows: Rows of each: the anchor and its nodes.
    """

    config: DecoderConfig
    sequences: int
    context: int
    rows: int = 1

    @property
    def fp8(self) -> bool:
        """Whether the layers are in 8-bit floats."""
        return self.config.weights == "fp8"

    @property
    def weights(self) -> tuple[int, int]:
        """Weights that a step multiplies with: of layers, and of the head, which is bfloat16."""
        c = self.config
        attention = c.hidden * c.head_dim * (2 * c.q_heads + 2 * c.kv_heads)
        layer = attention + 3 * c.hidden * c.intermediate
        return c.layers * layer, c.vocab_size * c.hidden

    @property
    def weight_bytes(self) -> int:
        """Of them. Unit: bytes."""
        layers, head = self.weights
        return (2 - self.fp8) * layers + 2 * head

    @property
    def kv_bytes(self) -> int:
        """KV of all sequences. Unit: bytes."""
        return self.sequences * self.context * self.config.kv_bytes_per_token

    def parts(self) -> dict[str, float]:
        """Time of each part. Unit: microseconds."""
        c, rows = self.config, self.sequences * self.rows
        layers, head = self.weights
        halves = 2 * rows * (layers / (1 + self.fp8) + head)  # fp8 has twice the rate
        return {
            "products": max(self.weight_bytes / BYTES_PER_US, halves / FLOP_PER_US),
            "attention": c.layers * ATTENTION_US + self.kv_bytes / (KV_SHARE * BYTES_PER_US),
            "between kernels": c.layers * (KERNELS + SCALED * self.fp8) * KERNEL_US,
            "sampling": SAMPLING_US,
            "copies, waits": COPIES * COPY_US + WAITS * WAIT_US,
            "host": STEP_US + self.sequences * SEQUENCE_US + rows * ROW_US,
        }

    @property
    def graph_us(self) -> float:
        """Time of the CUDA graph. Unit: microseconds."""
        parts = self.parts()
        return sum(parts[name] for name in ("products", "attention", "between kernels"))


DRAFTED = 32_000
"""Tokens that LongSpec drafts: the reduced vocabulary of EAGLE-3's published heads."""


@dataclass(frozen=True)
class Draft:
    """A draft for a target, by a drafter as :mod:`paceline.bench.gpu.rounds` makes it.

    Attributes:
        config: Shape of the target.
        layers: Layers that are read in each pass, with `attentions` blocks of attention in each.
        attentions: 2 where a layer attends to the target's keys too.
        passes: Passes through them, each with a head of all drafted tokens.
        drafted: Tokens that can be drafted.
        kernels: Of the CUDA graph.
        copies: Of a draft, that of the trees to the host included. The host waits once.
        host: Of Python on the host for a draft, and for each of its sequences. Unit: microseconds.
        sequences: Number of sequences.
    """

    config: DecoderConfig
    layers: int
    attentions: int
    passes: int
    drafted: int
    kernels: int
    copies: int
    host: tuple[float, float]
    sequences: int = 1

    def parts(self) -> dict[str, float]:
        """Time of each part. Unit: microseconds."""
        c = self.config
        attention = c.hidden * c.head_dim * (2 * c.q_heads + 2 * c.kv_heads)
        layer = self.attentions * attention + 3 * c.hidden * c.intermediate
        layers = 2 * self.passes * self.layers * layer / BYTES_PER_US
        head = 2 * self.passes * self.drafted * c.hidden / BYTES_PER_US
        return {
            "layers": layers,
            "head": head,
            "between kernels": self.kernels * KERNEL_US,
            "copies, waits": self.copies * COPY_US + WAIT_US,
            "host": self.host[0] + self.sequences * self.host[1],
        }


def drafts(config: DecoderConfig) -> dict[str, Draft]:
    """Drafts of both methods at T = 0. Kernels were counted in what small drafters capture, copies
    on the tests' made-up device, the host's time was measured on a CPU."""
    few, all_ = DRAFTED, config.vocab_size
    return {
        "longspec": Draft(config, 1, 2, 5, few, kernels=297, copies=2, host=(430, 75)),
        "dspark": Draft(config, 5, 1, 1, all_, kernels=277, copies=4, host=(165, 31)),
    }


def draft_lines() -> Iterator[str]:
    """The table of drafts in Markdown, in microseconds."""
    names = list(drafts(EIGHT_BILLION)["longspec"].parts())
    yield f"| target | draft | {' | '.join(names)} | draft, ms |"
    yield f"| --- | --- |{' ---: |' * (len(names) + 1)}"
    for label, config in (("8B", EIGHT_BILLION), ("70B", SEVENTY_BILLION)):
        for name, draft in drafts(config).items():
            times = [f"{us:,.0f}" for us in draft.parts().values()]
            total = f"{sum(draft.parts().values()) / 1000:.1f}"
            yield f"| {' | '.join([label, name, *times, total])} |"


def lines() -> Iterator[str]:
    """The table in Markdown; times in microseconds, and tokens a second without drafts."""
    names = list(Step(EIGHT_BILLION, 1, 1).parts())
    head = [
        "target",
        "sequences x context",
        "GB",
        *names,
        "step, ms",
        "tokens/s",
        f"{NODES} nodes, ms",
    ]
    yield f"| {' | '.join(head)} |"
    yield f"| --- | --- |{' ---: |' * (len(names) + 4)}"
    targets = {
        f"{label}{kind and ' '}{kind}": replace(config, weights=kind or config.weights)
        for label, config in (("8B", EIGHT_BILLION), ("70B", SEVENTY_BILLION))
        for kind in ("", "fp8")
    }
    for label, config in targets.items():
        # Of longer texts the weights are a small part.
        contexts = (2 << 10,) if config.weights == "fp8" else (2 << 10, 32 << 10, 128 << 10)
        for sequences in (1, 8, 32):
            for context in contexts:
                step = Step(config, sequences, context)
                plain = sum(step.parts().values())
                drafted = sum(replace(step, rows=1 + NODES).parts().values())
                times = [f"{us:,.0f}" for us in step.parts().values()]
                rate = f"{sequences / plain * 1e6:,.0f}"
                ends = [f"{plain / 1000:.1f}", rate, f"{drafted / 1000:.1f}"]
                where = f"{sequences} x {context >> 10}k"
                size = f"{(step.weight_bytes + step.kv_bytes) / 1e9:,.0f}"
                yield f"| {' | '.join([label, where, size, *times, *ends])} |"


if __name__ == "__main__":
    print(*lines(), "", *draft_lines(), sep="\n")
