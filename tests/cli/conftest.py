from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.harness import ServiceProcess


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random target with a tokenizer."""
    from tiny_models import write_model, write_tokenizer

    folder = tmp_path_factory.mktemp("target")
    write_model("small", folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def registry() -> Iterator[ServiceProcess]:
    """A drafter process with one drafter, `main`, that asks for the token `secret`."""
    drafter = ServiceProcess(
        "drafter", ["--load", "main=ngram"], environment={"PACELINE_TOKEN": "secret"}
    )
    with drafter:
        yield drafter


def serving(address: str) -> bool:
    """Whether the service at `address` says that it serves."""
    with grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=60
            )
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
