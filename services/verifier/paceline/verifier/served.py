"""Whether the steps of a verifier on a GPU keep the bits of rows, by the passes that serve."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.cuda.graphs import GraphRunner
from paceline.cuda.kernels import why_bits_vary
from paceline.cuda.served import SERVED_TOKENS, check_served, served_slots, window_to_pass
from paceline.decoder import BatchInvariance, Decoder
from paceline.kernels import MAX_TREE_NODES, QueryBlock, plan_trees, send
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.kv.pool import PAGE_TOKENS, PagedKv, PagePool


def check_steps(decoder: Decoder, graphs: GraphRunner | None, pool: PagePool) -> BatchInvariance:
    """Check whether the steps of a model on a GPU keep the bits of rows, on the thread that runs
    them, while no text is served."""
    if decoder.products is None:
        return BatchInvariance(
            False,
            "numerics are 'fast': products add up in an order that depends on their rows; use "
            "--numerics auto if texts must not depend on drafts",
        )
    if differs := why_bits_vary(decoder.device) or decoder.products.differs:
        return BatchInvariance(False, differs)
    config = decoder.config
    if config.max_position < SERVED_TOKENS:
        return BatchInvariance(False, "the model's texts are too short for the check")
    longest = min(config.max_position, pool.tables.shape[1] * PAGE_TOKENS)
    window = window_to_pass(config.windows, longest)
    try:
        caches = [pool.allocate(slots, None) for slots in served_slots(window)]
    except OutOfMemory as error:
        return BatchInvariance(False, f"there is no memory to check it: {error}")

    def forward(
        tokens: Sequence[int], blocks: Sequence[QueryBlock], *, prompt: bool = False
    ) -> Tensor:
        if graphs is not None and not prompt:
            rows = [cache.row for cache in caches]
            if (replayed := graphs.forward(tokens, blocks, rows)) is not None:
                return replayed.logits
        plan = plan_trees(blocks, device=decoder.device)
        packed = send(torch.tensor(tokens), decoder.device)
        return decoder.forward(packed, plan, caches, logit_rows=None).logits

    try:
        for cache in caches:
            cache.reserve(cache.capacity)
        return check_served(forward, config.vocab_size, window)
    except OutOfMemory as error:
        return BatchInvariance(False, f"there is no memory to check it: {error}")
    finally:
        for cache in caches:
            cache.close()


def check_states(
    decoder: Decoder, graphs: GraphRunner, cache: PagedKv, layers: tuple[int, ...], rows: int
) -> str:
    """Check what the graph that returns hidden states changes, for a step of so many rows, on the
    thread that runs steps, between two of them.

    Its logits are compared with the logits of the graph without, which :func:`check_steps` has
    compared, and its hidden states, outputs of ``layers``, with a pass kernel by kernel, over a
    ``cache`` that serves no text and has as many slots. Return what differs; empty if nothing.
    """
    tokens = [token % decoder.config.vocab_size for token in range(rows)]
    starts = range(0, rows, MAX_TREE_NODES)
    blocks = [QueryBlock(0, at, None, min(MAX_TREE_NODES, rows - at)) for at in starts]
    without = graphs.forward(tokens, blocks, [cache.row])
    expected = None if without is None else without.logits.clone()
    with_states = graphs.forward(tokens, blocks, [cache.row], layers)
    if expected is None or with_states is None:
        return ""  # steps of so many rows run kernel by kernel
    plan = plan_trees(blocks, device=decoder.device)
    packed = send(torch.tensor(tokens), decoder.device)
    plain = decoder.forward(packed, plan, [cache], logit_rows=None, taps=layers)
    same = zip((with_states.logits, *with_states.taps), (expected, *plain.taps), strict=True)
    if all(torch.equal(*pair) for pair in same):
        return ""
    return f"a step of {rows} rows has other bits where hidden states are recorded"
