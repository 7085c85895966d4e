"""Loading ``lm``: options, folders, and the targets that it fits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf

from paceline.drafter.methods.base import Budget, Fit, LoadError
from paceline.drafter.methods.lm import LmDrafter

from .conftest import drafting
from .models import VOCAB, change_config, load, start, write_model, write_tokenizer


def test_only_safetensors_of_known_models_are_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    weights = (folder / "model.safetensors").read_bytes()
    for damaged in (weights[:-100], b"no weights at all", b""):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(LoadError, match="cannot load"):
            load("lm", folder)
    (folder / "model.safetensors").write_bytes(weights)
    for wrong in ({"vocab_size": "many"}, {"vocab_size": None}, {"paceline": []}):
        change_config(folder, **{"vocab_size": VOCAB, "paceline": {}, **wrong})
        with pytest.raises(LoadError, match=r"config\.json"):
            load("lm", folder)
    change_config(folder, vocab_size=VOCAB, paceline={}, model_type="gpt2")
    with pytest.raises(LoadError, match="not supported"):
        load("lm", folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"no \*.safetensors"):
        load("lm", folder)
    (folder / "config.json").unlink()
    with pytest.raises(LoadError, match="has no config"):
        load("lm", folder)


async def test_drafting_uses_the_configured_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, found = torch.get_num_threads(), []
    draft_many = LmDrafter.draft_many

    def spy(self: LmDrafter, rounds: Any) -> Any:
        found.append(torch.get_num_threads())
        return draft_many(self, rounds)

    monkeypatch.setattr(LmDrafter, "draft_many", spy)
    try:
        target = {"vocab_size": VOCAB}
        async with drafting(f"lm:{folder}", threads=before + 2, target=target) as service:
            await (await service.open([1, 2])).round([3])
    finally:
        torch.set_num_threads(before)
    assert found == [before + 2]


def test_a_folder_says_what_it_fits(tmp_path: Path, folder: Path) -> None:
    bound, digest = write_model(tmp_path / "bound"), load("lm", folder).fit.tokenizer_digest
    change_config(bound, paceline={"target_fingerprint": "f" * 64, "tokenizer_digest": digest})
    assert load("lm", bound).fit == Fit("f" * 64, None, digest, VOCAB)
    write_tokenizer(bound, "u")
    with pytest.raises(LoadError, match="restore"):
        load("lm", bound)


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_a_gguf_file_is_loaded(weights: str, folder: Path, tmp_path: Path) -> None:
    (bare := shutil.copytree(folder, tmp_path / "bare") / "tokenizer.json").unlink()
    file = write_gguf(tmp_path / "tiny.gguf", bare.parent)
    drafter = load("lm", file, weights=weights)
    assert (drafter.fit.vocab_size, drafter.fit.tokenizer_digest) == (VOCAB, "")
    assert drafter.weight_bytes == file.stat().st_size
    assert drafter.decoder.config.weights == ("float32" if weights == "auto" else weights)
    if weights == "auto":
        trees = [
            start(each, [1, 2, 3]).draft(Budget(8, 8)) for each in (drafter, load("lm", folder))
        ]
        assert trees[0].tokens == trees[1].tokens


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(LoadError, match=r"tiny\.gguf: the header ends"):
        load("lm", file)
