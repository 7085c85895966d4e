"""Drafters for tests: functions of the text that return a tree."""

import random

from fakes.exchange import Drafter
from verifier_support import VOCAB

from paceline.tree import EMPTY, TokenTree


def nothing(text: list[int], rng: random.Random) -> TokenTree:
    """No tree."""
    return EMPTY


def right(reference: list[int], prompt: int, depth: int = 5) -> Drafter:
    return lambda text, rng: TokenTree.chain(reference[len(text) - prompt :][:depth])


def wrong(reference: list[int], prompt: int, depth: int = 5) -> Drafter:
    """A chain that is wrong from its first token on."""
    others = [(token + 1) % VOCAB for token in reference]
    return right(others, prompt, depth)


def scattered(reference: list[int], prompt: int) -> Drafter:
    """Trees of random size that hold the right path among other nodes: accepted KV must move."""

    def draw(text: list[int], rng: random.Random) -> TokenTree:
        tokens: list[int] = []
        parents: list[int] = []
        tip = -1
        for token in reference[len(text) - prompt :][: rng.randint(0, 7)]:
            for _ in range(rng.randint(0, 4)):
                tokens.append(rng.randrange(VOCAB))
                parents.append(rng.randrange(-1, len(parents)))
            tokens.append(token)
            parents.append(tip)
            tip = len(tokens) - 1
        return TokenTree(tuple(tokens), tuple(parents))

    return draw


def random_tree(text: list[int], rng: random.Random) -> TokenTree:
    size = rng.choice((0, 1, 3, 20, 60))
    tokens = tuple(rng.randrange(VOCAB) for _ in range(size))
    return TokenTree(tokens, tuple(rng.randrange(-1, node) for node in range(size)))


def every_token(text: list[int], rng: random.Random) -> TokenTree:
    """The whole vocabulary under the anchor, then under some of its children: 255 nodes."""
    parents = [-1] * VOCAB
    while len(parents) < 255:
        below = rng.randrange(len(parents) - VOCAB + 1, len(parents))
        parents.append(below if rng.random() < 0.9 else -1)
    return TokenTree(tuple(node % VOCAB for node in range(255)), tuple(parents))


def duplicates(reference: list[int], prompt: int) -> Drafter:
    """Every token of the right path three times; the path continues below the last of them."""

    def draw(text: list[int], rng: random.Random) -> TokenTree:
        path = reference[len(text) - prompt :][:4]
        parents = [3 * depth - 1 for depth in range(len(path)) for _ in range(3)]
        return TokenTree(tuple(token for token in path for _ in range(3)), tuple(parents))

    return draw


def mixed(*drafters: Drafter) -> Drafter:
    return lambda text, rng: rng.choice(drafters)(text, rng)


def all_of(reference: list[int], prompt: int) -> dict[str, Drafter]:
    some = {
        "right": right(reference, prompt), "wrong": wrong(reference, prompt),
        "scattered": scattered(reference, prompt), "random": random_tree,
        "every_token": every_token, "duplicates": duplicates(reference, prompt), "nothing": nothing,
    }  # fmt: skip
    return some | {"mixed": mixed(*some.values())}
