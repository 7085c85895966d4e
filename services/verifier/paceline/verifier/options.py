"""What a verifier can be told at start."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.verifier.messages import MAX_TREE_NODES

SCHEDULES = ("off", "auto", "profile")


@dataclass(frozen=True)
class VerifierOptions:
    """Checked options of one verifier.

    Raises:
        ValueError: An option is out of range.
    """

    dtype: str = "auto"
    """float32, bfloat16, or auto for what the model folder names."""
    kv_bytes: int | None = None
    """Memory for all KV caches, each counted at its largest; None: half of what is free."""
    max_context: int | None = None
    """Longest text, prompt and output; None: as the model was made for. Unit: tokens."""
    lease_seconds: float = 30.0
    """How long a cache lives without a round or a renewal."""
    max_sequences: int = 256
    """Most caches at once."""
    step_token_limit: int = 2048
    """Most tokens of rounds in one forward pass; further rounds wait for the next one."""
    prefill_token_limit: int = 512
    """Most tokens of prompts in one forward pass, so that rounds go on beside a long prompt."""
    node_budget: int = MAX_TREE_NODES
    """Drafted nodes that clients are told to send in a round at most."""
    schedule: str = "auto"
    """auto cuts trees to what is worth checking under the load, by a table of step times measured
    at the first start with a model and kept, and lets generations draft only where it pays; profile
    measures that table again; off checks every node that comes, as a GPU does in any case."""
    threads: int | None = None
    """Threads of one operation; None: torch's choice."""
    device: str = "cpu"
    """Where the model runs and its KV lies: cpu, cuda, cuda:N, or auto for the first GPU where
    there is one and weights are not shared, and the CPU elsewhere."""
    paged_kv: bool = False
    """Whether KV lies in pages of one pool on the CPU too, as it always does on a GPU. Drafters
    cannot map it there. For tests."""
    share_weights: bool = False
    """Keep the packed weights in /dev/shm, where drafters of the same model map them."""

    def __post_init__(self) -> None:
        positive = ("lease_seconds", "max_sequences", "step_token_limit", "prefill_token_limit")
        for name in (*positive, "kv_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, expected a finite number above 0")
        if not 0 <= self.node_budget <= MAX_TREE_NODES:
            raise ValueError(f"node_budget is {self.node_budget}, expected 0 to {MAX_TREE_NODES}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}, expected {', '.join(SCHEDULES)}")
        if self.share_weights and self.device not in ("auto", "cpu"):
            raise ValueError(
                f"weights are shared in main memory, and device is {self.device!r}; expected auto "
                "or cpu"
            )
