"""Routing, numbering and release of versions, and drafter specifications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafter import DrafterSpec, LoadError
from paceline.drafter.kv import KvOptions
from paceline.drafter.methods.base import Drafter, Needs, Resources
from paceline.drafter.registry import Loader, Registry
from paceline.drafter.spec import Roots
from paceline.service import ServiceError


class Disposed(list[Drafter]):
    """Drafters that were freed, each at most once."""

    def __call__(self, drafter: Drafter) -> None:
        assert drafter not in self
        self.append(drafter)


@pytest.fixture
def disposed() -> Disposed:
    return Disposed()


@pytest.fixture
async def registry(disposed: Disposed) -> AsyncIterator[Registry]:
    made = Registry(Loader(Roots([]), Resources()), disposed)
    yield made
    made.close()


def spec(text: str, version: str = "") -> DrafterSpec:
    parsed = DrafterSpec.parse(text)
    return DrafterSpec(parsed.name, parsed.method, parsed.folder, parsed.options, version)


def shares(registry: Registry, name: str) -> dict[str, float]:
    return {v.version: round(v.share, 6) for v in registry.versions() if v.spec.name == name}


def refused(reason: str, call: Callable[[], object]) -> str:
    with pytest.raises(ServiceError) as error:
        call()
    assert error.value.reason == reason
    return error.value.message


def end() -> None:
    pytest.fail("the stream was ended")


async def test_versions_are_numbered_or_named(registry: Registry) -> None:
    loaded = [await registry.load(spec("x=fake", version)) for version in ("", "2", "", "beta")]
    assert [v.version for v in loaded] == ["1", "2", "3", "beta"]
    with pytest.raises(ServiceError, match="already"):
        await registry.load(spec("x=fake", "beta"))
    registry.unload("x", "3")
    assert (await registry.load(spec("x=fake"))).version == "4"


async def test_the_number_of_versions_is_limited(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.drafter.registry.MAX_VERSIONS", 2)
    await registry.load(spec("x=fake"))
    await registry.load(spec("y=fake"))
    with pytest.raises(ServiceError, match="unload one first"):
        await registry.load(spec("x=fake"))
    registry.unload("y")
    await registry.load(spec("x=fake"))


async def test_the_rest_of_a_share_stays_with_the_other_active_version(registry: Registry) -> None:
    for _ in range(3):
        await registry.load(spec("x=fake"))
    assert shares(registry, "x") == {"1": 1.0, "2": 0.0, "3": 0.0}
    registry.activate("x", "2", 0.25)
    assert shares(registry, "x") == {"1": 0.75, "2": 0.25, "3": 0.0}
    registry.activate("x", "3", 0.5)
    assert shares(registry, "x") == {"1": 0.5, "2": 0.0, "3": 0.5}
    registry.activate("x", "3", 1.0)
    assert shares(registry, "x") == {"1": 0.0, "2": 0.0, "3": 1.0}
    refused("NO_OTHER_VERSION", lambda: registry.activate("x", "3", 0.5))
    await registry.load(spec("x=fake"), activate=True)
    registry.activate("x", "1", 0.25)
    assert shares(registry, "x") == {"1": 0.25, "2": 0.0, "3": 0.0, "4": 0.75}
    registry.unload("x", "4")
    assert shares(registry, "x") == {"1": 1.0, "2": 0.0, "3": 0.0}


async def test_a_failed_load_uses_no_number(registry: Registry) -> None:
    with pytest.raises(LoadError, match="'x': out of luck"):
        await registry.load(spec("x=fake,fail=out of luck"))
    assert registry.versions() == []
    assert (await registry.load(spec("x=fake"))).version == "1"


async def test_a_rollback_restores_the_shares_before_the_last_activation(
    registry: Registry,
) -> None:
    for _ in range(3):
        await registry.load(spec("x=fake"))
    refused("NO_PREVIOUS_VERSION", lambda: registry.rollback("x"))
    refused("DRAFTER_NOT_FOUND", lambda: registry.rollback("y"))
    registry.activate("x", "2", 0.25)
    registry.activate("x", "3", 1.0)
    registry.activate("x", "3", 1.0)  # changes nothing
    assert [v.version for v in registry.rollback("x")] == ["1", "2"]
    assert shares(registry, "x") == {"1": 0.75, "2": 0.25, "3": 0.0}
    registry.rollback("x")
    assert shares(registry, "x") == {"1": 0.0, "2": 0.0, "3": 1.0}
    registry.unload("x", "1")
    registry.rollback("x")
    assert shares(registry, "x") == {"2": 1.0, "3": 0.0}
    registry.unload("x", "3")
    refused("NO_PREVIOUS_VERSION", lambda: registry.rollback("x"))


async def test_replaced_versions_are_unloaded_when_memory_is_needed(
    registry: Registry, disposed: Disposed
) -> None:
    old, kept, new = [await registry.load(spec("x=fake"), activate=True) for _ in range(3)]
    unused = await registry.load(spec("x=fake"))
    full = spec("x=fake,fail=memory")
    registry.attach(kept, end)
    with pytest.raises(LoadError, match="does not fit into memory"):
        await registry.load(full)
    assert disposed == [old.drafter], "the others have a stream, a share, or were never replaced"
    registry.detach(kept, end)
    with pytest.raises(LoadError, match="does not fit into memory"):
        await registry.load(full)
    assert registry.versions() == [new, unused]


async def test_wrong_activations_are_refused(registry: Registry) -> None:
    await registry.load(spec("x=fake"))
    for share in (0.0, -1.0, 1.5, float("nan")):
        refused("INVALID_SHARE", lambda share=share: registry.activate("x", "1", share))
    assert "loaded are: x 1" in refused(
        "DRAFTER_NOT_FOUND", lambda: registry.activate("x", "9", 1.0)
    )
    refused("DRAFTER_NOT_FOUND", lambda: registry.activate("y", "1", 1.0))
    refused("DRAFTER_NOT_FOUND", lambda: registry.unload("y"))
    refused("DRAFTER_NOT_FOUND", lambda: registry.choose("y"))
    refused("DRAFTER_NOT_FOUND", lambda: registry.choose("x", "9"))


@settings(max_examples=8)
@given(share=st.floats(0.01, 0.99))
def test_shares_are_kept_exactly(share: float) -> None:
    """After any number of texts."""

    async def chosen() -> list[str]:
        registry = Registry(Loader(Roots([]), Resources()), lambda _: None)
        try:
            await registry.load(spec("x=fake"))
            await registry.load(spec("x=fake"))
            registry.activate("x", "2", share)
            return [registry.choose("x").version for _ in range(60)]
        finally:
            registry.close()

    new = accumulate(version == "2" for version in asyncio.run(chosen()))
    assert all(abs(found - share * count) <= 1.0 for count, found in enumerate(new, 1))


async def test_a_version_that_is_taken_out_gives_its_share_to_the_others(
    registry: Registry,
) -> None:
    old, new = [await registry.load(spec("x=fake")) for _ in range(2)]
    registry.take_out(old, "alone")
    assert (shares(registry, "x"), old.failing) == ({"1": 1.0, "2": 0.0}, "")
    registry.activate("x", "2", 0.25)
    registry.take_out(new, "broken")
    registry.take_out(new, "broken again")
    assert (shares(registry, "x"), new.failing) == ({"1": 1.0, "2": 0.0}, "broken")
    assert registry.replacement(new)
    assert not registry.replacement(old)
    registry.unload("x", "1")
    assert (shares(registry, "x"), new.failing) == ({"2": 1.0}, "")


@pytest.mark.parametrize(
    ("policy", "budget"), [("verified", 64), ("verified", 0), ("streaming", 64)]
)
async def test_a_policy_that_scores_positions_is_announced(
    registry: Registry, policy: str, budget: int
) -> None:
    version = await registry.load(spec("x=fake"))
    options = KvOptions(kv_policy=policy)
    version.drafter.needs = Needs(kv_layers=(0, -1), kv_options=options, kv_budget=budget)
    scored = policy == "verified" and budget > 0
    info = version.info()
    assert (info.kv_policy, list(info.scored_layers)) == (
        ("verified", [0, -1]) if scored else ("", [])
    )


async def test_unloading_waits_for_streams(registry: Registry, disposed: Disposed) -> None:
    version = await registry.load(spec("x=fake"))
    await registry.load(spec("x=fake"))
    registry.attach(registry.choose("x"), end)
    assert registry.unload("x", "1") is False
    assert version.info().draining
    assert shares(registry, "x") == {"1": 0.0, "2": 1.0}
    assert registry.choose("x").version == "2"
    assert "unloaded" in refused("DRAFTER_DRAINING", lambda: registry.choose("x", "1"))
    refused("DRAINING", lambda: registry.activate("x", "1", 1.0))
    assert disposed == []
    registry.detach(version, end)
    assert disposed == [version.drafter]
    registry.attach(registry.choose("x"), end)
    registry.unload("x")
    refused("DRAFTER_DRAINING", lambda: registry.choose("x"))
    registry.detach(registry.versions()[0], end)
    refused("DRAFTER_NOT_FOUND", lambda: registry.choose("x"))
    assert len(disposed) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram", ("ngram", "ngram", None, {})),
        ("fast=ngram,max_n=4", ("fast", "ngram", None, {"max_n": "4"})),
        ("lm:/a/b", ("lm", "lm", Path("/a/b"), {})),
        ("x=lm:/a,b,widths=4,4,2,max_nodes=9",
         ("x", "lm", Path("/a,b"), {"widths": "4,4,2", "max_nodes": "9"})),
        ("x=replay:/r.jsonl,p=0.5", ("x", "replay", Path("/r.jsonl"), {"p": "0.5"})),
    ],
)  # fmt: skip
def test_specs_are_read(text: str, expected: tuple[str, str, Path | None, dict[str, str]]) -> None:
    parsed = DrafterSpec.parse(text)
    assert (parsed.name, parsed.method, parsed.folder, parsed.options) == expected


@pytest.mark.parametrize(
    "text",
    ["", "none=ngram", "a b=ngram", "=ngram", "x=", "-x=ngram", "x=ngram,a=1,a=2", "é=ngram"],
)
def test_wrong_specs_are_refused(text: str) -> None:
    with pytest.raises(LoadError):
        DrafterSpec.parse(text)
