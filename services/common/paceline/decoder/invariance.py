"""Self-check of the promise that speculation changes nothing."""

from __future__ import annotations

import torch

from paceline.decoder.cache import LocalCache
from paceline.decoder.linear import Linear
from paceline.decoder.model import Decoder
from paceline.kernels import CHUNK, TreeSegment, plan_trees

_PREFIX = CHUNK - 3  # so that the tree crosses a chunk border
_ROWS = (1, 2, 3, 5, 8, 16, 33)  # of a linear layer, against all of
_ALL_ROWS = 48
_PARENTS = (-1, 0, 0, 1, 1, 3, 2, 5, 7, 4, 8, 9)


def is_batch_invariant(decoder: Decoder) -> bool:
    """Whether logits have the same bits in a tree as token by token, on this machine.

    First every kind of linear layer, with several numbers of rows: where a product is split another
    way, few values change, and few of those reach a logit. Then a short prompt and one tree through
    the decoder, packed together with another sequence, where every node is compared with its path
    decoded alone. One layer of each sliding window stands for all of them.
    """
    if not all(_rows_are_independent(layer, decoder) for layer in decoder.linears()):
        return False
    windows = decoder.config.windows
    decoder = decoder.with_layers([windows.index(window) for window in dict.fromkeys(windows)])
    generator = torch.Generator().manual_seed(0)
    vocab = decoder.config.vocab_size
    prompt = torch.randint(vocab, (_PREFIX,), generator=generator).to(decoder.device)
    tree = torch.randint(vocab, (len(_PARENTS),), generator=generator).to(decoder.device)

    packed, other, alone = (LocalCache(decoder.config, decoder.device) for _ in range(3))
    _append(decoder, alone, prompt)
    _append(decoder, packed, prompt[:100])
    _append(decoder, packed, prompt[100:])
    segments = [TreeSegment(1, 0, None, 5), TreeSegment(0, _PREFIX, _PARENTS, len(_PARENTS))]
    packed.reserve(len(_PARENTS))
    together = decoder.forward(
        torch.cat([prompt[:5], tree]),
        plan_trees(segments, device=decoder.device),
        [packed, other],
        logit_rows=None,
    ).logits[5:]
    for leaf in sorted(set(range(len(_PARENTS))) - set(_PARENTS)):
        for node in _path(leaf):
            logits = _append(decoder, alone, tree[node : node + 1])
            if not torch.equal(logits[0], together[node]):
                return False
        alone.truncate(_PREFIX)
    return True


def _rows_are_independent(layer: Linear, decoder: Decoder) -> bool:
    generator = torch.Generator().manual_seed(layer.in_features)
    x = torch.randn(_ALL_ROWS, layer.in_features, generator=generator)
    x = x.to(decoder.device, decoder.config.dtype)
    with torch.inference_mode():
        together = layer(x)
        return all(
            torch.equal(layer(x[start : start + rows]), together[start : start + rows])
            for rows in _ROWS
            for start in (0, 7, 15)
        )


def _path(leaf: int) -> list[int]:
    path = [leaf]
    while _PARENTS[path[0]] >= 0:
        path.insert(0, _PARENTS[path[0]])
    return path


def _append(decoder: Decoder, cache: LocalCache, tokens: torch.Tensor) -> torch.Tensor:
    """Append a chain of tokens and return the logits of the last."""
    count = tokens.numel()
    cache.reserve(count)
    plan = plan_trees([TreeSegment(0, len(cache), None, count)], device=decoder.device)
    last = torch.tensor([count - 1], device=decoder.device)
    logits = decoder.forward(tokens, plan, [cache], logit_rows=last).logits
    cache.commit(range(count))
    return logits
