import copy

import pytest
import torch

from paceline.train.batches import Batches

DOCUMENTS = [list(range(100 * n + 1, 100 * n + 40)) for n in range(5)]


def test_rows_follow_the_stream_within_a_document() -> None:
    batches = Batches(DOCUMENTS, separator=0)
    tokens = batches.stream[batches.next(4, 16)]
    assert tokens.shape == (4, 17)
    step = tokens[:, 1:] - tokens[:, :-1]
    inside = (tokens[:, 1:] != 0) & (tokens[:, :-1] != 0)
    assert (step[inside] == 1).all()


def test_an_epoch_shows_nothing_twice_and_the_next_another_order() -> None:
    batches = Batches(DOCUMENTS, separator=0)
    rows = (len(batches.stream) - 1) // 16
    first, second = (torch.cat([batches.next(1, 16) for _ in range(rows)]) for _ in range(2))
    assert first[:, :-1].unique().numel() == first[:, :-1].numel()
    assert not torch.equal(first, second)


def test_a_sought_position_gives_the_same_batches() -> None:
    batches = Batches(DOCUMENTS, separator=0, seed=3)
    for _ in range(7):
        batches.next(2, 16)
    position = copy.copy(batches.position)
    expected = [batches.next(2, 16) for _ in range(9)] + [batches.next(1, 32) for _ in range(3)]
    other = Batches(DOCUMENTS, separator=0, seed=3)
    other.seek(position)
    found = [other.next(2, 16) for _ in range(9)] + [other.next(1, 32) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_fewer_documents_are_the_first_ones() -> None:
    batches = Batches(DOCUMENTS, separator=0)
    batches.next(2, 16)
    places = batches.next(4, 16, documents=2)
    assert batches.position.epoch == 1
    assert places.max() < 80


def test_a_corpus_too_short_for_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot fill 4 rows of 512 tokens"):
        Batches(DOCUMENTS, separator=0).next(4, 512)


def test_copied_rows_end_with_a_copy_of_earlier_tokens() -> None:
    batches = Batches([list(range(1, 2001))], separator=0, copied=1.0)
    for _ in range(30):
        row = batches.stream[batches.next(1, 64)][0].tolist()
        at = len(row) - 1 - row[::-1].index(0)
        copied = row[at + 1 :]
        assert 65 // 8 <= len(copied) <= 32
        assert any(row[i : i + len(copied)] == copied for i in range(at))
