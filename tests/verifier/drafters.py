"""Drafters for tests: functions of the text that return a tree, or the steps of a free run."""

from __future__ import annotations

import random

from verifier_support import VOCAB, Drafter, Tree


def nothing(text: list[int], rng: random.Random) -> Tree:
    """No tree."""
    return [], []


def right(reference: list[int], prompt: int, depth: int = 5) -> Drafter:
    """A chain of the tokens that will be emitted."""

    def draw(text: list[int], rng: random.Random) -> Tree:
        chain = reference[len(text) - prompt :][:depth]
        return chain, list(range(-1, len(chain) - 1))

    return draw


def wrong(reference: list[int], prompt: int, depth: int = 5) -> Drafter:
    """A chain that is wrong from its first token on."""

    def draw(text: list[int], rng: random.Random) -> Tree:
        chain = [(token + 1) % VOCAB for token in reference[len(text) - prompt :][:depth]]
        return chain, list(range(-1, len(chain) - 1))

    return draw


def scattered(reference: list[int], prompt: int) -> Drafter:
    """Trees of random size that hold the right path among other nodes: accepted KV must move."""

    def draw(text: list[int], rng: random.Random) -> Tree:
        coming = reference[len(text) - prompt :][: rng.randint(0, 7)]
        tokens: list[int] = []
        parents: list[int] = []
        tip = -1
        for token in coming:
            for _ in range(rng.randint(0, 4)):
                tokens.append(rng.randrange(VOCAB))
                parents.append(rng.randrange(-1, len(parents)))
            tokens.append(token)
            parents.append(tip)
            tip = len(tokens) - 1
        return tokens, parents

    return draw


def random_tree(text: list[int], rng: random.Random) -> Tree:
    """Any tree of any size."""
    size = rng.choice((0, 1, 3, 20, 60))
    return [rng.randrange(VOCAB) for _ in range(size)], [rng.randrange(-1, i) for i in range(size)]


def every_token(text: list[int], rng: random.Random) -> Tree:
    """The whole vocabulary under the anchor, then under some of its children: 255 nodes."""
    tokens, parents = list(range(VOCAB)), [-1] * VOCAB
    while len(tokens) < 255:
        tokens.append(len(tokens) % VOCAB)
        parents.append(
            rng.randrange(len(tokens) - VOCAB, len(tokens) - 1) if rng.random() < 0.9 else -1
        )
    return tokens, parents


def duplicates(reference: list[int], prompt: int) -> Drafter:
    """Every token of the right path three times; the path continues below the last of them."""

    def draw(text: list[int], rng: random.Random) -> Tree:
        tokens: list[int] = []
        parents: list[int] = []
        tip = -1
        for token in reference[len(text) - prompt :][:4]:
            tokens += [token] * 3
            parents += [tip] * 3
            tip = len(tokens) - 1
        return tokens, parents

    return draw


def free_run(text: list[int], rng: random.Random) -> int:
    """Plain steps, a few at a time."""
    return rng.choice((1, 2, 3, 7, 40))


def mixed(*drafters: Drafter) -> Drafter:
    """Another drafter each round."""

    def draw(text: list[int], rng: random.Random) -> Tree | int:
        return rng.choice(drafters)(text, rng)

    return draw


def all_of(reference: list[int], prompt: int) -> dict[str, Drafter]:
    """One of each, for a known continuation."""
    some = {
        "right": right(reference, prompt),
        "wrong": wrong(reference, prompt),
        "scattered": scattered(reference, prompt),
        "random": random_tree,
        "every_token": every_token,
        "duplicates": duplicates(reference, prompt),
        "free_run": free_run,
    }
    return some | {"mixed": mixed(*some.values())}
