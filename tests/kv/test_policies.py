"""The registry of selection policies."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from other_package import install

from paceline.drafter.kv import KvOptions
from paceline.kv.policies import kv_policies, load_policy
from paceline.kv.selection import Streaming


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package's policies: ``newest``, and one with the name of a built-in policy."""
    install(tmp_path, "newest", "streaming")
    monkeypatch.syspath_prepend(str(tmp_path))
    kv_policies.cache_clear()
    yield
    kv_policies.cache_clear()


def test_built_in_policies_load() -> None:
    for name in kv_policies():
        assert callable(load_policy(name))
    assert load_policy("") is Streaming
    with pytest.raises(ValueError, match="'newest' is not installed, expected one of chunk_topk"):
        load_policy("newest")
    with pytest.raises(ValueError, match="kv_policy='newest': expected one of chunk_topk"):
        KvOptions(kv_policy="newest")


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_found_and_cannot_replace_a_built_in_policy() -> None:
    KvOptions(kv_policy="newest")
    policy = load_policy("newest")(None, (0, 3))  # type: ignore[arg-type]
    assert [each.tolist() for each in policy.choose(9, 2)] == [[7, 8], [7, 8]]
    assert load_policy("streaming") is Streaming
    assert torch.equal(policy.choose(9, 20)[0], torch.arange(9))
