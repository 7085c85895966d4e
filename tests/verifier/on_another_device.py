"""A verifier keeps all its tensors on one device, and gives the tokens that it gives on the CPU.

Run by tests/drafter/test_methods.py, in a process of its own.
"""

from pathlib import Path
from typing import Any

import drafters
import pytest
from another_device import DEVICE, OnDevice, another_device
from kv_support import check_followed
from verifier_support import make_model, serving, text

from paceline.bench.reference import ReferenceKernels
from paceline.device import CPU, device_of
from paceline.kernels import devices
from paceline.v1 import sampling_pb2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "mistral", "Mistral")


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name ``cuda`` means the device, in every thread that computes."""
    for kind in ("cpu", "other"):
        monkeypatch.setitem(devices.LOADED, kind, ReferenceKernels())
    chosen = {"cuda": device_of(DEVICE), "cpu": CPU}
    monkeypatch.setattr("paceline.verifier.wiring.find_device", chosen.__getitem__)


@pytest.mark.parametrize(
    ("sampling", "top_logprobs"),
    [({}, 3), ({"temperature": 0.8, "seed": 3, "presence_penalty": 0.3}, 0)],
)
async def test_same_tokens(
    folder: Path, tmp_path: Path, sampling: dict[str, Any], top_logprobs: int
) -> None:
    """Plain and in trees, with a fork of another text and hidden states that are kept."""
    prompt = text(3, 60)
    fields = {
        "sampling": sampling_pb2.SamplingParams(**sampling), "max_new_tokens": 12,
        "ignore_eos": True, "top_logprobs": top_logprobs, "prompt_logprobs": 1,
    }  # fmt: skip
    options: dict[str, Any] = {"kv_bytes": 1 << 24, "max_sequences": 8}
    async with serving(folder, tmp_path / "p.sock", **options) as client:
        plain = await client.generate(prompt, None, **fields)
    with another_device():
        async with serving(folder, tmp_path / "v.sock", device="cuda", **options) as client:
            pool = client.service._pool
            assert pool is not None
            assert isinstance(pool.kv, OnDevice)
            for drafter in (
                drafters.nothing,
                drafters.right(plain, len(prompt)),
                drafters.scattered(plain, len(prompt)),
            ):
                assert await client.generate(prompt, drafter, **fields) == plain
            parent = await client.create(prompt, max_new_tokens=5, drafter=await client.reader(0))
            fork = await client.create(
                [*prompt[:50], 1, 2], max_new_tokens=5, parent_handle=parent.handle
            )
            alone = await client.create([*prompt[:50], 1, 2], max_new_tokens=5)
            assert fork.first.tokens == alone.first.tokens


@pytest.mark.parametrize("policy", ["verified", "verified_pages"])
async def test_followed_is_what_was_written(folder: Path, tmp_path: Path, policy: str) -> None:
    options: dict[str, Any] = {"kv_bytes": 1 << 24, "max_sequences": 8}
    with another_device():
        async with serving(folder, tmp_path / "p.sock", device="cuda", **options) as client:
            created = await client.create(text(1, 90), max_new_tokens=5, ignore_eos=True)
            await check_followed(client, created, 40, policy)
