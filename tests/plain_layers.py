"""Linear layers that are not packed, as on a GPU, on the CPU."""

from types import SimpleNamespace

import pytest


def keep_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on layers keep plain weights as they come, and PyTorch multiplies."""
    gpu = SimpleNamespace(packs=False)
    monkeypatch.setattr("paceline.decoder.linear.device_of", lambda place: gpu)
