"""The option --cuda-graphs at a start, on a CPU that stands in for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from verifier_support import make_model, serving, text

from paceline.decoder import Capturing, Decoder
from paceline.decoder.graphs import SHAPES
from paceline.verifier import build_service
from paceline.verifier.wiring import why_no_graphs

pytest.importorskip("triton", reason="Triton is not installed")

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", "Llama")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The captures of starts, which work."""
    found: list[Any] = []
    monkeypatch.setattr(Capturing, "capture", lambda self, run: found.append(run) or run)
    monkeypatch.setattr("paceline.verifier.wiring.why_no_graphs", lambda decoder: "")
    return found


@pytest.fixture
def failing(captures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures fail."""

    def refuse(self: Capturing, run: Callable[[], Any]) -> Any:
        raise MemoryError("out of resource: shared memory")

    monkeypatch.setattr(Capturing, "capture", refuse)


@pytest.fixture
def start(model: Path, short_folder: Path) -> Start:
    """Starts a verifier as on a GPU, whose KV lies in pages."""
    options = {"device": "auto", "paged_kv": True, "kv_bytes": 1 << 24, "max_sequences": 4}
    return lambda **more: serving(model, short_folder / "v.sock", **options, **more)


def counted(registry: CollectorRegistry) -> dict[str, float | None]:
    """The graphs of a verifier by their state."""
    return {
        state: registry.get_sample_value(
            "specdec_cuda_graphs", {"model_name": "llama", "state": state}
        )
        for state in ("captured", "failed")
    }


@pytest.mark.parametrize(
    ("option", "count"), [("off", 0), ("auto", len(SHAPES)), ("on", len(SHAPES))]
)
async def test_a_start_captures_all_graphs_or_none(
    start: Start, captures: list[Any], option: str, count: int
) -> None:
    registry = CollectorRegistry()
    async with start(cuda_graphs=option, metrics=registry):
        assert len(captures) == count
        assert counted(registry) == {"captured": count, "failed": 0}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "cpu"}, "device is cpu"),
        ({"device": "auto"}, "there is no GPU here"),
    ],
)
def test_graphs_are_not_required_where_there_are_none(
    model: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=rf"cuda_graphs is 'on', and .*{why}.*: expected auto or"):
        build_service(model, cuda_graphs="on", **options)


@pytest.mark.usefixtures("failing")
async def test_a_start_that_requires_graphs_fails_without_one(start: Start) -> None:
    with pytest.raises(MemoryError, match="shared memory"):
        async with start(cuda_graphs="on"):
            pass


@pytest.mark.usefixtures("failing")
async def test_a_verifier_serves_without_graphs_that_cannot_be_captured(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so once, with the first error, and the metric has their number."""
    fields: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    registry, prompt = CollectorRegistry(), text(3, 20)
    async with start(cuda_graphs="off") as client:
        expected = await client.generate(prompt, None, **fields)
    async with start(cuda_graphs="auto", metrics=registry) as client:
        assert await client.generate(prompt, None, **fields) == expected
        assert counted(registry) == {"captured": 0, "failed": len(SHAPES)}
    first, count = (record for record in caplog.records if "CUDA graph" in record.getMessage())
    assert "out of resource: shared memory" in first.getMessage()
    assert first.exc_info is not None
    assert count.getMessage() == f"CUDA graphs of steps: 0; {len(SHAPES)} could not be captured"
    assert {first.levelname, count.levelname} == {"WARNING"}


def test_graphs_need_a_gpu() -> None:
    decoder = object.__new__(Decoder)
    for device, why in (("cpu", "there is no GPU here"), ("cuda", "")):
        decoder.device = torch.device(device)
        assert why_no_graphs(decoder) == why
