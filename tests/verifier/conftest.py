"""Models, and verifiers that serve them."""

import gc
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from fakes.exchange import DrafterService
from verifier_support import FAMILIES, MEMORY, TOKENIZER, Client, Serve, make_model, serving

from paceline.verifier.engine import drafting
from paceline.verifier.kv.base import open_segments
from paceline.verifier.kv.segment import Segment


@pytest.fixture(autouse=True, scope="module")
def no_leftovers() -> None:
    """Frees segments that tests of other files left in cycles, which a verifier may have frozen:
    checks of integrity count those of the process. To collect takes seconds."""
    if open_segments():
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
    """Tiny random models: every family in float32, a Llama in bfloat16, one with a tokenizer, and
    one to quantise.

    Those of a type of cache or weights are the same folders once more.
    """
    root = tmp_path_factory.mktemp("models")
    made = {family: make_model(root / family, family) for family in FAMILIES}
    made["written"] = shutil.copytree(made["Llama"], root / "written")
    TOKENIZER.save(str(root / "written/tokenizer.json"))
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


@pytest.fixture
def serve(models: dict[str, Path], tmp_path: Path) -> Serve:
    def start(target: str | Path = "Llama", **options: Any) -> AbstractAsyncContextManager[Client]:
        folder = models[target] if isinstance(target, str) else target
        return serving(folder, tmp_path / "v.sock", **options)

    return start


@pytest.fixture
async def client(serve: Serve, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """Of a verifier with the options SERVED of the test's module, if it has some."""
    options = getattr(request, "param", getattr(request.module, "SERVED", {}))
    async with serve(**options) as client:
        yield client


@pytest.fixture(params=["socket", "stream"])
def service(client: Client, request: pytest.FixtureRequest) -> DrafterService:
    """The client's drafter service, with each carrier of messages."""
    client.drafter_service.use_socket = request.param == "socket"
    return client.drafter_service


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
