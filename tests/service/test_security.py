"""TLS, client certificates, tokens, who a caller is, and whether it is on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from calls import failure, reason_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from paceline.service import OptionsError
from paceline.service.interceptor import owner_from

from .conftest import Pair, Serve
from .toy import KINDS, ask

TOKEN = "a-token-only-tests-know"


@pytest.fixture
def dial(pki: dict[str, Pair]) -> Callable[..., grpc.aio.Channel]:
    def open_channel(address: str, who: str | None = None) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(
                root_certificates=pki["authority"].cert.read_bytes(),
                private_key=pki[who].key.read_bytes() if who else None,
                certificate_chain=pki[who].cert.read_bytes() if who else None,
            ),
        )

    return open_channel


def bearer(token: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {token}"),)}


async def test_tls_serves_those_who_speak_it(
    serve: Serve, pki: dict[str, Pair], dial: Callable[..., grpc.aio.Channel]
) -> None:
    served = await serve(tls_cert=pki["server"].cert, tls_key=pki["server"].key)
    async with dial(served.address) as channel:
        assert await ask(channel, "StreamStream", "hello") == "hello"
    async with served.channel() as plain:
        error = await failure(ask(plain, "UnaryUnary", "hello"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_mtls_serves_only_certificates_of_its_authority(
    serve: Serve, pki: dict[str, Pair], dial: Callable[..., grpc.aio.Channel]
) -> None:
    served = await serve(
        tls_cert=pki["server"].cert, tls_key=pki["server"].key, tls_client_ca=pki["authority"].cert
    )
    owners = []
    for who in ("client", "client", "colleague"):
        async with dial(served.address, who) as channel:
            owners.append(await ask(channel, "UnaryUnary", "owner"))
    assert owners[0] == owners[1] != owners[2]
    assert "local" not in owners
    for who in (None, "stranger"):
        async with dial(served.address, who) as channel:
            error = await failure(ask(channel, "UnaryUnary", "owner"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_without_the_token_is_unauthenticated(serve: Serve, kind: str) -> None:
    served = await serve(token=TOKEN)
    given = ("Bearer wrong", "Bearer ", f"Bearer {TOKEN}x", TOKEN, f"Basic {TOKEN}")
    async with served.channel() as channel:
        for metadata in ((), *((("authorization", words),) for words in given)):
            error = await failure(ask(channel, kind, None, metadata=metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert reason_of(error) == "UNAUTHENTICATED"
            assert TOKEN not in repr(error)
        assert await ask(channel, kind, "hello", **bearer(TOKEN)) == "hello"


async def test_health_needs_no_token_and_reflection_does(serve: Serve) -> None:
    served = await serve(token=TOKEN)
    async with served.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        response = await health.Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        error = await failure(reflection.ServerReflectionInfo())
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_callers_with_other_tokens_are_other_owners(serve: Serve) -> None:
    served = await serve()
    async with served.channel() as channel:
        nobody = await ask(channel, "UnaryUnary", "owner")
        one = await ask(channel, "UnaryUnary", "owner", **bearer("one"))
        again = await ask(channel, "StreamStream", "owner", **bearer("one"))
        two = await ask(channel, "UnaryUnary", "owner", **bearer("two"))
    assert nobody == "local"
    assert one == again
    assert len({nobody, one, two}) == 3
    assert "one" not in one


def test_a_certificate_names_its_holder_whatever_token_comes_with_it() -> None:
    auth = {"x509_common_name": [b"client"]}
    first = owner_from([("authorization", "Bearer a")], auth)
    assert first == owner_from([("authorization", "Bearer b")], auth)
    assert first != owner_from([("authorization", "Bearer client")], {})


@pytest.mark.parametrize("broken", ["missing", "no-pem", "swapped", "not-a-pair", "authority"])
async def test_bad_tls_files_are_clear_errors(
    serve: Serve, pki: dict[str, Pair], tmp_path: Path, broken: str
) -> None:
    cert, key = pki["server"].cert, pki["server"].key
    if broken == "missing":
        cert = tmp_path / "none.pem"
    elif broken == "no-pem":
        cert = tmp_path / "text.pem"
        cert.write_text("hello")
    elif broken == "swapped":
        cert, key = key, cert
    elif broken == "not-a-pair":
        key = pki["client"].key
    authority = key if broken == "authority" else pki["authority"].cert
    with pytest.raises(OptionsError, match="PEM certificate"):
        await serve(tls_cert=cert, tls_key=key, tls_client_ca=authority)
