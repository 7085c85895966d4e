"""Streams of an unloaded version move to the version that replaces it."""

from __future__ import annotations

import pytest

from .conftest import drafting
from .test_registry_servicer import listed, load, unload


@pytest.mark.parametrize(
    ("attach", "options"),
    [
        ({"version": "1"}, {}),
        ({}, {"tokenizer": "b"}),
        ({}, {"target": "b"}),
        ({}, {"hidden": "1"}),
        ({}, {"kv": "0"}),
        ({}, {"vocab": "3"}),
    ],
    ids=["pinned", "tokenizer", "target", "hidden states", "kv", "vocabulary"],
)
async def test_a_stream_stays_if_the_other_version_does_not_fit(
    attach: dict[str, str], options: dict[str, str]
) -> None:
    """The old version is freed when the stream ends."""
    async with drafting("x=fake") as service:
        stream = await service.attach([1, 9], **{"tokenizer_digest": "a", **attach})
        await load(service, "x", "fake", activate=True, options=options)
        assert await unload(service, "x", "1") is False
        for token in (4, 5):
            assert (await stream.round([token])).version == "1"
        await stream.end()
        assert [version[1] for version in await listed(service)] == ["2"]


async def test_streams_of_the_last_version_stay_until_another_is_loaded() -> None:
    async with drafting("x=fake") as service:
        stream = await service.attach([1])
        assert await unload(service, "x") is False
        assert (await stream.round([2])).version == "1"
        await load(service, "x", "fake")
        assert (await stream.round([3])).version == "2"
        await stream.end()
