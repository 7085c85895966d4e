"""The metrics endpoint of a server, and names of telemetry beside semantic conventions."""

import ast
import asyncio
import http.client
import re
import socket
import ssl
import time
from itertools import pairwise
from pathlib import Path

import grpc
import opentelemetry.semconv
import pytest
from calls import eventually
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import GenAiOperationNameValues
from opentelemetry.semconv._incubating.attributes.rpc_attributes import RpcSystemNameValues
from opentelemetry.semconv.schemas import Schemas
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from paceline.harness import with_port
from paceline.service import OptionsError, limits
from paceline.telemetry.names import CREATE_CACHE, SCHEMA_URL, Attribute, Span

from .conftest import Pair, Serve
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
    address = with_port("127.0.0.1:0")
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
    await asyncio.to_thread(eventually, lambda: sum(rpcs(address).values()) == 7, "all counted")
    assert await asyncio.to_thread(rpcs, address) == {
        ("UnaryUnary", "OK", ""): 2,
        ("UnaryUnary", "RESOURCE_EXHAUSTED", "FULL"): 1,
        ("UnaryUnary", "INTERNAL", "INTERNAL_ERROR"): 1,
        ("StreamStream", "OK", ""): 1,
        ("unknown", "UNIMPLEMENTED", "METHOD_UNKNOWN"): 2,
    }


async def test_both_formats_and_no_other_path(serve: Serve) -> None:
    address = with_port("127.0.0.1:0")
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
    address = with_port("127.0.0.1:0")
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
    address = with_port("127.0.0.1:0")
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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OptionsError, match=f"cannot serve metrics on {address}: .*in use"):
            await serve(metrics_address=address)


async def test_a_request_that_drips_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "METRICS_SECONDS", 1.0)
    address = with_port("127.0.0.1:0")
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


DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "metrics.md").read_text() + (DOCS / "look-inside.md").read_text()
CONVENTIONS = Path(opentelemetry.semconv.__path__[0])


def constants(kind: str) -> dict[str, str]:
    """Names of attributes or metrics in the installed conventions, with what is said of each."""
    found: dict[str, str] = {}
    for file in sorted(CONVENTIONS.glob(f"**/{kind}/*.py")):  # stable ones come last
        body = ast.parse(file.read_text()).body
        for node, text in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
                described = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                found[str(node.value.value)] = str(text.value.value) if described else ""
    return found


def values(table: type) -> dict[str, str]:
    return {key: value for key, value in vars(table).items() if not key.startswith("_")}


def test_attributes_are_in_the_conventions_or_our_own() -> None:
    conventions = constants("attributes")
    assert len(conventions) > 500
    for name in values(Attribute).values():
        if name.startswith("specdec."):
            assert name not in conventions
            assert f"`{name}`" in DOCUMENT
        else:
            assert name in conventions
            described = conventions[name]
            assert "Deprecated" not in described or "Moved to" in described, name


def test_values_are_in_the_conventions() -> None:
    assert SCHEMA_URL in {schema.value for schema in Schemas}
    operations = {operation.value for operation in GenAiOperationNameValues}
    assert {Span.GENERATION, Span.CHAT} <= operations
    assert all(name in DOCUMENT for name in values(Span).values())
    assert CREATE_CACHE[Attribute.RPC_SYSTEM] == RpcSystemNameValues.GRPC.value


def test_metrics_are_in_the_conventions_or_our_own() -> None:
    """The tables list all that there is, see `documented_metrics.py`."""
    conventions = {f"{name.replace('.', '_')}_seconds" for name in constants("metrics")}
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert names
    for name in names - conventions:
        assert name.startswith("specdec_")
