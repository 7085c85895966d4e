"""Presets of `paceline train budget`."""

from __future__ import annotations

from dataclasses import dataclass, replace

OBSERVED = 64
"""Newest tokens of a prefix whose attention chooses its chunks; prefixes are multiples of it."""

POLICIES = ("streaming", "chunk_topk")


@dataclass(frozen=True)
class BudgetPreset:
    """How a trained drafter is trained further. Lengths and budgets are in tokens.

    A step reads one row and lets the drafter continue it from `segments` positions: once with the
    full prefix visible, once with the part that a KV budget allows.
    """

    length: int
    """Of a row."""
    shortest_prefix: int
    """Continuations begin anywhere from here on."""
    continuation: int
    segments: int
    minutes: float
    steps: int
    adamw_rate: float
    muon_rate: float | None = None
    """For matrices; None: AdamW for everything, as in the paper."""
    budgets: tuple[int, ...] = (256, 512, 1024, 2048)
    weights: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)
    """How often each budget is drawn, one for each."""
    policies: tuple[str, ...] = POLICIES
    """Policies that select the visible positions, drawn evenly."""
    sparse_weight: float = 0.5
    """Lambda, the weight of the sparse-cache loss; 0: only the full-cache loss."""
    warm_up: int = 20
    """Steps in which the rates rise."""
    levels: int = 5
    """Depth of the trees drafted with a LongSpec layer: lags from 1 to this are drawn."""
    lags: int = 2
    """Lags a step, of a LongSpec layer."""
    lag_decay: float = 0.85
    """Weight of a lag relative to the one before."""
    files: int = 1_000_000
    own_texts: int = 0

    def __post_init__(self) -> None:
        if len(self.budgets) != len(self.weights) or min(self.weights) <= 0:
            raise ValueError(
                f"budgets {self.budgets} have the weights {self.weights}, expected one above 0 for "
                "each"
            )
        if min(self.budgets) < 8:
            raise ValueError(f"the budget {min(self.budgets)} is too small, expected 8 or more")
        if self.sparse_weight < 0:
            raise ValueError(f"the sparse weight is {self.sparse_weight}, expected 0 or more")
        if self.shortest_prefix % OBSERVED or not self.shortest_prefix:
            raise ValueError(
                f"the shortest prefix has {self.shortest_prefix} tokens, expected a multiple of "
                f"{OBSERVED}"
            )
        if self.shortest_prefix + self.continuation > self.length:
            raise ValueError(
                f"a prefix of {self.shortest_prefix} tokens and {self.continuation} more do not "
                f"fit a row of {self.length}"
            )

    def with_budgets(self, budgets: tuple[int, ...], weights: tuple[float, ...]) -> BudgetPreset:
        """The same for other budgets; without weights they are drawn evenly."""
        return replace(self, budgets=budgets, weights=weights or (1.0,) * len(budgets))


PRESETS: dict[str, BudgetPreset] = {
    # For the demo pair on one CPU core: its context is a quarter of the paper's, so budgets and
    # continuation are as well.
    "cpu": BudgetPreset(
        length=4096, shortest_prefix=1024, continuation=64, segments=24,
        minutes=12, steps=5000, muon_rate=2.5e-3, adamw_rate=4e-4, warm_up=8,
        budgets=(64, 128, 256, 512, 1024, 2048), weights=(0.3, 0.2, 0.2, 0.15, 0.1, 0.05),
        files=400, own_texts=1536,
    ),
    # The paper's (section 3.5).
    "paper": BudgetPreset(
        length=16_384, shortest_prefix=16_128, continuation=256, segments=1,
        minutes=5 * 60, steps=5000, adamw_rate=1e-5, policies=("chunk_topk",), warm_up=150,
    ),
}  # fmt: skip
