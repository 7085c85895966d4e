"""OpenAI's client for Node, which `make clients` installs in .make/clients."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import MODEL, TOOL

PACKAGES = Path(__file__).parents[2] / ".make" / "clients"
PROGRAM = Path(__file__).with_name("client.mjs")


def test_the_client_for_node(url: str) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    if not (PACKAGES / "node_modules" / "openai").is_dir():
        pytest.skip("make clients installs the package openai")
    command = ["node", "--input-type=module", "-", url, MODEL, json.dumps(TOOL)]
    with PROGRAM.open() as program:
        # A program from stdin imports packages of the current folder.
        done = subprocess.run(
            command, cwd=PACKAGES, stdin=program, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
