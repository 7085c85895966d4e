"""The metrics endpoint of a server, scraped over a real socket."""

import asyncio
import http.client
import socket
import ssl
import time

import grpc
import pytest
from calls import free_address
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from paceline.service import OptionsError, limits

from .conftest import Pair, Serve, eventually
from .toy import ask

TOKEN = "a-token-only-tests-know"


def get(
    address: str, path: str = "/metrics", tls: ssl.SSLContext | None = None, **headers: str
) -> http.client.HTTPResponse:
    host, _, port = address.rpartition(":")
    if tls is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=tls)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def rpcs(address: str, **headers: str) -> dict[tuple[str, str, str], float]:
    text = get(address, **headers).read().decode()
    return {
        (s.labels["rpc_method"], s.labels["code"], s.labels["reason"]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == "specdec_rpcs_total"
    }


async def test_calls_are_counted_by_how_they_ended(serve: Serve) -> None:
    address = free_address()
    served = await serve(metrics_address=address)
    async with served.channel() as channel:
        for order in ("one", "two", "fail", "bug"):
            try:
                await ask(channel, "UnaryUnary", order)
            except grpc.aio.AioRpcError:
                assert order in ("fail", "bug")
        await ask(channel, "StreamStream", "three")
        for name in ("made-up", "another"):  # what callers make up is no series of its own
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/toy.Toy/{name}")(b"")
    # A call is counted after its caller has the answer.
    await eventually(lambda: sum(rpcs(address).values()) == 7)
    assert await asyncio.to_thread(rpcs, address) == {
        ("UnaryUnary", "OK", ""): 2,
        ("UnaryUnary", "RESOURCE_EXHAUSTED", "FULL"): 1,
        ("UnaryUnary", "INTERNAL", "INTERNAL_ERROR"): 1,
        ("StreamStream", "OK", ""): 1,
        ("unknown", "UNIMPLEMENTED", "METHOD_UNKNOWN"): 2,
    }


async def test_both_formats_and_no_other_path(serve: Serve) -> None:
    address = free_address()
    await serve(metrics_address=address)

    def scrape() -> None:
        plain = get(address).read().decode()
        assert any("process" in f.name for f in text_string_to_metric_families(plain))
        response = get(address, accept="application/openmetrics-text; version=1.0.0")
        assert "openmetrics" in (response.headers["content-type"] or "")
        assert any("process" in f.name for f in open_metrics(response.read().decode()))
        assert get(address, "/metrics?x=1").status == 200
        assert get(address, "/").status == 404

    await asyncio.to_thread(scrape)


@pytest.mark.parametrize("insecure", [False, True])
async def test_readers_show_the_token_unless_told_otherwise(serve: Serve, insecure: bool) -> None:
    address = free_address()
    await serve(token=TOKEN, metrics_address=address, insecure_metrics=insecure)

    def scrape() -> list[int]:
        headers: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Bearer {TOKEN}"},
        ]
        return [get(address, **each).status for each in headers]

    assert await asyncio.to_thread(scrape) == ([200] * 3 if insecure else [401, 401, 200])


async def test_readers_speak_tls_and_show_certificates(serve: Serve, pki: dict[str, Pair]) -> None:
    address = free_address()
    server = pki["server"]
    authority = pki["authority"].cert
    await serve(
        tls_cert=server.cert, tls_key=server.key, tls_client_ca=authority, metrics_address=address
    )

    def context(who: str | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=authority)
        if who is not None:
            context.load_cert_chain(pki[who].cert, pki[who].key)
        return context

    def scrape() -> None:
        assert get(address, tls=context("client")).status == 200
        for tls in (None, context(None), context("stranger")):
            with pytest.raises((OSError, http.client.HTTPException)):
                get(address, tls=tls).read()
        assert get(address, tls=context("client")).status == 200

    await asyncio.to_thread(scrape)


async def test_an_address_in_use_is_refused(serve: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OptionsError, match=f"cannot serve metrics on {address}: .*in use"):
            await serve(metrics_address=address)


async def test_a_request_that_drips_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "METRICS_SECONDS", 1.0)
    address = free_address()
    await serve(metrics_address=address)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert await asyncio.to_thread(closed_while_it_drips, connection)


def closed_while_it_drips(connection: socket.socket) -> bool:
    """Send a line every tenth of a second, until the other end has closed the connection."""
    for _ in range(600):
        try:
            connection.sendall(b"x: y\r\n")
        except OSError:
            return True
        time.sleep(0.1)
    return False
