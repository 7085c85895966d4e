"""Tiny random models of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoder_cases import FAMILIES, save_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a tiny random float32 model by name, see ``FAMILIES``."""
    base = tmp_path_factory.mktemp("models")
    return {name: save_model(base / name, name) for name in FAMILIES}
