"""The Draft stream."""

from __future__ import annotations

from .conftest import Drafting

TEXT = [5, 6, 7, 8, 9, 10, 11, 1, 2, 5, 6, 7]


async def test_a_round_goes_there_and_back(ngram: Drafting) -> None:
    stream = await ngram.attach(TEXT)
    assert stream.attached.drafter == "ngram"
    assert stream.attached.version == "1"
    assert stream.attached.method == "ngram"
    tree = await stream.round()
    assert list(tree.tree.tokens)[:4] == [8, 9, 10, 11]
    assert tree.round_id == 1
    assert tree.version == "1"
    tree = await stream.round([8, 9, 999])
    assert list(tree.tree.tokens) == []
    await stream.end()
