"""The package as users import it."""

import subprocess
import sys

from paceline import client


def test_all_is_sorted_and_complete() -> None:
    assert client.__all__ == sorted(client.__all__)
    for name in client.__all__:
        assert getattr(client, name).__doc__, f"{name} has no docstring"


def test_the_client_needs_no_extra() -> None:
    """Packages of the extras cannot be imported."""
    program = """
import sys
for name in ("torch", "transformers", "numpy", "safetensors", "grpc_health", "grpc_reflection",
             "opentelemetry"):
    sys.modules[name] = None
import paceline.client, paceline.cli.generate, paceline.cli.main
with paceline.client.SyncClient(transport=paceline.client.MockTransport("fine")) as client:
    print(client.generate("x").text)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")
