"""Random tiny targets of every family, and real service processes over them."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from drafter.bigram_method import write_bigram
from system_support import HOSTILE, SPAWNED, THREADS, open_segments
from tiny_models import FAMILIES, VOCABULARY, write_model, write_tokenizer

from paceline.harness import ServiceProcess


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family name to an HF folder; `small` is a drafter LM with the same tokenizer."""
    root = tmp_path_factory.mktemp("models")
    folders = {}
    for name in (*FAMILIES, "small"):
        folders[name] = root / name
        write_model(name, folders[name])
        write_tokenizer(folders[name])
    return folders


@pytest.fixture(scope="session")
def verifiers(models: dict[str, Path], sockets: Path) -> Iterator[Callable[[str], ServiceProcess]]:
    """Gives the verifier of a family, in fp32, which checks all that is drafted."""
    with ExitStack() as running:

        @cache
        def verifier(family: str) -> ServiceProcess:
            target = ["--target", str(models[family]), "--weights", "float32"]
            arguments = [*target, "--schedule", "off"]
            address = f"unix:{sockets}/{family}"
            process = ServiceProcess("verifier", arguments, address=address, environment=THREADS)
            return running.enter_context(process)

        yield verifier


@pytest.fixture(scope="session")
def drafter(
    models: dict[str, Path], sockets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    """One drafter service for the verifiers of all families, good and hostile methods alike.

    A family's name is the drafter that guesses like its target.
    """
    hostile = Path(__file__).parent.parent / "drafter"
    arguments = ["--load", f"lm=lm:{models['small']}", "--load", "ngram=ngram"]
    arguments += [f"--load={family}=lm:{models[family]}" for family in FAMILIES]
    arguments += [f"--load={method}={method}" for method in HOSTILE]
    folder = write_bigram(tmp_path_factory.mktemp("bigram"), VOCABULARY)
    arguments.append(f"--load=bigram=bigram:{folder}")
    arguments += [f"--verifier=unix:{sockets}/{name}" for name in (*FAMILIES, "scheduling")]
    path = os.pathsep.join(filter(None, [str(hostile), os.environ.get("PYTHONPATH")]))
    environment = {**THREADS, "PYTHONPATH": path}
    with ServiceProcess("drafter", arguments, environment=environment) as process:
        yield process


@pytest.fixture(scope="session")
def sockets() -> Iterator[Path]:
    """Where services listen that are started again: a TCP port may be another's by then."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True, scope="session")
def no_segment_is_left() -> Iterator[None]:
    """No service is left that holds a segment."""
    with pytest.MonkeyPatch.context() as patch:
        spawn = ServiceProcess.spawn

        def spawn_and_note(process: ServiceProcess) -> None:
            spawn(process)
            SPAWNED.add(process.pid)

        patch.setattr(ServiceProcess, "spawn", spawn_and_note)
        yield
    assert not open_segments()
