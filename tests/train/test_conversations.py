"""Conversations that a target writes, its stored signals, and a drafter trained on them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from paceline.convert import load_decoder
from paceline.drafter import Resources
from paceline.drafter.methods import method_class
from paceline.drafter.methods.checkpoint import read_shape
from paceline.drafter.methods.dspark import DSparkConfig
from paceline.drafter.methods.dspark.drafter import DSparkDrafter
from paceline.kernels import processor_name
from paceline.kernels.sampling import SamplingRules
from paceline.train import conversations as own
from paceline.train.acceptance import replay
from paceline.train.batches import PADDING, Prefixes
from paceline.train.conversations import read_conversations, write_conversations
from paceline.train.corpus import Corpus, load_tokenizer
from paceline.train.dspark import DSparkTrainer
from paceline.train.eagle3 import Eagle3Trainer
from paceline.train.longspec import LongSpecTrainer
from paceline.train.own_text import Task, own_texts, write_texts
from paceline.train.presets import Stage
from paceline.train.recipes.dspark import DSparkPreset
from paceline.train.recipes.eagle3 import Eagle3Preset
from paceline.train.recipes.longspec import LONGSPEC_PRESETS, LongSpecPreset
from paceline.train.run import Run
from paceline.train.signals import signals_of

_TEMPLATE = (
    "{% for m in messages %}{{ bos_token + m['role'] + ': ' + m['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token + 'assistant: ' }}{% endif %}"
)
_DOCUMENTS = [list(range(20, 90))]


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"_TOGETHER": 6, "_QUESTION": 6, "_ANSWER": 12, "_DOCUMENT_ANSWER": 12}
    for name, value in (lengths | {"_EDIT": (4, 8), "_DOCUMENT": (16, 40)}).items():
        monkeypatch.setattr(own, name, value)


@pytest.fixture
def instruct(target: Path) -> Path:
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(target)
    return target


def test_answers_are_the_target_s_and_a_stopped_file_goes_on(
    instruct: Path, tmp_path: Path
) -> None:
    decoder, tokenizer = load_decoder(instruct), load_tokenizer(instruct)
    path = tmp_path / "own.jsonl"
    whole = write_conversations(decoder, tokenizer, _DOCUMENTS, 24, path)
    assert whole == read_conversations(path)
    for each in whole:
        task = Task(each.prompt, SamplingRules(each.temperature, seed=each.seed), 12)
        ((_, answer),) = write_texts(decoder, [task], tokenizer.eos_token_id)
        assert each.answer == tuple(answer)
        assert tokenizer.decode(each.prompt).endswith("assistant: ")
    assert {each.temperature for each in whole} == {0.0, 0.7}
    assert len({each.kind for each in whole}) > 3
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:12], lines[12][:20]]))  # killed while writing
    assert write_conversations(decoder, tokenizer, _DOCUMENTS, 24, path) == whole


def test_prompts_are_those_of_the_chat_template(instruct: Path) -> None:
    tokenizer = load_tokenizer(instruct)
    template = own.Template(tokenizer)
    turns: list[dict[str, str]] = [{"role": "user", "content": "one two"}]

    def rendered() -> list[int]:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    first = template.whole(own.Question("chat", "one two", False))
    assert first == rendered()
    answer = tokenizer("three", add_special_tokens=False)["input_ids"]
    before = (*first, *answer, template.stop)
    turns += [{"role": "assistant", "content": "three"}, {"role": "user", "content": "four"}]
    assert template.whole(own.Question("turns", "four", False, before=before)) == rendered()
    turns[:] = [{"role": "system", "content": "short"}, {"role": "user", "content": "five"}]
    assert template.whole(own.Question("system", "five", False, system="short")) == rendered()


def test_what_cannot_be_written_or_read_is_refused(target: Path, tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = load_tokenizer(target)
    with pytest.raises(ValueError, match="needs an instruct model"):
        write_conversations(load_decoder(target), tokenizer, _DOCUMENTS, 1, tmp_path / "a")
    with pytest.raises(ValueError, match="no kinds of conversations"):
        write_conversations(
            load_decoder(target), tokenizer, _DOCUMENTS, 1, tmp_path / "a", 0, ["x"]
        )
    (tmp_path / "b").write_text('{"kind": "chat"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* is no conversation"):
        read_conversations(tmp_path / "b")


def test_signals_are_the_target_s_and_are_computed_once(target: Path, tmp_path: Path) -> None:
    decoder = load_decoder(target)
    texts = [list(range(30)), list(range(40, 100)), [5]]
    signals = signals_of(decoder, target, texts, tmp_path, kv_layer=1, taps=[0, 1])
    assert signals.starts == [0, 30, 90, 91]
    for text, start in zip(texts, signals.starts, strict=False):
        ((_, (token,)),) = write_texts(decoder, [Task(text, SamplingRules(0.0), 1)], None)
        last = signals.hidden[start + len(text) - 1]
        assert decoder.linears()[-1](last[None]).argmax().item() == token
    whole = replay(decoder, texts[1][:1], texts[1][1:], layers=[0, 1])
    assert torch.equal(signals.taps[30:89], torch.cat([whole.states[0], whole.states[1]], dim=1))
    kept = signals.kv.clone()
    kept[40] = signals.kv[40] = 1  # a value that no run computes
    assert torch.equal(signals_of(decoder, target, texts, tmp_path, kv_layer=1).kv, kept)
    with pytest.raises(ValueError, match="signals of other kv_layer"):
        signals_of(decoder, target, texts, tmp_path, kv_layer=0)
    size = (tmp_path / "hidden.bin").stat().st_size
    for others in (texts[:2], [*texts, [6]]):
        with pytest.raises(ValueError, match="signals of other texts"):
            signals_of(decoder, target, others, tmp_path)
    assert (tmp_path / "hidden.bin").stat().st_size == size


def test_rows_are_texts_from_their_beginning_each_once_an_epoch() -> None:
    lengths = torch.randint(1, 90, (151,), generator=torch.Generator().manual_seed(0))
    starts = [0, *lengths.cumsum(0).tolist()]
    batches = Prefixes(starts, tail=20)
    seen = Counter[int]()
    while True:
        batch = batches.next(2, 64)
        if batches.position.epoch:
            break
        assert len(batch) % 2 == 0
        longest = int((batch != PADDING).sum(1).max())
        assert len(batch) * min(20, longest) <= 128 or len(batch) == 2
        for row in batch:
            real = row[row != PADDING]
            assert torch.equal(row[-len(real) :], real)
            assert real.tolist() == list(range(real[0], real[-1] + 1))
            end = starts[starts.index(real[0]) + 1]
            assert real[-1] + 1 == end or 20 <= len(real) < end - real[0]
            seen[starts.index(int(real[0]))] += 1
    expected = Counter({n: 1 + length // 40 for n, length in enumerate(lengths.tolist())})
    assert not seen - expected
    assert (expected - seen).total() <= 5  # an odd one of each group is left out
    short = Prefixes(starts, tail=20, max_length=30)
    assert all(short.next(2, 64).shape[1] <= 32 for _ in range(20))
    with pytest.raises(ValueError, match="no conversation"):
        Prefixes([0, 9], tail=20, max_length=8)
    other = Prefixes(starts, tail=20)
    other.seek(replace(batches.position))
    assert torch.equal(other.next(2, 64), batches.next(2, 64))


@pytest.mark.parametrize("method", ["longspec", "eagle3"])
def test_a_run_from_nothing_to_a_drafter(
    method: str, instruct: Path, corpus: Corpus, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    recipes = {
        "longspec": LongSpecTrainer(
            instruct,
            LongSpecPreset(
                stages=(Stage("texts", 1.0, rows=2, length=64, offset=True),), minutes=60, steps=12,
                adamw_rate=1e-3, levels=2, window=32, conversations=40, draft_vocab_size=100,
            ),
        ),
        "eagle3": Eagle3Trainer(
            instruct,
            Eagle3Preset(
                taps=(0, 1), levels=2, window=16, minutes=60, steps=12, rows=4, length=12,
                adamw_rate=1e-2, conversations=40, draft_vocab_size=100, norm_output=True,
            ),
        ),
    }  # fmt: skip
    run = make_run("work", 12)
    recipes[method].train(corpus, run, tmp_path / "out")
    assert "conversations" in (tmp_path / "out" / "README.md").read_text()
    given = {"target": str(instruct)}
    drafter = method_class(method).load(tmp_path / "out", given, Resources())
    assert len(drafter.drafted_tokens) == drafter.shape.draft_vocab_size == 100  # type: ignore[attr-defined]
    log = torch.load(run.work / "run.pt", weights_only=True)["progress"]["log"]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < losses[0]


def test_dspark_from_given_conversations(
    instruct: Path, corpus: Corpus, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Resumed with the texts that it began with, although their file has grown since."""
    decoder, tokenizer = load_decoder(instruct), load_tokenizer(instruct)
    own = tmp_path / "own.jsonl"
    given = write_conversations(decoder, tokenizer, _DOCUMENTS, 40, own)
    preset = DSparkPreset(
        taps=(0, 1), layers=1, block=3, markov_rank=32, window=16, minutes=60, steps=16,
        rows=4, length=12, anchors=4, adamw_rate=3e-3, conversations=9999, draft_vocab_size=100,
    )  # fmt: skip
    out = tmp_path / "out"
    DSparkTrainer(instruct, preset).train(corpus, make_run("work", 16), out, [own])
    trained = read_shape(DSparkConfig, out)[0]
    assert (trained.draft_vocab_size, trained.taps, trained.levels) == (100, (0, 1), 3)
    log = torch.load(tmp_path / "work" / "run.pt", weights_only=True)["progress"]["log"]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < losses[0]
    card = (out / "README.md").read_text()
    assert f"{len(given) - -(-len(given) // 17)} conversations" in card
    assert processor_name() in card
    for weights in ("auto", "int8"):
        options = {"target": str(instruct), "weights": weights}
        drafter = DSparkDrafter.load(out, options, Resources())
        assert len(drafter.drafted_tokens) == 100
    write_conversations(decoder, tokenizer, _DOCUMENTS, 60, own)
    again = make_run("work", 16, force=True)
    DSparkTrainer(instruct, preset).train(corpus, again, out, [own])
    assert (out / "README.md").read_text() == card
    with pytest.raises(ValueError, match="holds another run"):
        DSparkTrainer(instruct, preset).train(corpus, again, out, [tmp_path / "other"])
    further = make_run("further", 8)
    recipe = DSparkTrainer(instruct, preset)
    recipe.train(corpus, further, tmp_path / "second", [own], out)
    log = torch.load(further.work / "run.pt", weights_only=True)["progress"]["log"]
    assert next(row["loss"] for row in log if "loss" in row) < losses[0]
    assert "## Trained before" in (tmp_path / "second" / "README.md").read_text()
    other = LongSpecTrainer(instruct, replace(LONGSPEC_PRESETS["smollm2"], draft_vocab_size=100))
    longer = DSparkTrainer(instruct, replace(preset, block=4))
    longer.train(corpus, make_run("block", 1), tmp_path / "block", [own], out)
    assert read_shape(DSparkConfig, tmp_path / "block")[0].levels == 4
    wider = DSparkTrainer(instruct, replace(preset, layers=2))
    with pytest.raises(ValueError, match="has layers 1, this run 2"):
        wider.train(corpus, make_run("wider", 1), tmp_path / "wider", [own], out)
    with pytest.raises(ValueError, match="is a dspark drafter, expected longspec"):
        other.train(corpus, make_run("third", 8), tmp_path / "third", [own], out)


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
