"""Model folders with random faults: each is read, or refused in one line that names the folder.

PACELINE_FUZZ_SECONDS is the duration; without it the test is skipped. PACELINE_FUZZ_SEED is the
seed.
"""

import os
from collections import Counter
from pathlib import Path
from time import monotonic

import pytest
import torch
from model_folders import folders, outcome, read_all
from tiny_models import write_model, write_tokenizer

SECONDS = float(os.environ.get("PACELINE_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "1"))


@pytest.mark.skipif(not SECONDS, reason="PACELINE_FUZZ_SECONDS is not set")
def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)  # a fork has no other threads
    write_model("llama", good := tmp_path / "good")
    write_tokenizer(good)
    assert read_all(good) == ""  # which imports what the child processes need
    end, counts = monotonic() + SECONDS, Counter[str]()
    failed: list[str] = []
    for described, folder in folders(SEED, good, tmp_path):
        try:
            counts["refused" if outcome(folder) else "read"] += 1
        except AssertionError as error:
            failed.append(f"{described}: {error}")
        if monotonic() > end:
            break
    print(f"{sum(counts.values())} folders: {dict(counts)}; {len(failed)} failed")
    assert not failed, "\n".join(failed)
