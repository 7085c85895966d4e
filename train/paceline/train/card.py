"""Model cards, written from measured numbers."""

from torch import nn

from paceline.train.checkpoint import Progress
from paceline.train.corpus import Corpus
from paceline.train.measure import EARLY, GENERATED_TOKENS, HELDOUT, TRAINED, TargetNumbers
from paceline.train.preset import Preset

STDLIB_HEADER = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
library_name: transformers
pipeline_tag: text-generation
---
"""
STDLIB_LICENCE = (
    "The training text is source code of Python, © Python Software Foundation, under the PSF "
    "licence (https://docs.python.org/3/license.html). The model can recite parts of it; treat "
    "what it writes as derived from that source."
)
LICENCES = {
    True: STDLIB_LICENCE,
    False: "The licence is that of the training text: look it up before passing the model on.",
}
"""Licence of a model, by whether it was trained on the standard library."""
_SPLITS = {
    TRAINED: "files trained on to the end",
    EARLY: "files trained on at first",
    HELDOUT: "held-out files",
}


def target_card(
    model: nn.Module,
    corpus: Corpus,
    preset: Preset,
    progress: Progress,
    tokens: int,
    numbers: TargetNumbers,
) -> str:
    """The README.md of a target's folder; `tokens` is the length of the training text."""
    losses = "\n".join(
        f"| {_SPLITS[s]} | {value:.2f} | {_shown(numbers.long_loss.get(s))} |"
        for s, value in numbers.loss.items()
    )
    distinct = "\n".join(f"| {_SPLITS[s]} | {value:.2f} |" for s, value in numbers.distinct.items())
    return f"""{STDLIB_HEADER if corpus.is_stdlib else ""}# Paceline demo target

A small Llama-type language model that writes Python source. It exists so that speculative
decoding can be shown and measured on a laptop with no download. It was trained on its corpus alone,
and has memorised parts of it; use it for nothing else.

{shape_text(preset, model)}
## Data and licence

{len(corpus.train)} files of the {corpus.source}: {tokens:,} tokens.
{len(corpus.heldout)} files are held out. `corpus.json` lists all files with digests.
{LICENCES[corpus.is_stdlib]}

## Training

Muon for the matrices of the layers, AdamW for the rest, bf16 autocast, constant learning rates
and then a linear fall.
{schedule_text(preset, progress)}
## Measured

| text | loss, nats per token, windows of 1024 tokens | windows of {preset.context} |
| --- | --- | --- |
{losses}

The gap between the first row and the last is memorisation: drafting text from files trained on is
much easier than drafting other text, so state which kind a measurement used.
Where the second number is higher, the model is worse at late positions.

Median share of distinct 4-grams in greedy texts of {GENERATED_TOKENS} tokens after 32 random
positions (1: nothing repeats; text caught in a loop of one line falls below 0.3):

| positions in | distinct 4-grams |
| --- | --- |
{distinct}
"""


def shape_text(p: Preset, model: nn.Module) -> str:
    """Shape of a language model, for its card."""
    parameters = sum(each.numel() for each in model.parameters())
    return (
        f"- {parameters / 1e6:.1f} M parameters, in 8-bit blocks: width {p.width}, {p.layers} layers, "
        f"{p.heads} heads over {p.kv_heads} KV heads of {p.head_width}, feed-forward {p.ff}, "
        "tied embedding\n"
        f"- context {p.context} tokens, rope theta {p.rope_theta:g}\n"
        f"- byte-level BPE of {p.vocabulary} tokens; `<|endoftext|>` opens and ends a text\n"
    )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def schedule_text(p: Preset, progress: Progress) -> str:
    """Schedule and budgets of a language model's run, for its card."""
    stages = ", then ".join(
        f"{stage.rows} × {stage.length} tokens for {stage.share:.0%} of the time"
        + (f" from the first {p.focus_files} files alone" if stage.focus else "")
        for stage in p.stages
    )
    copies = (
        f" {p.copy_share:.0%} of the rows end with a second copy of a piece of themselves, to "
        "train copying."
        if p.copy_share
        else ""
    )
    return f"{progress.description}.\nSteps: {stages}.{copies}\n"
