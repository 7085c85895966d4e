"""Models, and verifiers that serve them."""

import gc
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fakes.exchange import DrafterService
from verifier_support import FAMILIES, MEMORY, Client, make_model, serving

from paceline.verifier.engine import drafting
from paceline.verifier.kv.segment import Segment


@pytest.fixture(autouse=True, scope="module")
def no_leftovers() -> None:
    """Frees what tests of other files left in this process: a verifier that starts freezes all
    objects, and so keeps segments of other tests that are in cycles. Checks of integrity count the
    segments of the process."""
    gc.unfreeze()
    gc.collect()


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """Give a drafter's calls to the verifier enough time on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.drafter.kv.exchange.CALL_SECONDS", 60.0)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models: every family in float32, a Llama in bfloat16, and one to quantise.

    Those of a type of cache or weights are the same folders once more.
    """
    root = tmp_path_factory.mktemp("models")
    made = {family: make_model(root / family, family) for family in FAMILIES}
    made["bf16"] = make_model(root / "bf16", "Llama", dtype="bfloat16", seed=5)
    blocks = make_model(root / "blocks", "Llama", hidden_size=64)
    return (
        made
        | dict.fromkeys(("int8 KV", "float32 KV"), made["bf16"])
        | {"int8": blocks, "int4": blocks, "pages": made["Mistral"]}
    )


@pytest.fixture(scope="session")
def model(models: dict[str, Path]) -> Path:
    return models["Llama"]


@pytest.fixture(scope="session")
def written_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama, with a tokenizer."""
    from test_grammar import TOKENIZER

    folder = tmp_path_factory.mktemp("written") / "model"
    shutil.copytree(model, folder)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
async def client(model: Path, tmp_path: Path) -> AsyncIterator[Client]:
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        yield client


@pytest.fixture
async def far_service(client: Client) -> AsyncIterator[DrafterService]:
    """A service whose drafter is called ``far`` and whose messages travel over the stream."""
    async with client.new_drafter_service(socket=False, name="far") as service:
        yield service


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are opened again at once after a failure."""
    monkeypatch.setattr(drafting, "FIRST_DELAY", 0.0)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(MEMORY, 1024)
    yield made
    made.close()
