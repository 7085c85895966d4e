"""Drafters that are loaded for a target where none is named."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files import Kind, write_gguf

from paceline.cli import shipped
from paceline.convert import open_model, prepare
from paceline.drafter.methods.checkpoint import TargetRef, save_drafter
from paceline.drafter.methods.dspark import DSparkConfig
from paceline.train.modules import DSparkModel

from .conftest import write_for_gguf

DEMO = Path(__file__).parents[2] / "models" / "demo"


def test_drafters_are_found_by_the_weights_of_their_target(target: Path, tmp_path: Path) -> None:
    ours = DEMO / "target"
    int8, int4 = ",weights=int8", ",weights=int4"
    levels, tree = "widths=8,8,max_nodes=10", "widths=3,2,1,max_nodes=6"
    assert shipped.drafters_for(ours) == [
        f"longspec=longspec:{DEMO / 'longspec'},{levels}{int8},target={ours}",
        f"dspark=dspark:{DEMO / 'dspark'},{tree}{int4},target={ours}",
        f"lm=lm:{DEMO / 'lm'}{int8}",
        "ngram=ngram",
    ]
    moved = tmp_path / "elsewhere"
    shutil.copytree(ours, moved)
    assert len(shipped.drafters_for(moved)) == 4
    shutil.copytree(DEMO / "lm", tmp_path / "lm")
    assert len(shipped.drafters_for(moved)) == 5, "one beside the target too"
    shutil.rmtree(tmp_path / "lm")
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    assert shipped.drafters_for(moved, "cuda:0") == [f"lm=lm:{DEMO / 'lm'}", "ngram=ngram"]
    untrained = ["ngram=ngram", f"selfspec=selfspec:{target},weights=int4"]
    assert shipped.drafters_for(target) == untrained
    assert shipped.drafters_for(target, "cuda:0") == ["ngram=ngram"], "no second copy on a GPU"


def test_the_default_of_a_large_target_is_by_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ours = DEMO / "target"
    names = ["longspec", "dspark", "lm", "ngram"]

    def found(device: str = "cpu", weights: str = "auto") -> list[str]:
        return [spec.partition("=")[0] for spec in shipped.drafters_for(ours, device, weights)]

    assert found() == names
    monkeypatch.setattr(shipped, "_LARGE", 1 << 20)
    assert found() == found(weights="bfloat16") == ["selfspec", *names]
    assert found(device="cuda:0") == names
    assert found(weights="int8") == ["dspark", "longspec", "lm", "ngram"]
    monkeypatch.setitem(shipped._FIRST, "int8", "ngram")
    assert found(weights="int8") == ["ngram", *names[:-1]]


def test_without_a_checkout_nothing_ships(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "models_folder", lambda: None)
    assert [spec.partition("=")[0] for spec in shipped.drafters_for(target)] == [
        *("ngram", "selfspec")
    ]


def test_drafters_fit_every_format_of_their_target(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shutil.copytree(family / "small", tmp_path / "target")
    config = DSparkConfig.for_target(target, taps=(0,), block=2, mask_token=0)
    first, better = (tmp_path / "models" / name / "dspark" for name in ("first", "second"))
    for folder, notes in ((first, {}), (better, {"accepted_length": 2.0})):
        weights = DSparkModel(config).state_dict()
        save_drafter(folder, config, weights, TargetRef.of(target), notes=notes)
    monkeypatch.setattr(shipped, "models_folder", lambda: tmp_path / "models")
    for path in (target, write_gguf(tmp_path / "target.gguf", target)):
        assert shipped.drafters_for(path, "cuda:0") == [
            f"dspark=dspark:{better},target={path}",
            f"dspark=dspark:{first},target={path}",
            "ngram=ngram",
        ]
    path = write_gguf(tmp_path / "blocks.gguf", target, Kind.Q8_0)
    monkeypatch.setattr(shipped, "_LARGE", 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert shipped.drafters_for(path)[0] == "ngram=ngram", "so small a file stays in its blocks"
    packed = prepare(path, "int8")
    monkeypatch.setattr("paceline.convert.prepare", lambda *_, **__: packed)
    assert shipped.drafters_for(path)[0].startswith("dspark="), "the format that it was packed in"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `large`, and `small` with the same tokenizer."""
    folder = tmp_path_factory.mktemp("family")
    write_for_gguf("qwen2", folder / "large")
    write_for_gguf("small", folder / "small")
    return folder


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("tokenizer.json", b"<spare", b"<other", "its tokenizer is "),
        ("tokenizer.json", b"{", b"", "Extra data"),
        ("config.json", b"{", b'{"paceline": {},', "it was trained for one target"),
        ("config.json", b"{", b"", "Extra data"),
        ("model.safetensors", b"{", b"{" * 1_000_000, "at most half"),
    ],
)
def test_a_model_that_does_not_fit_is_no_drafter_for_a_larger_one(
    family: Path,
    tmp_path: Path,
    name: str,
    old: bytes,
    new: bytes,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shipped, "models_folder", lambda: None)
    monkeypatch.setattr(shipped, "_MIN_TARGET", 1)
    caplog.set_level("DEBUG", "paceline.cli")
    folder = shutil.copytree(family, tmp_path / "family")
    file = folder / "small" / name
    file.write_bytes(file.read_bytes().replace(old, new, -1 if b"<" in old else 1))
    assert shipped.smaller_model(folder / "large") is None
    only_large = {folder / "large": open_model}  # the small one is not read again
    monkeypatch.setattr("paceline.convert.open_model", lambda path, *_: only_large[path](path))
    assert shipped.smaller_model(folder / "large") is None
    start = f"{file.parent} is no drafter"
    one, other = (line for line in caplog.messages if line.startswith(start))
    assert reason in one
    assert one == other


def test_a_smaller_model_beside_a_large_one_drafts_for_it(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "models_folder", lambda: None)
    large, small = family / "large", family / "small"
    assert shipped.only_looks_up(large, on_gpu=False), "none for so small a target"
    monkeypatch.setattr(shipped, "_MIN_TARGET", 1)
    assert shipped.drafters_for(large) == [f"lm=lm:{small},weights=int8", "ngram=ngram"]
    assert shipped.drafters_for(large, "cuda:0") == [f"lm=lm:{small}", "ngram=ngram"]
    assert not shipped.only_looks_up(large, on_gpu=False)
    assert shipped.smaller_model(small) is None
    files = {name: tmp_path / f"{name}.gguf" for name in ("large", "small", "blocks")}
    for name, source, kind in (
        ("large", large, Kind.F32),
        ("small", small, Kind.F32),
        ("blocks", large, Kind.Q8_0),
    ):
        write_gguf(files[name], source, kind)
    assert shipped.smaller_model(files["large"]) == files["small"], "and not its own blocks"


_FORK = """
import os, sys
import torch
from paceline.cli import shipped

def compute(*_):
    torch.set_num_threads(2)
    return torch.ones(1 << 22).add(1).sum().item()

def fitting(*_):
    compute()
    yield None

shipped._fitting = fitting
shipped.only_looks_up(sys.argv[1], on_gpu=False)
child = os.fork()
if child == 0:
    compute()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_can_compute_after_drafters_were_looked_for() -> None:
    target = DEMO / "target"
    run = subprocess.run([sys.executable, "-c", _FORK, str(target)], timeout=60, check=False)
    assert run.returncode == 0
