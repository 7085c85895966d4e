"""``lm``: its folders and options, and a KV budget, against dense models with hidden positions."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from paceline.drafter.growth.observed import TopChunks
from paceline.drafter.methods.base import Budget, Fit, LoadError, Update
from paceline.drafter.methods.lm import OBSERVED, LmDrafter, LmSequence
from paceline.kernels import SINKS

from .models import VOCAB, change_config, greedy, load, start, text_of, write_model, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("lm") / "lm", "qwen3", 5)


def warmed(drafter: LmDrafter, text: list[int]) -> LmSequence:
    """A generation whose prompt is prefilled."""
    sequence = start(drafter, text)
    sequence.warm(len(text))
    return sequence


@pytest.mark.parametrize("policy", ["streaming", "chunk_topk"])
def test_a_chain_is_the_sparse_models_own_text(model: Path, policy: str) -> None:
    """After any budget of earlier rounds, whose KV stays as it was computed."""
    text = text_of(70, 4)
    drafter = load("lm", model, context="24", kv_policy=policy, widths="1,1,1", min_survival="0")
    sequence = warmed(drafter, text)
    seen: list[tuple[int, list[int]]] = []
    for budget, kept in ((24, 2), (40, 0), (30, 1), (11, 2)):
        drafter.options = replace(drafter.options, context=budget)
        begin = sequence.cached
        tree = sequence.draft(Budget(3, 3))
        chosen = sequence.selected.tolist()
        assert len(chosen) <= budget
        assert chosen[-1] == begin - 1
        seen.append((begin, chosen))
        assert list(tree.tokens) == greedy(model, sequence.tokens, seen, 3)
        other = (tree.tokens[kept] + 1) % VOCAB
        sequence.extend(Update([*tree.tokens[:kept], other, 7]))
        cached = len(sequence.tokens) - 2
        assert sequence.cached == cached, "the KV of accepted nodes is kept"


def by_definition(model: Path, prompt: list[int], policy: str, budget: int) -> list[int]:
    """What a budget keeps of a prompt (BudgetDraft, section 3.4)."""
    count = len(prompt)
    if policy == "streaming":
        return [*range(SINKS), *range(count - budget + SINKS, count)]
    dense = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    layers = dense(torch.tensor([prompt]), output_attentions=True).attentions
    weights = sum(layer[0, :, -OBSERVED:].sum((0, 1)) for layer in layers)
    whole, rest = count // 8, count % 8
    best = weights[: 8 * whole].view(whole, 8).sum(1).topk((budget - rest) // 8).indices
    return [
        *(8 * chunk + at for chunk in sorted(best.tolist()) for at in range(8)),
        *range(8 * whole, count),
    ]


@pytest.mark.parametrize(
    ("policy", "read"), [("streaming", 0), ("chunk_topk", 0), ("chunk_topk", 570)]
)
def test_a_prompt_is_sparsified_once_and_what_follows_is_appended(
    model: Path, policy: str, read: int
) -> None:
    """BudgetDraft, algorithm 2: rounds draft the sparse model's own text, at real positions."""
    options = {"context": "24", "kv_policy": policy, "widths": "1,1,1", "min_survival": "0"}
    drafter, text = load("lm", model, keep="budget", **options), text_of(600, 4)
    sequence = start(drafter, text)
    sequence.warm(read)
    kept = by_definition(model, text[:-1], policy, 24)
    for accepted in (2, 0, 1, 3):
        tree = sequence.draft(Budget(3, 3))
        assert sequence.selected.tolist() == kept
        assert list(tree.tokens) == greedy(model, sequence.tokens, [(599, kept)], 3)
        other = (tree.tokens[min(accepted, 2)] + 1) % VOCAB
        sequence.extend(Update([*tree.tokens[:accepted], other, 7]))
    for count in range(1, 70):
        sequence.extend(Update([*sequence.draft(Budget(3, 3)).tokens, 7]))
        held = len(kept) + len(sequence.tokens) - 600
        assert drafter.kv_slots == sequence.slots <= max(256, 1.5 * held + 256), count
    sequence.close()
    assert drafter.kv_slots == 0


def test_a_budget_that_covers_the_text_changes_nothing(model: Path) -> None:
    text = text_of(60)
    plain = warmed(load("lm", model), text).draft(Budget(16, 4))
    assert warmed(load("lm", model, context="60"), text).draft(Budget(16, 4)) == plain
    assert warmed(load("lm", model, context="20"), text).draft(Budget(16, 4)) != plain


@given(
    weights=st.lists(st.floats(0, 10, width=32), min_size=17, max_size=70),
    newer=st.integers(0, 20),
    budget=st.integers(5, 80),
    share=st.sampled_from([0, 4]),
)
def test_chunks_with_the_most_attention_are_selected(
    weights: list[float], newer: int, budget: int, share: int
) -> None:
    scores, length = TopChunks(), len(weights) + newer
    positions = torch.arange(len(weights))
    scores.add(positions, torch.tensor(weights) / 2)
    scores.add(positions, torch.tensor(weights) / 2)
    newest = budget // share if share else 0
    chosen = scores.select(length, budget, newest).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= budget
    assert chosen[-1] == length - 1
    assert length <= budget or set(range(length - newest, length)) <= set(chosen)
    scored = min(len(weights), length - newest) // 8 * 8
    chunks = [sum(weights[i : i + 8]) for i in range(0, scored, 8)]
    old = [position for position in chosen if position < 8 * len(chunks)]
    if length > budget and length - 8 * len(chunks) + 8 <= budget:
        assert len(old) % 8 == 0
        shown = {position // 8 for position in old}
        hidden = set(range(len(chunks))) - shown
        assert not hidden or len(chosen) > budget - 8
        assert all(chunks[i] >= chunks[j] - 1e-3 for i in shown for j in hidden)


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
