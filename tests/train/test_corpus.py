"""Corpora, tokenizers and batches of rows."""

import copy
from pathlib import Path

import pytest
import torch
from tiny_models import train_tokenizer

from paceline.train.batches import Batches
from paceline.train.corpus import Corpus, EncodedDocuments, encode_all, load_corpus, load_tokenizer


def test_the_split_is_disjoint_and_always_the_same(folder: Path, corpus: Corpus) -> None:
    again = load_corpus(str(folder), 6, 2)
    assert again == corpus
    trained, heldout = ({d.path for d in part} for part in (corpus.train, corpus.heldout))
    assert len(trained) == 6
    assert len(heldout) == 2
    assert not trained & heldout


def test_the_split_depends_on_names_not_on_contents(folder: Path, corpus: Corpus) -> None:
    for path in folder.rglob("*.py"):
        path.write_text(path.read_text() + "# changed\n")
    changed = load_corpus(str(folder), 6, 2)
    assert [d.path for d in changed.heldout] == [d.path for d in corpus.heldout]
    assert [d.sha256 for d in changed.heldout] != [d.sha256 for d in corpus.heldout]


def test_wide_adds_tests_and_keeps_what_is_held_out(folder: Path, corpus: Corpus) -> None:
    wide = load_corpus(str(folder), 100, 2, wide=True)
    assert wide.heldout == corpus.heldout
    assert "tests/extra.py" in {d.path for d in wide.train}
    assert not {d.path for d in wide.train} & {d.path for d in wide.heldout}


def test_the_standard_library_leaves_out_what_is_not_its_source() -> None:
    corpus = load_corpus("stdlib", 300, 12, wide=True)
    assert corpus.is_stdlib
    for document in (*corpus.train, *corpus.heldout):
        assert "site-packages" not in document.path
        assert "_sysconfigdata" not in document.path


@pytest.mark.parametrize(("data", "said"), [("nowhere", "no folder"), (".", "usable files")])
def test_a_corpus_without_files_is_refused(
    data: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=said):
        load_corpus(data, 6, 2)


def test_the_end_of_text_is_never_added(corpus: Corpus) -> None:
    tokenizer = train_tokenizer((d.text for d in corpus.train), vocabulary=320)
    encoded = encode_all(tokenizer, corpus.train)
    assert 0 not in encoded[0]
    assert list(EncodedDocuments(tokenizer, corpus.train)) == encoded


def test_a_folder_without_tokenizer_is_refused(target: Path) -> None:
    for file in target.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.*give a folder"):
        load_tokenizer(target)


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


def test_a_corpus_too_short_for_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot fill 4 rows of 512 tokens"):
        Batches(DOCUMENTS, separator=0).next(4, 512)
