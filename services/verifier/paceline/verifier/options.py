"""Options of a verifier."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.tree import MAX_NODES

SCHEDULES = ("off", "auto", "profile")
NUMERICS = ("auto", "portable")


@dataclass(frozen=True)
class VerifierOptions:
    """Checked options of one verifier.

    Raises:
        ValueError: An option is out of range.
    """

    weights: str = "auto"
    """Format of the weights: float32, bfloat16, int8 and int4 (quantised in blocks of 32), or auto:
    as they are stored."""
    numerics: str = "auto"
    """How bfloat16 weights and caches are multiplied on the CPU. portable: the same tokens and
    log-probabilities on every x86-64 and ARM processor. auto: the fastest way, which on processors
    with AMX has bits of its own. Quantised weights are always portable."""
    kv_cache_dtype: str = "auto"
    """Type of keys and values: float32, bfloat16, int8 with a scale for each position and head, or
    auto: that of hidden states. Others than auto are supported on the CPU."""
    kv_bytes: int | None = None
    """Memory for all KV caches; None: a share of what is free. It also bounds the context."""
    max_context: int | None = None
    """Most tokens of prompt and output together; None: the model's own limit."""
    prefix_caching: bool = True
    """Keep the KV of ended texts while there is memory, for prompts of the same client that begin
    in the same way."""
    lease_seconds: float = 30.0
    """Lifetime of a cache without a round or a renewal."""
    max_sequences: int = 256
    """Most caches at once."""
    step_token_limit: int = 2048
    """Most tokens of rounds in one forward pass; further rounds wait for the next one."""
    prefill_token_limit: int = 512
    """Most tokens of prompts in one forward pass, so that a long prompt does not hold up rounds."""
    node_budget: int = MAX_NODES
    """Most drafted nodes that clients are to send in a round."""
    schedule: str = "auto"
    """auto: verify the nodes that raise tokens per second under the current load, and have
    generations draft only where it pays, from a table of step times that is measured at the first
    start with a model and kept. profile: the same, and measure the table again. off: verify every
    node; a GPU always does."""
    threads: int | None = None
    """Threads of one operation; None: PyTorch's setting."""
    device: str = "cpu"
    """Device of the model and its KV: cpu, cuda, cuda:N, or auto. auto is the first GPU if there is
    one and weights are not shared, and otherwise the CPU."""
    paged_kv: bool = False
    """Keep KV in pages of one pool on the CPU too, as always on a GPU. Drafters cannot map it
    there. For tests."""
    share_weights: bool = False
    """Keep the packed weights in /dev/shm, so that drafters of the same model can map them."""

    def __post_init__(self) -> None:
        positive = ("lease_seconds", "max_sequences", "step_token_limit", "prefill_token_limit")
        for name in (*positive, "kv_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, expected a finite number above 0")
        if not 0 <= self.node_budget <= MAX_NODES:
            raise ValueError(f"node_budget is {self.node_budget}, expected 0 to {MAX_NODES}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}, expected {', '.join(SCHEDULES)}")
        if self.numerics not in NUMERICS:
            raise ValueError(f"numerics is {self.numerics!r}, expected {', '.join(NUMERICS)}")
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
