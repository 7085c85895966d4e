"""The option --cuda-graphs at a start, on a CPU that stands in for a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry
from verifier_support import serving

from paceline.cuda import CudaDevice
from paceline.cuda.graphs import Capturing
from paceline.device import SHAPES, Device

pytest.importorskip("triton", reason="Triton is not installed")

Start = Callable[..., Any]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The captures of starts, which work."""
    found: list[Any] = []
    monkeypatch.setattr(Capturing, "capture", lambda self, run: found.append(run) or run)
    monkeypatch.setattr(Device, "step_graphs", CudaDevice.step_graphs)
    return found


@pytest.fixture
def start(model: Path, short_folder: Path) -> Start:
    """Starts a verifier as on a GPU, whose KV lies in pages."""
    options = {"device": "auto", "paged_kv": True, "kv_bytes": 1 << 24, "max_sequences": 4}
    return lambda **more: serving(model, short_folder / "v.sock", **options, **more)


def counted(registry: CollectorRegistry) -> dict[str, float | None]:
    return {
        state: registry.get_sample_value(
            "specdec_cuda_graphs", {"model_name": "Llama", "state": state}
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


@pytest.mark.usefixtures("captures")
async def test_a_start_that_requires_graphs_fails_without_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=MemoryError("out of resource: shared memory"))
    monkeypatch.setattr(Capturing, "capture", refuse)
    with pytest.raises(MemoryError, match="shared memory"):
        async with start(cuda_graphs="on"):
            pass
