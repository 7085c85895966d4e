from pathlib import Path

import pytest

from paceline.train.corpus import Corpus, load_corpus


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


def test_the_manifest_names_files_but_no_folder_of_this_machine(
    corpus: Corpus, tmp_path: Path
) -> None:
    corpus.write_manifest(tmp_path / "corpus.json")
    text = (tmp_path / "corpus.json").read_text()
    assert corpus.train[0].sha256 in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(("data", "said"), [("nowhere", "no folder"), (".", "usable files")])
def test_a_corpus_without_files_is_refused(
    data: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=said):
        load_corpus(data, 6, 2)
