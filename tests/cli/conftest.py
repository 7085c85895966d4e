import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.harness import ServiceProcess

FREE_PORTS = [f"--{kind}-address=127.0.0.1:0" for kind in ("verifier", "drafter", "gateway")]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random target with a tokenizer."""
    from tiny_models import write_model, write_tokenizer

    folder = tmp_path_factory.mktemp("target")
    write_model("small", folder)
    write_tokenizer(folder)
    return folder


def write_for_gguf(kind: str, folder: Path) -> Path:
    """A tiny model with all that a GGUF file needs: a merge, and tokens that begin and end."""
    from tiny_models import write_model, write_tokenizer

    write_model(kind, folder)
    write_tokenizer(folder)
    described = json.loads((folder / "config.json").read_text())
    described |= {"bos_token_id": 0, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(described))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = tokenizer["model"]["vocab"]
    tokens["ab"] = tokens.pop("<spare256>")
    tokenizer["model"]["merges"] = [["a", "b"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
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
