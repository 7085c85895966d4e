"""Methods by name: built-in ones, those of other distributions, their devices, and the example."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from distributions import write_distribution
from fakes.exchange import fake_verifier
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import packages_after

from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    LoadError,
    Resources,
)
from paceline.drafter.service import build_service
from paceline.harness import ServiceProcess

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
BUILT_IN = ["dspark", "lm", "longspec", "ngram", "selfspec"]


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers methods that cannot be used."""
    methods = {
        "missing-module": "no.such.module:Thing",
        "missing-class": "pathlib:Thing",
        "another-class": "pathlib:Path",
        "ngram": "pathlib:Path",
    }
    monkeypatch.syspath_prepend(write_distribution(tmp_path / "one", methods))


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_methods_keep_their_name(name: str, registered: None) -> None:
    assert method_class(name).method == name


@pytest.mark.parametrize(
    ("name", "reason", "message"),
    [
        ("missing-module", "METHOD_NOT_INSTALLED", "cannot be imported"),
        ("missing-class", "METHOD_NOT_INSTALLED", "cannot be imported"),
        ("another-class", "UNKNOWN_METHOD", "expected a subclass of Drafter"),
        ("magic", "UNKNOWN_METHOD", "known are .*lm, .*missing-class, .*ngram"),
    ],
)
def test_unusable_methods_are_refused(
    name: str, reason: str, message: str, registered: None
) -> None:
    with pytest.raises(LoadError, match=message) as error:
        method_class(name)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ngram", {"max_m": "4"}, "known are max_n"),
        ("ngram", {"max_n": "four"}, "whole number"),
        ("ngram", {"max_n": "0"}, "out of range"),
        ("ngram", {"min_n": "6"}, "out of range"),
        ("ngram", {"min_survival": "nan"}, "out of range"),
        ("lm", {"width": "4"}, "known are widths"),
        ("lm", {"widths": "4,x"}, "list of whole numbers"),
        ("lm", {"widths": "0"}, "out of range"),
        ("lm", {"widths": "64,64,64,64,64"}, "at most 255"),
        ("lm", {"weights": "float16"}, "one of auto"),
        ("lm", {"context": "3"}, "expected more than 4"),
        ("lm", {"context": "-1"}, "out of range"),
        ("lm", {"kv_policy": "verified"}, "kv_policy"),
        ("longspec", {"width": "4"}, "known are kv"),
        ("longspec", {"widths": "64,64,64,64,64"}, "at most 255"),
        ("longspec", {"depth": "64"}, "at most 255"),
        ("longspec", {"context": "4"}, "expected more than 4"),
        ("selfspec", {"context": "3"}, "context"),
        ("selfspec", {"ratio": "1.5"}, "ratio"),
        ("selfspec", {"depth": "65"}, "depth"),
        ("selfspec", {"share_weights": "theirs"}, "share_weights"),
        ("selfspec", {"kv": "fast"}, "kv"),
        ("selfspec", {"kv_policy": "luck"}, "kv_policy"),
        ("selfspec", {"kv_wire": "int8"}, "kv_wire"),
        ("dspark", {"states": "fast"}, "states"),
    ],
)
def test_wrong_options_are_refused(method: str, options: dict[str, str], message: str) -> None:
    """Before anything is read."""
    folder = None if method == "ngram" else Path("no folder")
    with pytest.raises(LoadError, match=message) as error:
        method_class(method).load(folder, options, Resources())
    assert error.value.reason in ("INVALID_OPTION", "UNKNOWN_OPTION")


async def test_a_process_loads_the_method_of_another_distribution(
    tmp_path: Path, short_folder: Path
) -> None:
    folder = write_distribution(tmp_path, {"mine": "followers:FollowersDrafter"})
    paths = [str(folder), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    async with fake_verifier(short_folder) as verifier:
        arguments = ["--load", "x=mine,branches=1", "--verifier", verifier.address]
        process = ServiceProcess("drafter", arguments, environment=environment)
        await asyncio.to_thread(process.__enter__)
        try:
            text = await (await verifier.peer()).open([1, 2, 3, 1], drafter="x")
            drafted = await text.round([2])
            assert list(drafted.tree.tokens)[:2] == [3, 1]
        finally:
            await asyncio.to_thread(process.__exit__, None, None, None)


def test_training_imports_the_modules_without_the_services() -> None:
    found = packages_after("import paceline.train.modules")
    assert not {name for name in found if name.startswith("grpc")}


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"device is .*expected"):
        build_service([], device=device)


@pytest.mark.slow
def test_services_keep_their_tensors_on_one_device() -> None:
    """In a process of its own: PyTorch is told of a device that is not there."""
    tests = Path(__file__).parents[1]
    cases = [tests / service / "on_another_device.py" for service in ("drafter", "verifier")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, cases)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


FILE = Path(__file__).parents[2] / "docs" / "examples" / "followers.py"
sys.path.insert(0, str(FILE.parent))
DRAFTER: type[Drafter] = importlib.import_module("followers").FollowersDrafter


def begin(text: list[int], **options: str) -> DraftSequence:
    drafter = DRAFTER.load(None, options, Resources())
    return drafter.start(GenerationInfo(text, len(text), 100))


@given(
    text=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 8),
)
@settings(max_examples=50)
def test_its_trees_are_valid_and_within_the_budget(text: list[int], nodes: int, depth: int) -> None:
    tree = begin(text).draft(Budget(nodes=nodes, depth=depth))
    assert len(tree) <= nodes
    assert tree.depth <= depth
    tree.check(vocab_size=100)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(LoadError, match="branches"):
        begin([1], branches="0")
    with pytest.raises(LoadError, match="folder"):
        DRAFTER.load(Path("x"), {}, Resources())
