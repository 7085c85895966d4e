"""The package as users import it."""

import dataclasses
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import client


def test_all_is_sorted_and_complete() -> None:
    assert client.__all__ == sorted(client.__all__)
    for name in client.__all__:
        assert getattr(client, name).__doc__, f"{name} has no docstring"


SAY_IT = {
    "token_id",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "usage",
    "stats",
    "address",
}
"""Fields whose names say what they are."""

TYPES = [
    each
    for each in map(vars(client).get, client.__all__)
    if inspect.isclass(each) and not issubclass(each, Exception)
]


@pytest.mark.parametrize("kind", [each for each in TYPES if dataclasses.is_dataclass(each)])
def test_help_describes_each_field(kind: type) -> None:
    text = pydoc.plain(pydoc.render_doc(kind)).partition("Attributes:")[2].partition("Method")[0]
    for field in dataclasses.fields(kind):
        described = "" if field.name in SAY_IT else r" \S.{8}"
        assert re.search(rf"\n \|      {field.name}:{described}", text), field.name


def test_each_type_has_a_readable_repr() -> None:
    assert not {each for each in TYPES if each.__repr__ is object.__repr__}


def test_the_client_needs_no_extra() -> None:
    """Packages of the extras cannot be imported."""
    program = """
import sys
for name in ("torch", "transformers", "numpy", "safetensors", "grpc_health", "grpc_reflection",
             "opentelemetry"):
    sys.modules[name] = None
import paceline.client, paceline.cli.generate, paceline.cli.main
sys.path.insert(0, sys.argv[1])
from mock_transport import MockTransport
with paceline.client.SyncClient(transport=MockTransport("fine")) as client:
    print(client.generate("x").text)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent.parent)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")
