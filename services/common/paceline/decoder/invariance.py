"""Self-check of the promise that speculation changes nothing."""

from __future__ import annotations

import torch

from paceline.decoder.cache import LocalCache
from paceline.decoder.model import Decoder
from paceline.kernels import CHUNK, TreeSegment, plan_trees

_PREFIX = CHUNK - 3  # so that the tree crosses a chunk border
_PARENTS = (-1, 0, 0, 1, 1, 3, 2, 5, 7, 4, 8, 9)


def is_batch_invariant(decoder: Decoder) -> bool:
    """Whether logits have the same bits in a tree as token by token, on this machine.

    Runs a short prompt and one tree through the decoder, packed together with another sequence,
    and compares every node with its path decoded alone. Takes about twenty decode steps.
    """
    generator = torch.Generator().manual_seed(0)
    vocab = decoder.config.vocab_size
    prompt = torch.randint(vocab, (_PREFIX,), generator=generator).to(decoder.device)
    tree = torch.randint(vocab, (len(_PARENTS),), generator=generator).to(decoder.device)

    alone = LocalCache(decoder.config, decoder.device)
    step(decoder, alone, prompt, None)
    packed, other = LocalCache(decoder.config, decoder.device), LocalCache(decoder.config)
    step(decoder, packed, prompt[:100], None)
    step(decoder, packed, prompt[100:], None)
    packed.reserve(len(_PARENTS))
    segments = [TreeSegment(1, 0, None, 5), TreeSegment(0, _PREFIX, _PARENTS, len(_PARENTS))]
    logits = decoder.forward(
        torch.cat([prompt[:5], tree]),
        plan_trees(segments, device=decoder.device),
        [packed, other],
        logit_rows=None,
    ).logits[5:]
    for leaf in sorted(set(range(len(_PARENTS))) - set(_PARENTS)):
        path = [leaf]
        while _PARENTS[path[0]] >= 0:
            path.insert(0, _PARENTS[path[0]])
        for node in path:
            one = step(decoder, alone, tree[node : node + 1], None)
            if not torch.equal(one[0], logits[node]):
                return False
        alone.truncate(_PREFIX)
    return True


def step(
    decoder: Decoder, cache: LocalCache, tokens: torch.Tensor, logit_rows: torch.Tensor | None
) -> torch.Tensor:
    """Append a chain of at most ``CHUNK`` tokens and return its logits."""
    count = tokens.numel()
    cache.reserve(count)
    plan = plan_trees([TreeSegment(0, len(cache), None, count)], device=decoder.device)
    logits = decoder.forward(tokens, plan, [cache], logit_rows=logit_rows).logits
    cache.commit(range(count))
    return logits
