"""`make families`: a table of every family and format, beside transformers and with drafters.

Random small models. Float32 logits are compared with transformers' class; greedy texts with
`ngram` and `selfspec` have its tokens; formats of weights are compared by the median error of their
logits, as a share of the logits' spread; a GGUF file by its float32 logits.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from decoder_cases import FAMILIES, extend, save_model
from drafter import models
from drafter.test_families import (
    DRAFTERS,
    MAX_ERRORS,
    RECURRENT,
    TOKENS,
    accepted_tokens,
    written,
)
from gguf_files import write_gguf
from rich.table import Table
from test_gguf import NAMES as GGUF_NAMES
from test_gguf import UNKNOWN

from paceline.bench.record import make_console
from paceline.convert import load_decoder
from paceline.decoder import Decoder, LocalCache

MAX_FLOAT_ERROR = 2e-4


def run(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    return extend(decoder, LocalCache(decoder.config), torch.tensor(tokens)).float()


def milliseconds(decoder: Decoder, tokens: list[int]) -> float:
    """Return the time of a step of one row behind a text: minimum of 20."""
    cache, times = LocalCache(decoder.config), []
    extend(decoder, cache, torch.tensor(tokens))
    for _ in range(20):
        began = time.perf_counter()
        extend(decoder, cache, torch.tensor([tokens[0]]))
        times.append((time.perf_counter() - began) * 1e3)
    return min(times)


def gguf_error(name: str, folder: Path, tokens: list[int]) -> str:
    """Return the error of a GGUF file's logits beside those of its folder, in float32."""
    if name not in GGUF_NAMES:
        return "not as a file"
    known = UNKNOWN.get(name, {})  # fields that a file does not contain have one value
    stored = save_model(folder / "stored", name, vocab_size=models.VOCAB, **known)
    expected = run(load_decoder(stored), tokens)
    logits = run(load_decoder(write_gguf(folder / "model.gguf", stored)), tokens)
    error = float((logits - expected).abs().max() / expected.std())
    assert error < MAX_FLOAT_ERROR, f"{name}: logits of the GGUF file differ by {error}"
    return f"{error:.0e}"


def row(name: str, folder: Path) -> list[str]:
    """The cells of a family; raises AssertionError where something differs."""
    save_model(folder, name, eos_token_id=None, vocab_size=models.VOCAB)
    kind, expected, logits = written(folder)
    decoder = load_decoder(folder)
    error = float((run(decoder, expected) - logits).abs().max() / logits.std())
    assert error < MAX_FLOAT_ERROR, f"{name}: float32 logits differ by {error}"
    accepted = "in tests/verifier/test_recurrent.py"
    if FAMILIES[name][0] not in RECURRENT:
        counts = [accepted_tokens(decoder, folder, method, expected) for method in DRAFTERS]
        accepted = " / ".join(map(str, counts))
    cells = [name, kind, f"{error:.0e}", accepted]
    for weights, max_error in MAX_ERRORS.items():
        loaded = load_decoder(folder, weights)
        errors = (run(loaded, expected) - logits).std(-1) / logits.std(-1)
        assert errors.median() < max_error, f"{name}: {weights} differs by {errors.median()}"
        cells.append(f"{errors.median():.3f}, {milliseconds(loaded, expected):.2f} ms")
    cells.append(gguf_error(name, folder, expected))
    return cells


def main() -> int:
    console, failed = make_console(), []
    columns = ["family", "class", "float32", "accepted ngram / selfspec", *MAX_ERRORS, "GGUF"]
    table = Table(*columns, title=f"all families, {TOKENS} greedy tokens")
    for name in sys.argv[1:] or FAMILIES:
        console.log(name)
        with tempfile.TemporaryDirectory() as folder:
            try:
                table.add_row(*row(name, Path(folder)))
            except AssertionError as why:
                failed.append(str(why))
    console.print(table)
    for why in failed:
        console.print(why, style="red")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
