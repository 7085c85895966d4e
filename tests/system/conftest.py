"""Random tiny targets of every family, and real service processes over them."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from drafter.bigram_method import write_bigram
from drafter.mtp_heads import write_target
from kv.other_package import install
from system_support import HOSTILE, SPAWNED, THREADS, open_segments, wait_joined
from tiny_models import FAMILIES, VOCABULARY, write_model, write_tokenizer

from paceline.harness import ServiceProcess


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family name to an HF folder; `small` is a drafter LM with the same tokenizer, and `heads` a
    target with recurrent states and heads of its own, whose vocabulary is smaller."""
    root = tmp_path_factory.mktemp("models")
    folders = {}
    for name in (*FAMILIES, "small"):
        folders[name] = root / name
        write_model(name, folders[name])
        write_tokenizer(folders[name])
    folders["heads"] = write_target(root / "heads", "Qwen3.5, two heads")
    return folders


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of another package, with the selection policy `newest`."""
    folder = tmp_path_factory.mktemp("policy")
    install(folder, "newest")
    return folder


@pytest.fixture(scope="session")
def environment(policy: Path) -> dict[str, str]:
    """Of services that find the package of the policy, and the tests' drafting methods."""
    methods = Path(__file__).parent.parent / "drafter"
    paths = filter(None, [str(policy), str(methods), os.environ.get("PYTHONPATH")])
    return {**THREADS, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def verifiers(
    models: dict[str, Path], sockets: Path, environment: dict[str, str]
) -> Iterator[Callable[[str], ServiceProcess]]:
    """Gives the verifier of a family, in fp32, which checks all that is drafted."""
    with ExitStack() as running:

        @cache
        def verifier(family: str) -> ServiceProcess:
            target = ["--target", str(models[family]), "--weights", "float32"]
            arguments = [*target, "--schedule", "off"]
            address = f"unix:{sockets}/{family}"
            process = ServiceProcess(
                "verifier", arguments, address=address, environment=environment
            )
            return running.enter_context(process)

        yield verifier


@pytest.fixture(scope="session")
def drafter(
    models: dict[str, Path], sockets: Path, environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServiceProcess]:  # fmt: skip
    """One drafter service for the verifiers of all families, good and hostile methods alike.

    A family's name is the drafter that guesses like its target.
    """
    folder = write_bigram(tmp_path_factory.mktemp("bigram"), VOCABULARY)
    newest = f"selfspec:{models['llama']},context=48,kv_policy=newest"
    loads = {
        "lm": f"lm:{models['small']}",
        "ngram": "ngram",
        **{family: f"lm:{models[family]}" for family in FAMILIES},
        **{method: method for method in HOSTILE},
        "bigram": f"bigram:{folder}",
        "heads": f"mtp,target={models['heads']}",
        **{f"newest-{kv}": f"{newest},kv={kv}" for kv in ("map", "follow")},
    }
    arguments = [f"--load={name}={spec}" for name, spec in loads.items()]
    names = (*FAMILIES, "heads", "scheduling")
    arguments += [f"--verifier=unix:{sockets}/{name}" for name in names]
    with ServiceProcess("drafter", arguments, environment=environment) as process:
        yield process


@pytest.fixture(scope="session")
def demo(sockets: Path) -> Iterator[tuple[ServiceProcess, Path]]:
    """A verifier of the demo model that drafts with ngram, and its Unix socket for drafters."""
    path, target = sockets / "draft.sock", Path(__file__).parents[2] / "models/demo/target"
    arguments = ["--target", str(target), "--schedule", "off", "--draft-socket", str(path)]
    arguments += ["--kv-bytes", str(64 << 20)]
    with ServiceProcess("verifier", arguments, environment=THREADS) as verifier:
        joining = ["--load", "ngram=ngram", "--verifier", verifier.address]
        with ServiceProcess("drafter", joining, environment=THREADS):
            wait_joined(verifier.address)
            yield verifier, path


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
