"""A training run of a LongSpec layer for an instruct model, on conversations that it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.decoder import Decoder, ModelSource, open_model
from paceline.drafter.methods.longspec import LongSpecConfig, LongSpecModel
from paceline.train.checkpoint import Progress
from paceline.train.conversations import OwnTexts
from paceline.train.corpus import Corpus
from paceline.train.drafter import (
    Objective,
    machine,
    parameters,
    rounds_section,
    train_drafter,
)
from paceline.train.drafter_models import LongSpecDrafter
from paceline.train.heldout import Heldout, Rounds, write_after
from paceline.train.identity import begin_run
from paceline.train.longspec.lagged import LaggedLayer
from paceline.train.longspec.preset import LongSpecPreset
from paceline.train.longspec.signal_loss import SignalLoss
from paceline.train.loop import Run
from paceline.train.schedule import Plan
from paceline.train.signals import signals_of
from paceline.train.tokenizer import encode_all, load_tokenizer
from paceline.train.whole_texts import WholeTexts

_LOGGED, _MEASURED = 2, 12  # texts of each kind and temperature
_TREES = {"widths": "4,4", "max_nodes": "7", "weights": "int8"}
_LONG_PROMPTS, _LONG_TEXTS = (1_000, 2_000, 4_000, 7_000), 8
_CONTEXTS = {
    "whole context": {**_TREES, "context": "0"},
    "512 positions": {**_TREES, "context": "512"},
}


def train_longspec_instruct(
    target: Path,
    corpus: Corpus,
    preset: LongSpecPreset,
    run: Run,
    out: Path,
    written: Sequence[Path] = (),
) -> LongSpecModel:
    """Train a layer for the instruct model in `target`; writes its folder and card to `out`.

    The target writes the conversations first, which is not part of `run.minutes`, unless they are
    in the files `written`. The layer begins as a copy of layers of the target. Returns the layer,
    fp32.

    Raises what `begin_run` and `OwnTexts.load` raise.
    """
    run = replace(run, bf16=torch.device(run.device).type != "cpu")  # slower without AMX
    begin_run(run, out, "longspec", preset, corpus, target=target, written=written)
    decoder = Decoder.load(target, "int8")
    texts = OwnTexts.load(decoder, target, corpus, preset.conversations, run, written)
    config = LongSpecConfig.for_target(
        target,
        window=preset.window,
        intermediate=preset.intermediate,
        draft_vocab_size=preset.draft_vocab_size,
    )
    source = open_model(target)
    model = LongSpecModel(config)
    model.load_state_dict(initial_weights(source, config, texts.frequent(config.drafted)))
    drafter = LongSpecDrafter(target, model.to(run.device), preset.levels)
    tokens = [each.tokens for each in texts.trained]
    signals = signals_of(decoder, target, tokens, run.work, kv_layer=config.target_layer)
    torch.manual_seed(0)
    embedding, head = source.vocabulary(torch.bfloat16)
    loss = SignalLoss(model, embedding, head.float(), signals, preset)
    objective = Objective(LaggedLayer(model), loss, preset.muon_rate, preset.adamw_rate)
    plan = Plan(preset.stages, run.minutes, run.steps)

    def heldout(count: int) -> Heldout:
        return Heldout(drafter, decoder, texts.recordings(count, preset.levels), {"": _TREES})

    notes = {"conversations": len(texts.trained)}
    batches = WholeTexts(signals.starts)
    progress = train_drafter(drafter, objective, batches, plan, run, heldout(_LOGGED), notes, out)
    if progress is not None:
        rounds = heldout(_MEASURED).measure(out) | _long_texts(
            drafter, decoder, target, corpus, out
        )
        card = _card(model, texts, objective, progress, preset)
        (out / "README.md").write_text(f"{card}\n{rounds_section(rounds)}")
    return model


def _long_texts(
    drafter: LongSpecDrafter, decoder: Decoder, target: Path, corpus: Corpus, out: Path
) -> Rounds:
    """Rounds after long held-out documents, with and without the positions in the middle."""
    documents = encode_all(load_tokenizer(target), corpus.heldout)
    texts = {
        f"document of {length:,}": write_after(decoder, documents, length, 0.0, _LONG_TEXTS)
        for length in _LONG_PROMPTS
    }
    return Heldout(drafter, decoder, texts, _CONTEXTS).measure(out)


def initial_weights(
    source: ModelSource, config: LongSpecConfig, drafted: Tensor
) -> dict[str, Tensor]:
    """Weights copied from a target, by the names of a LongSpecModel with a norm.

    Self-attention reads embeddings, as the target's first layer does; queries of the target layer
    that is read fit its keys.
    """
    first, read = "model.layers.0.", f"model.layers.{config.target_layer}."
    names = {
        "input_layernorm": first + "input_layernorm",
        **{f"self_attn.{n}_proj": f"{first}self_attn.{n}_proj" for n in "qkvo"},
        "cross_layernorm": read + "input_layernorm",
        **{f"cross_attn.{n}_proj": f"{read}self_attn.{n}_proj" for n in "qo"},
        "post_attention_layernorm": read + "post_attention_layernorm",
        **{f"mlp.{n}_proj": f"{read}mlp.{n}_proj" for n in ("gate", "up", "down")},
    }
    weights = {f"layers.0.{own}.weight": f"{name}.weight" for own, name in names.items()}
    weights["norm.weight"] = "model.norm.weight"
    found = {own: source.tensor(name, torch.float32, "cpu") for own, name in weights.items()}
    return {**found, "d2t": drafted} if config.draft_vocab_size else found


def _card(
    model: LongSpecModel,
    texts: OwnTexts,
    objective: Objective,
    progress: Progress,
    preset: LongSpecPreset,
) -> str:
    config = model.config
    return f"""# LongSpec layer

Drafter method `longspec` (LongSpec, section 3). It works with one target only: `config.json` holds
the target's fingerprint.

- {parameters(model)}, in 8-bit blocks: one layer of width {config.hidden}, {config.q_heads} heads over
  {config.kv_heads} KV heads of {config.head_dim}, feed-forward {config.intermediate}, window
  {config.window}
- reads keys and values of target layer {config.target_layer} (0 is the first of
  {config.target_layers}); drafts the {config.draft_vocab_size:,} most frequent of
  {config.vocab_size:,} tokens; embedding and LM head are the target's and not in this folder

{texts.card_section()}

## Training

{progress.description}, on {machine()}.
The layer begins as a copy of the target's first and last layer. KL divergence from the target's
distribution over the drafted tokens; {objective.rates}; lags 1 to {preset.levels}.
Measured with trees of {_TREES["max_nodes"]} nodes, {_TREES["widths"]} by level, and 8-bit weights.
"""
