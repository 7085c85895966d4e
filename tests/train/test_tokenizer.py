from pathlib import Path

import pytest

from paceline.train.corpus import END_OF_TEXT, Corpus, encode_all, load_tokenizer, train_tokenizer

TEXTS = ["def f(x):\n\treturn  x\n", "naïve — 東京 🚴\r\n", " \n\n  leading", "", "\x00\x7f"]


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_round_trips(text: str, corpus: Corpus, tmp_path: Path) -> None:
    trained = train_tokenizer((d.text for d in corpus.train), vocabulary=320, context=128)
    trained.save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == trained.encode(text)


def test_the_end_of_text_is_one_token_and_never_added(corpus: Corpus) -> None:
    tokenizer = train_tokenizer((d.text for d in corpus.train), vocabulary=320, context=128)
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.encode(END_OF_TEXT) == [0]
    assert 0 not in encode_all(tokenizer, corpus.train)[0]
    assert len(tokenizer) == 320


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
