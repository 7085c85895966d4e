from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.convert import load_decoder
from paceline.kernels import SamplingRules
from paceline.train.lm import teacher_of
from paceline.train.model import build_model
from paceline.train.own_text import Task, own_texts, write_texts
from paceline.train.presets import Preset


def test_a_teacher_has_the_targets_likeliest_tokens(preset: Preset, tmp_path: Path) -> None:
    target = build_model(preset, eos=0)
    stream = torch.tensor([0, 5, 6, 7, 0, 8, 9])
    path = tmp_path / "teacher.safetensors"
    teacher = teacher_of(target, stream, separator=0, kept=4, path=path)
    logits = target(stream[None, 4:]).logits[0]
    assert torch.equal(teacher.ids[4:].long(), logits.topk(4).indices)
    assert torch.allclose(teacher.weights.float().sum(-1), torch.ones(7), atol=2e-3)
    # Computed once, read afterwards.
    again = teacher_of(build_model(preset, eos=0, seed=1), stream, 0, 4, path)
    assert torch.equal(again.ids, teacher.ids)
    with pytest.raises(ValueError, match="is about 7 tokens"):
        teacher_of(target, stream[:4], 0, 4, path)


def test_a_long_document_is_run_in_windows_with_context(preset: Preset, tmp_path: Path) -> None:
    target = build_model(replace(preset, context=2048), eos=0)
    stream = torch.cat([torch.zeros(1), torch.arange(2500) % 300 + 1]).long()
    teacher = teacher_of(target, stream, 0, 2, tmp_path / "long.safetensors")
    assert (teacher.weights.sum(-1) > 0.9).all()
    expected = target(stream[None, 768:1792]).logits[0, 256:].topk(2).indices
    assert torch.equal(teacher.ids[1024:1792].long(), expected)


def test_own_texts_are_what_the_target_emits(target: Path, tmp_path: Path) -> None:
    """Each text is the same as when it is written alone."""
    decoder = load_decoder(target)
    document, path = list(range(1, 201)), tmp_path / "own.safetensors"
    texts = own_texts(decoder, [document], 3, 0, path)
    for number, text in enumerate(texts):
        assert text[:128] == list(range(text[0], text[0] + 128))
        task = Task(text[:128], SamplingRules(temperature=number % 2, seed=number), 384)
        [(_, alone)] = write_texts(decoder, [task], stop=0)
        assert text[128:] == [token for token in alone if token]
    assert own_texts(decoder, [], 3, 0, path) == texts, "read from the file"
    with pytest.raises(ValueError, match="no document has 128 tokens"):
        own_texts(decoder, [[1, 2]], 1, 0, tmp_path / "other.safetensors")
