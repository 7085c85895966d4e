"""A corpus, a preset and a run small enough for a test."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import as_file
from tiny_models import write_target

from paceline.drafter.methods.checkpoint import TargetRef, save_drafter
from paceline.drafter.methods.dspark import DSparkConfig
from paceline.drafter.methods.eagle3 import Eagle3Config
from paceline.drafter.methods.longspec import LongSpecConfig
from paceline.drafter.methods.mtp import MtpConfig, save_mtp
from paceline.train import drafters as training
from paceline.train.corpus import Corpus, load_corpus
from paceline.train.modules import DSparkModel, Eagle3Model, LongSpecModel, MtpModel
from paceline.train.run import Run


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model cards and logs are measured on few, short texts."""
    monkeypatch.setattr(training, "TEXTS", 2)
    monkeypatch.setattr(training, "TOKENS", 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine text files: eight usable, one in a test folder."""
    root = tmp_path / "corpus"
    for number in range(8):
        path = root / f"part{number % 2}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"def add_{i}(a, b):\n    return a + b + {i * number}\n" for i in range(130))
        path.write_text("".join(lines))
    (root / "tests").mkdir()
    (root / "tests" / "extra.py").write_text("assert True\n" * 400)
    return root


@pytest.fixture
def corpus(folder: Path) -> Corpus:
    return load_corpus(str(folder), 6, 2)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Make a run of so many steps with a folder of its own."""

    def make(name: str, steps: int, **options: object) -> Run:
        given = {"minutes": 60, "log_steps": 4, "bf16": False, **options}
        return Run(work=tmp_path / name, steps=steps, **given)  # type: ignore[arg-type]

    return make


@pytest.fixture
def target(corpus: Corpus, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A target of random weights that can tell its few tokens apart: a folder, or with the
    parameter "file" a GGUF file."""
    write_target(tmp_path / "target", (document.text for document in corpus.train))
    if getattr(request, "param", "folder") == "file":
        return as_file(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def drafters(target: Path, tmp_path: Path) -> dict[str, Path]:
    torch.manual_seed(1)
    folders = {method: tmp_path / method for method in ("longspec", "dspark", "eagle3", "mtp")}
    ref = TargetRef.of(target)
    layer = LongSpecConfig.for_target(target, window=32)
    save_drafter(folders["longspec"], layer, LongSpecModel(layer).state_dict(), ref, levels=3)
    block = DSparkConfig.for_target(
        target, taps=(0, -1), block=3, mask_token=0, layers=1, window=16, markov_rank=8
    )
    save_drafter(folders["dspark"], block, DSparkModel(block).state_dict(), ref)
    states = Eagle3Config.for_target(target, taps=(0, -1), window=16)
    save_drafter(folders["eagle3"], states, Eagle3Model(states).state_dict(), ref, levels=3)
    head = MtpConfig.for_target(target, window=16)
    norm = torch.ones(head.hidden)
    save_mtp(folders["mtp"], head, MtpModel(head).state_dict(), ref, norm, levels=3)
    return folders
