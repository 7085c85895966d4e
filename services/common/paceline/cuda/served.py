"""Self-check that logits have the same bits in every batch and tree, by the passes that serve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.cuda.graphs import FIXED_SHAPES
from paceline.decoder import BatchInvariance
from paceline.kernels import MAX_TREE_NODES, QueryBlock

# Length that a text must be able to have for :func:`check_served`. Unit: tokens.
SERVED_TOKENS = 512
_MAX_WINDOW = 1024  # longest sliding window that :func:`check_served` passes. Unit: tokens.

# Positions that are decoded, and where trees begin: their paths cross 192 and 256.
_FIRST, _LAST, _BORDERS = 180, 268, (188, 250)
_PATH, _TREE = 12, 23  # nodes of the path that is compared, and of its tree
_PAGE = 256


class ServedForward(Protocol):
    """A pass as it is served, over the blocks of two texts, 0 and 1, that begin empty."""

    def __call__(
        self, tokens: Sequence[int], blocks: Sequence[QueryBlock], *, prompt: bool = False
    ) -> Tensor:
        """Return the logits of all rows, ``[M, V]``, in memory that the next call may overwrite;
        ``prompt``: as a step that is mostly prompts."""


def window_to_pass(windows: Iterable[int | None], max_tokens: int) -> int:
    """Return the longest window that :func:`check_served` can pass in a text of ``max_tokens``
    tokens; 0: there is none. ``windows``: of each layer, or None."""
    return max((w for w in windows if w and w <= min(_MAX_WINDOW, max_tokens - _TREE)), default=0)


def served_slots(window: int) -> tuple[int, int]:
    """Return how many slots :func:`check_served` needs of its two texts: whole pages."""
    slots = max(SERVED_TOKENS, window + _TREE)
    return -(-slots // _PAGE) * _PAGE, SERVED_TOKENS


@torch.inference_mode()
def check_served(forward: ServedForward, vocab_size: int, window: int = 0) -> BatchInvariance:
    """Check on the served model, by the passes that serve, that what is beside a row and how its
    text came to be change no bit of its logits.

    A text is decoded token by token across borders of 64 and of 256 positions, and where a window
    ends. Its rows are compared with rows of trees and chains, of each number of rows that CUDA
    graphs have, with other texts beside them, and of prompts: cut in two, and the text so far, as
    behind a resume. ``window`` is the sliding window to pass; 0 if none.
    """
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(vocab_size, (served_slots(window)[0],), generator=generator).tolist()
    other = torch.randint(vocab_size, (FIXED_SHAPES[-1],), generator=generator).tolist()

    def chain(start: int, stop: int, sequence: int = 0) -> QueryBlock:
        return QueryBlock(sequence, start, None, stop - start, final=start == 0)

    def decoded(position: int, sequence: int = 0) -> Tensor:
        at = chain(position, position + 1, sequence)
        return forward(text[position : position + 1], [at])[0].clone()

    def in_tree(start: int) -> Tensor:
        tokens, parents, path = _comb(text[start : start + _PATH], vocab_size)
        return forward(tokens, [QueryBlock(0, start, parents, len(tokens))])[path]

    prompt = forward(text[:_FIRST], [chain(0, _FIRST)], prompt=True).clone()
    plain = torch.stack([decoded(position) for position in range(_FIRST, _LAST)])

    def compare() -> Iterator[tuple[str, Tensor, Tensor]]:
        # From the last position on: what is before it is then as plain decoding has written it.
        if window > _BORDERS[-1]:  # else a tree is behind it
            yield from compare_behind(max(_LAST, window - _PATH // 2))
        for start in reversed(_BORDERS):
            border = (start // 64 + 1) * 64
            expected = plain[start - _FIRST :][:_PATH]
            yield f"a tree across position {border}", in_tree(start), expected
        for count in (9, *FIXED_SHAPES):
            compared = min(count, _LAST - _FIRST)
            beside = count - compared
            starts = range(0, beside, MAX_TREE_NODES)
            blocks = [chain(at, min(at + MAX_TREE_NODES, beside), 1) for at in starts]
            tokens = other[:beside] + text[_FIRST : _FIRST + compared]
            rows = forward(tokens, [*blocks, chain(_FIRST, _FIRST + compared)])[beside:]
            yield f"a step of {count} rows", rows, plain[:compared]
        forward(text[:100], [chain(0, 100, 1)], prompt=True)
        rows = forward(text[100:_FIRST], [chain(100, _FIRST, 1)], prompt=True)
        yield "a prompt in two parts", rows, prompt[100:]
        yield "the token behind a prompt in two parts", decoded(_FIRST, 1)[None], plain[:1]
        rows = forward(text[:220], [chain(0, 220, 1)], prompt=True)[_FIRST:]
        yield "a prompt of the text so far, as behind a resume,", rows, plain[: 220 - _FIRST]
        yield "the token behind a resume", decoded(220, 1)[None], plain[220 - _FIRST :][:1]

    def compare_behind(start: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        for at in range(_LAST, start, MAX_TREE_NODES):
            stop = min(at + MAX_TREE_NODES, start)
            forward(text[at:stop], [chain(at, stop)])
        stop = start + _PATH
        expected = torch.stack([decoded(position) for position in range(start, stop)])
        where = f"where a window of {window} ends"
        yield f"a tree {where}", in_tree(start), expected
        yield f"a step {where}", forward(text[start:stop], [chain(start, stop)]), expected
        rows = forward(text[start:stop], [chain(start, stop)], prompt=True)
        yield f"a prompt {where}", rows, expected

    differs = [name for name, rows, expected in compare() if not torch.equal(rows, expected)]
    if not differs:
        return BatchInvariance(True)
    return BatchInvariance(False, f"other bits than token by token: {'; '.join(differs)}")


def _comb(tokens: Sequence[int], vocab_size: int) -> tuple[list[int], tuple[int, ...], list[int]]:
    """Return a tree whose path has these tokens, with a wrong node before each but the first; its
    tokens, parents, and the nodes of the path."""
    drafted, parents, path = [tokens[0]], [-1], [0]
    for token in tokens[1:]:
        drafted += [(token + 5) % vocab_size, token]
        parents += [path[-1], path[-1]]
        path.append(len(drafted) - 1)
    return drafted, tuple(parents), path
