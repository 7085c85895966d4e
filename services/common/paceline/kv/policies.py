"""The registry of KV selection policies. Does not import torch.

A policy chooses which positions of a cache a drafter reads under a KV budget. The verifier loads
and runs it; the drafter sends its name. Policies of other packages register a factory as an entry
point::

    [project.entry-points."paceline.kv_policies"]
    my_policy = "my_package.module:MyPolicy"
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.kv.selection import PolicyFactory

GROUP = "paceline.kv_policies"  # group of entry points
STREAMING = "streaming"
"""The default. Its positions follow from the length alone, so a drafter that maps a cache computes
them without the verifier."""

_ROWS = ("", "_all", "_last")  # rows of a verification, whose logits or weights are the scores
_SCORED = (
    "chunk_topk", "verified_pages",
    *(f"verified{rows}{scores}" for rows in _ROWS for scores in ("", "_weights")),
)  # fmt: skip
_BUILT_IN = {
    STREAMING: "paceline.kv.selection:Streaming",
    **{name: f"paceline.kv.selection:{name}" for name in _SCORED},
}


@lru_cache(maxsize=1)
def kv_policies() -> Mapping[str, EntryPoint]:
    """Return all installed policies by name. A built-in name cannot be registered again."""
    built_in = (EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items())
    return MappingProxyType(
        {entry.name: entry for entry in (*entry_points(group=GROUP), *built_in)}
    )


def load_policy(name: str) -> PolicyFactory:
    """Return the factory of a policy, ``streaming`` without a name. Raises ``ValueError``:
    no such policy is installed. Raises what importing the policy's module raises."""
    policies = kv_policies()
    if (name or STREAMING) not in policies:
        raise ValueError(
            f"KV selection policy {name!r} is not installed, expected one of "
            f"{', '.join(sorted(policies))}"
        )
    factory: PolicyFactory = policies[name or STREAMING].load()
    return factory
