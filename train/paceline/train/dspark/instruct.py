"""A training run of a DSpark drafter for an instruct model, on conversations that it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.decoder import Decoder, ModelSource, open_model
from paceline.drafter.methods.dspark import DSparkConfig, DSparkModel
from paceline.train.checkpoint import Progress
from paceline.train.conversations import OwnTexts
from paceline.train.corpus import Corpus
from paceline.train.drafter import Objective, machine, rounds_section, train_drafter
from paceline.train.drafter_models import DSparkDrafter
from paceline.train.dspark.answers import Answers
from paceline.train.dspark.objective import BlockDrafter
from paceline.train.dspark.preset import DSparkPlan, DSparkPreset
from paceline.train.dspark.run import shape_section
from paceline.train.dspark.signal_loss import SignalBlockLoss
from paceline.train.heldout import Heldout
from paceline.train.identity import begin_run
from paceline.train.loop import Run
from paceline.train.signals import signals_of
from paceline.train.tokenizer import load_tokenizer

_FIRST_NORM = 0.25  # of the target's
_LOGGED, _MEASURED = 2, 12  # texts of each kind and temperature
_TREES = {"widths": "4,4,2", "max_nodes": "8", "weights": "int8"}


def train_dspark_instruct(
    target: Path,
    corpus: Corpus,
    preset: DSparkPreset,
    run: Run,
    out: Path,
    written: Sequence[Path] = (),
) -> DSparkModel:
    """Train a drafter for the instruct model in `target`; writes its folder and card to `out`.

    The target writes the conversations first, which is not part of `run.minutes`, unless they are
    in the files `written`. The layers begin as copies of the target's last ones. Returns the
    drafter, fp32.

    Raises what `begin_run` and `OwnTexts.load` raise.
    """
    run = replace(run, bf16=torch.device(run.device).type != "cpu")  # slower without AMX
    begin_run(run, out, "dspark", preset, corpus, target=target, written=written)
    decoder = Decoder.load(target, "int8")
    texts = OwnTexts.load(decoder, target, corpus, preset.conversations, run, written)
    config = preset.config(target, load_tokenizer(target).eos_token_id)
    source = open_model(target)
    torch.manual_seed(0)
    model = DSparkModel(config)
    initial = initial_weights(source, config, texts.frequent(config.drafted))
    model.load_state_dict({**model.state_dict(), **initial})
    drafter = DSparkDrafter(target, model.to(run.device))
    tokens = [each.tokens for each in texts.trained]
    signals = signals_of(decoder, target, tokens, run.work, taps=config.taps)
    prompts = (len(each.prompt) for each in texts.trained)
    answers = [start + prompt for start, prompt in zip(signals.starts, prompts, strict=False)]
    embedding, head = source.vocabulary(torch.bfloat16)
    loss = SignalBlockLoss(model, embedding, head.float(), signals, answers, preset)
    objective = Objective(BlockDrafter(model), loss, preset.muon_rate, preset.adamw_rate)

    def heldout(count: int) -> Heldout:
        return Heldout(drafter, decoder, texts.recordings(count, config.levels), {"": _TREES})

    progress = train_drafter(
        drafter, objective, Answers(signals.starts, answers, config.window),
        DSparkPlan(preset.stages, run.minutes, run.steps), run, heldout(_LOGGED),
        {"conversations": len(texts.trained)}, out,
    )  # fmt: skip
    if progress is not None:
        card = _card(model, texts, objective, progress, preset)
        (out / "README.md").write_text(f"{card}\n{rounds_section(heldout(_MEASURED).measure(out))}")
    return model


def initial_weights(
    source: ModelSource, config: DSparkConfig, drafted: Tensor
) -> dict[str, Tensor]:
    """Weights copied from a target, by the names of a DSparkModel.

    The layers are the target's last ones, and their context is what the first of them reads there,
    as near as a tap is. Mask tokens are new to them: the final norm is small at first, so that
    logits are nearly even and not wrong by far.
    """
    first = config.target_layers - config.layers
    names = {"hidden_norm": f"model.layers.{first}.input_layernorm", "norm": "model.norm"}
    for index in range(config.layers):
        parts = ["input_layernorm", "post_attention_layernorm"]
        parts += [f"self_attn.{name}_proj" for name in "qkvo"]
        parts += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        names |= {f"layers.{index}.{p}": f"model.layers.{first + index}.{p}" for p in parts}
    weights = {
        f"{own}.weight": source.tensor(f"{name}.weight", torch.float32, "cpu")
        for own, name in names.items()
    }
    near = min(range(len(config.taps)), key=lambda tap: abs(config.taps[tap] - (first - 1)))
    mixed = torch.zeros(len(config.taps), config.hidden, config.hidden)
    mixed[near] = torch.eye(config.hidden)
    weights["fc.weight"] = torch.cat(list(mixed), dim=1)
    weights["norm.weight"] *= _FIRST_NORM
    return {**weights, "d2t": drafted} if config.draft_vocab_size else weights


def _card(
    model: DSparkModel,
    texts: OwnTexts,
    objective: Objective,
    progress: Progress,
    preset: DSparkPreset,
) -> str:
    return f"""# DSpark drafter

Drafter method `dspark` (DSpark, section 3): drafts a block at a time. It works with one target
only: `config.json` holds the target's fingerprint.

{shape_section(model)}

{texts.card_section()}

## Training

{progress.description}, on {machine()}.
The layers begin as copies of the target's last ones. A step: {preset.anchors} random blocks in each
of {preset.rows} answers. Weights of the losses: cross-entropy {preset.ce:g}, distance
{preset.tv:g}, confidence {preset.certainty:g} (DSpark, section 3.3); {objective.rates}.
Measured with trees of {_TREES["max_nodes"]} nodes, {_TREES["widths"]} by level, and 8-bit weights.
"""
