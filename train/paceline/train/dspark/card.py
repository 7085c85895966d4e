"""The model card of a DSpark drafter, written from measured numbers."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.drafter.methods.dspark import DSparkConfig
from paceline.train.checkpoint import Progress
from paceline.train.corpus import Corpus
from paceline.train.dspark.heldout import Measured, accepted_length, conditional
from paceline.train.dspark.preset import DSparkPreset


def dspark_card(
    config: DSparkConfig,
    corpus: Corpus,
    preset: DSparkPreset,
    progress: Progress,
    parameters: int,
    own_texts: int,
    measured: Mapping[str, Measured],
) -> str:
    """The README.md of a drafter's folder; `measured` by split of files."""
    levels = range(1, config.levels + 1)
    rows = [
        f"| {split} | {heat:g} | {len(rounds):,} | **{accepted_length(rounds):.2f}** | "
        + " | ".join(f"{conditional(rounds, level):.2f}" for level in levels)
        + " |"
        for split, each in measured.items()
        for heat, rounds in each.items()
    ]
    header = " | ".join(f"place {level}" for level in levels)
    table = "\n".join(rows)
    return f"""# Paceline demo drafter: {"DSpark" if config.markov_rank else "DFlash"}

Guesses what the demo target says next, a block at a time (drafter method `dspark`; DSpark,
section 3). Of no use with any other model: `config.json` holds the target's fingerprint.

- {parameters / 1e6:.1f} M parameters, bf16: backbone of {config.layers} layers, width
  {config.hidden}, {config.q_heads} heads over {config.kv_heads} KV heads of {config.head_dim},
  feed-forward {config.intermediate}
- blocks of {config.block} tokens, {config.levels} of them drafted; {_heads(config)}
- reads the outputs of target layers {", ".join(map(str, config.taps))} (0 is the first of
  {config.target_layers}) at {_context(config)}; embedding and LM head are the target's and not in
  this folder

## Data

{len(corpus.train[: preset.files])} files of the {corpus.source} and {own_texts:,} texts that the
target wrote after 128 tokens from anywhere in {len(corpus.train)} such files, half of them greedy,
half at temperature 1. The target was trained on few of these files and the drafter on none of the
{len(corpus.heldout)} that are held out from both.

## Training

{progress.step:,} steps, {progress.tokens / 1e6:.1f} M tokens of context,
{progress.elapsed / 60:.0f} minutes: {preset.rows} rows of {preset.length} tokens a step,
{preset.anchors} random blocks in each; from {preset.own_from:.0%} of the time on, of the target's
own texts alone. Weights of the losses: cross-entropy {preset.ce:g}, distance {preset.tv:g},
confidence {preset.certainty:g} (DSpark, section 3.3).

## Measured

Chains of {config.levels}. Accepted length is the mean number of tokens of a round, the verifier's
own included. Place columns: share of rounds in which that place's token was accepted, of those in
which all before it were. Texts are the target's own, after the beginnings of files.

| files | temperature | rounds | accepted length | {header} |
{"| --- " * (4 + config.levels)}|
{table}
"""


def _heads(config: DSparkConfig) -> str:
    if not config.markov_rank:
        return "no sequential head and no confidence head: this is DFlash"
    confidence = "a confidence head" if config.confidence else "no confidence head"
    return f"{config.markov_head} sequential head of rank {config.markov_rank}, {confidence}"


def _context(config: DSparkConfig) -> str:
    return f"the last {config.window} positions" if config.window else "all positions"
