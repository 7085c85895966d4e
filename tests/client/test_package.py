"""The package as users import it."""

import dataclasses
import inspect
import pydoc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import run_python

from paceline import client


def test_all_is_sorted_and_complete() -> None:
    assert client.__all__ == sorted(client.__all__) == dir(client)
    for name in client.__all__:
        assert getattr(client, name).__doc__, f"{name} has no docstring"


SAY_IT = {
    *("token_id", "token_ids", "prompt_tokens", "completion_tokens", "usage", "stats", "address"),
}  # fields whose names say what they are
CLASSES = filter(inspect.isclass, map(vars(client).get, client.__all__))


@pytest.mark.parametrize("kind", [*filter(dataclasses.is_dataclass, CLASSES)])
def test_help_describes_each_field(kind: type) -> None:
    text = pydoc.plain(pydoc.render_doc(kind)).partition("Attributes:")[2].partition("Method")[0]
    for field in dataclasses.fields(kind):
        described = "" if field.name in SAY_IT else r" \S.{8}"
        assert re.search(rf"\n \|      {field.name}:{described}", text), field.name


METHODS = {
    client.Client.generate: client.GenerationOptions,
    client.Client.chat: client.ChatOptions,
    client.SyncClient.generate: client.GenerationOptions,
    client.SyncClient.stream: client.GenerationOptions,
    client.SyncClient.chat: client.ChatOptions,
    client.SyncClient.stream_chat: client.ChatOptions,
}


@pytest.mark.parametrize("method", METHODS, ids=lambda each: each.__qualname__)
def test_help_describes_each_parameter(method: Callable[..., object]) -> None:
    """With its type, in the signature and in the text."""
    text = pydoc.plain(pydoc.render_doc(method))
    arguments = text.partition("Args:")[2]
    fields = dataclasses.fields(METHODS[method])
    signature = inspect.signature(method).parameters
    assert list(signature)[2:] == [field.name for field in fields]
    for field in fields:
        assert signature[field.name].annotation == field.type
        kind = re.escape(str(field.type))
        assert re.search(rf"\n        {field.name}: {kind}. \S", arguments)
    assert max(map(len, arguments.splitlines())) <= 100


ANY: Any = client  # the package without types, for wrong calls


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: ANY.Client().generate("x", max_tokens=3),
            "Client.generate() got an unexpected keyword argument 'max_tokens'; "
            "did you mean max_new_tokens?",
        ),
        (
            lambda: ANY.Client().generate("x", max_completion_tokens=3),
            "'max_completion_tokens'; did you mean max_new_tokens?",
        ),
        (lambda: ANY.Client().chat([], tool=[]), "Client.chat() got .*; did you mean tools?"),
        (lambda: ANY.Client().chat([], xyz=1), "Client.chat() got .* 'xyz'"),
        (
            lambda: ANY.SyncClient(verifier="x"),
            "SyncClient.__init__() got .* 'verifier'; did you mean verifier_address?",
        ),
        (lambda: ANY.Client(tokens="x"), "Client.__init__() got .* 'tokens'"),
        (lambda: ANY.Client().generate("x", 3), "Client.generate() takes 2 positional"),
    ],
)
def test_a_wrong_argument_names_the_users_function(call: Callable[[], object], said: str) -> None:
    pattern = re.escape(said).replace(r"\.\*", ".*")
    with pytest.raises(TypeError, match=pattern):
        call()


def test_the_client_needs_no_extra() -> None:
    """Packages of the extras cannot be imported."""
    program = """
import sys
for name in ("torch", "transformers", "numpy", "safetensors", "grpc_health", "grpc_reflection",
             "opentelemetry"):
    sys.modules[name] = None
import paceline.client, paceline.cli.generate, paceline.cli.main
sys.path.insert(0, sys.argv[1])
from fakes.transport import MockTransport
with paceline.client.SyncClient(transport=MockTransport("fine")) as client:
    print(client.generate("x").text)
"""
    done = run_python("-c", program, Path(__file__).parent.parent)
    assert (done.stdout, done.stderr) == ("fine\n", "")
