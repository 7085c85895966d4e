"""Training of a target model from nothing: tokenizer, model, loop, card."""

from pathlib import Path

from paceline.train.batches import Batches
from paceline.train.checkpoint import Progress, save_model
from paceline.train.corpus import Corpus
from paceline.train.evaluate import next_token_loss, text_loss
from paceline.train.loop import Run, train
from paceline.train.model import build_model
from paceline.train.preset import Preset
from paceline.train.tokenizer import load_tokenizer, train_tokenizer

_HELDOUT_TOKENS = 2048  # tokens of each held-out file read at a checkpoint


def train_target(corpus: Corpus, preset: Preset, run: Run, out: Path) -> Progress:
    """Train a tokenizer and a target on `corpus` and write an HF model folder to `out`.

    The tokenizer is kept beside the checkpoints in `run.work` so that a resumed run uses the same.
    """
    kept = run.work / "tokenizer"
    if (kept / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(kept)
    else:
        texts = (d.text for d in corpus.train)
        tokenizer = train_tokenizer(texts, preset.vocabulary, preset.context)
        tokenizer.save_pretrained(kept)
        corpus.write_manifest(run.work / "corpus.json")
    eos = tokenizer.eos_token_id
    batches = Batches([tokenizer.encode(d.text) for d in corpus.train], eos)
    heldout = [tokenizer.encode(d.text)[:_HELDOUT_TOKENS] for d in corpus.heldout]
    model = build_model(preset, eos)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, "
        f"{len(corpus.train)} files, {batches.tokens:,} tokens"
    )
    progress = train(
        model, next_token_loss, batches, preset, run, lambda m: text_loss(m, heldout)
    )
    save_model(out, model, tokenizer)
    corpus.write_manifest(out / "corpus.json")
    return progress
