"""Accepted lengths survive what happens to caches: the drafts after it are those of a text to which
nothing happened."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from system_support import EAGER, THREADS, wait_joined, write_drafters

from paceline.cli.main import main
from paceline.client import Client, GenerationResult, VerifiedTree
from paceline.harness import ServiceProcess

TOKENS, EVENT = 128, 32
PROMPT = [5, 9, 2, 77, 31, 8, 40, 3] * 20
# Few likely tokens, so that drafters of random weights are sometimes right too.
BIAS = {3: 6.0, 7: 6.0, 11: 6.0, 40: 6.0}
METHODS = {
    "lm": "lm:{small}",
    "longspec": "longspec:{longspec},target={target},context=20",
    "dspark": "dspark:{dspark},target={target}",
    "eagle3": "eagle3:{eagle3},target={target}",
    "ngram": "ngram",
}
# Drafters that learn how often their guesses in a text are right: after a loss they learn anew, so
# a tree may have other nodes, but as many are accepted.
LEARNS = ("ngram",)


@dataclass
class Services:
    """Two verifiers and a drafter service, at addresses that they keep after a restart."""

    verifiers: list[ServiceProcess]
    drafter: ServiceProcess
    folders: dict[str, Path]

    @property
    def addresses(self) -> str:
        return ",".join(each.address for each in self.verifiers)

    def swap(self) -> None:
        """Replace each drafter by another version of the same weights."""
        words = {name: spec.format(**self.folders) for name, spec in METHODS.items()}
        for name, spec in words.items():
            method, *options = spec.split(",")
            kind, _, folder = method.partition(":")
            given = [f"--option={each}" for each in options]
            where = ["--address", self.drafter.address]
            load = [name, kind, *filter(None, [folder]), *given, "--activate"]
            assert main(["drafters", "load", *where, *load]) == 0
            assert main(["drafters", "unload", *where, name, "1"]) == 0


@pytest.fixture
def services(models: dict[str, Path], sockets: Path, tmp_path: Path) -> Iterator[Services]:
    target = models["llama"]
    folders = {
        "target": target,
        "small": models["small"],
        **write_drafters(target, tmp_path),
    }
    arguments = ["--target", str(target), "--weights", "float32", "--schedule", "off"]
    arguments += ["--sources", "none"]  # trees of the drafters alone
    places = [f"unix:{sockets}/kept{number}" for number in range(2)]
    verifiers = [
        ServiceProcess("verifier", arguments, address=place, environment=THREADS)
        for place in places
    ]
    loads = [f"--load={name}={spec.format(**folders)}" for name, spec in METHODS.items()]
    loads += [f"--verifier={place}" for place in places]
    where = f"unix:{sockets}/kept-drafter"
    drafter = ServiceProcess("drafter", loads, address=where, environment=THREADS)
    with ExitStack() as stack:
        for process in (*verifiers, drafter):
            stack.callback(process.stop)
            process.spawn()
        for process in (*verifiers, drafter):
            process.wait_ready()
        yield Services(verifiers, drafter, folders)


@dataclass
class Text:
    """A generation, and what was drafted at each position."""

    result: GenerationResult
    trees: dict[int, VerifiedTree] = field(default_factory=dict)

    def accepted(self, first: int) -> float:
        """Accepted tokens a drafted round from a position on."""
        found = [len(tree.accepted) for at, tree in self.trees.items() if at >= first]
        assert len(found) >= 3, "there are too few rounds to judge"
        return sum(found) / len(found)


async def write(
    client: Client, name: str, barrier: asyncio.Barrier | None = None, act: Any = None
) -> Text:
    """Write the text with a drafter. Where there is a barrier, all texts meet in their middle, and
    go on after one has acted."""
    generation = client.generate(
        PROMPT, max_new_tokens=TOKENS, temperature=0.0, seed=1, drafter=name, isolated=True,
        ignore_eos=True, user=name, logit_bias=BIAS,
    )  # fmt: skip
    trees: dict[int, VerifiedTree] = {}
    position = 0
    async for chunk in generation:
        if chunk.tree is not None:
            trees[position] = chunk.tree
        position += len(chunk.token_ids)
        if barrier is not None and position >= EVENT:
            if await barrier.wait() == 0:
                await asyncio.to_thread(act)
            await barrier.wait()
            barrier = None
    assert barrier is None
    return Text(await generation, trees)


async def write_all(services: Services, act: Callable[[Client], None] | None) -> dict[str, Text]:
    barrier = None if act is None else asyncio.Barrier(len(METHODS))
    address = services.verifiers[0].address
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(address, drafting=EAGER, unread_chunks=2))
        await client.model()
        acting = None if act is None else partial(act, client)
        texts = [write(client, name, barrier, acting) for name in METHODS]
        return dict(zip(METHODS, await asyncio.gather(*texts), strict=True))


def compare(
    name: str, before: dict[str, Text], after: dict[str, Text], first: int, *, restarted: bool
) -> None:
    """The drafts of texts from a position on are those of the texts before."""
    for drafter in METHODS:
        one, two = before[drafter], after[drafter]
        assert two.result.token_ids == one.result.token_ids
        lengths = [round(each.accepted(first), 3) for each in (one, two)]
        print(f"{name}: {drafter} accepts {lengths[1]} of {lengths[0]} tokens a round")
        if drafter in LEARNS and restarted:
            assert lengths[1] >= 0.8 * lengths[0], drafter
            continue
        common = {at for at in one.trees.keys() & two.trees.keys() if at >= first}
        assert len(common) >= 3
        for at in common:
            assert one.trees[at] == two.trees[at], (drafter, at)
    assert sum(after[each].accepted(first) for each in LEARNS) > 2, "the text repeats itself"


@pytest.mark.slow
async def test_drafts_are_the_same_whatever_happens_to_caches(services: Services) -> None:
    """A prompt from the prefix cache, a long pause, another version, a restart, a move."""
    drafter, (first, second) = services.drafter, services.verifiers
    fresh = await write_all(services, None)
    assert not any(each.result.usage.reused_tokens for each in fresh.values())

    cached = await write_all(services, None)
    reused = {name: each.result.usage.reused_tokens for name, each in cached.items()}
    assert min(reused.values()) > len(PROMPT) // 2, reused
    compare("prefix cache", fresh, cached, 1, restarted=False)

    paused = await write_all(services, lambda _: sleep(2.0))
    compare("long pause", fresh, paused, EVENT, restarted=False)

    swapped = await write_all(services, lambda _: services.swap())
    for name in METHODS:
        versions = swapped[name].result.stats.drafter_versions
        assert versions == [f"{name}@1", f"{name}@2"], "it went on with another version"
    compare("another version", fresh, swapped, EVENT + 16, restarted=True)

    def restart(_: Client) -> None:
        drafter.kill()
        drafter.start()
        wait_joined(first.address)

    restarted = await write_all(services, restart)
    compare("drafter restarted", fresh, restarted, EVENT + 16, restarted=True)

    def move(client: Client) -> None:
        client.set_verifiers(services.addresses)
        first.kill()

    moved = await write_all(services, move)
    for text in moved.values():
        assert text.result.stats.verifiers == [first.address, second.address]
    compare("another verifier", fresh, moved, EVENT + 16, restarted=True)
