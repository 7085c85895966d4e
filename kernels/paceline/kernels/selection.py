"""Which positions of a prefix a drafter gets to see under a KV budget."""

from __future__ import annotations

SINKS = 4
"""First positions, kept whatever the budget: attention leans on them (Xiao et al., "Efficient
Streaming Language Models with Attention Sinks"), and training with anchor offsets (LongSpec,
section 3.2) leaves them in their places."""


def streaming(length: int, budget: int) -> tuple[range, ...]:
    """The first ``SINKS`` positions and the newest, or all.

    Args:
        length: Positions there are.
        budget: Most positions wanted; 0 for all. At ``SINKS`` or below only the newest are kept.

    Returns:
        One or two rising ranges, none of them empty; nothing if there is no position.
    """
    if length == 0:
        return ()
    if not 0 < budget < length:
        return (range(length),)
    if budget <= SINKS:
        return (range(length - budget, length),)
    return range(SINKS), range(length - budget + SINKS, length)
