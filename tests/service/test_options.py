"""Validation of server options."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from paceline.service import OptionsError, ServerOptions, add_server_arguments

TLS: dict[str, Any] = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:0", "127.8.9.10:7431", "[::1]:0", "localhost:0", "unix:/run/x.sock", "unix:x.sock"],
)
def test_this_machine_needs_neither_tls_nor_token(address: str) -> None:
    assert ServerOptions(address).address == address


@pytest.mark.parametrize("address", ["0.0.0.0:7431", "[::]:7431", "192.0.2.1:80", "10.0.0.1:0"])
@pytest.mark.parametrize("options", [{}, TLS, {"token": "t"}], ids=["neither", "tls", "token"])
def test_other_machines_need_both(address: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match=r"refusing to listen .* without TLS and a token"):
        ServerOptions(address, **options)
    assert ServerOptions(address, **TLS, token="t").address == address


@pytest.mark.parametrize(
    "address",
    [
        *("", "127.0.0.1", ":7431", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "::1:80"),
        *("unix:", "unix://", "unix://host/path", "unix-abstract:x", "127.0.0.1:٣", "no.invalid:1"),
    ],
)
def test_an_address_of_no_known_form_is_refused(address: str) -> None:
    with pytest.raises(OptionsError, match="address"):
        ServerOptions(address)


@pytest.mark.parametrize(
    "options",
    [
        {"tls_cert": Path("a")},
        {"tls_key": Path("a")},
        {"tls_client_ca": Path("a")},
        {"token": ""},
        {"token": "two\nlines"},
        {"token": "ünicode"},
        {"max_message_bytes": 1},
        {"max_message_bytes": 2**31},
        {"max_concurrent_streams": 0},
        {"drain_seconds": -1.0},
        {"drain_seconds": float("nan")},
        {"drain_seconds": float("inf")},
        *({"metrics_address": each} for each in ("unix:/x", "127.0.0.1", "127.0.0.1:99999", "")),
        {"insecure_metrics": True},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        ServerOptions("127.0.0.1:0", **options)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="127.0.0.1:0")
    add_server_arguments(parser)
    return parser.parse_args(words)


def test_arguments_become_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    assert ServerOptions.from_args(parse()) == ServerOptions("127.0.0.1:0")
    monkeypatch.setenv("PACELINE_TOKEN", "from-environment")
    assert ServerOptions.from_args(parse()).token == "from-environment"
    secret = tmp_path / "token"
    secret.write_text("from-file\n")
    options = ServerOptions.from_args(
        parse(
            *("--address", "0.0.0.0:1", "--tls-cert", "c", "--tls-key", "k", "--tls-client-ca=a"),
            *("--token-file", str(secret), "--max-message-mib", "8", "--drain-seconds", "5"),
            *("--max-concurrent-streams", "7", "--metrics-address", "[::1]:9431"),
        )
    )
    assert options == ServerOptions(
        "0.0.0.0:1", tls_cert=Path("c"), tls_key=Path("k"), tls_client_ca=Path("a"),
        token="from-file", max_message_bytes=8 * 2**20, max_concurrent_streams=7, drain_seconds=5.0,
        metrics_address="[::1]:9431",
    )  # fmt: skip


def test_metrics_leave_this_machine_as_calls_do_or_when_told_to() -> None:
    here, everywhere = "127.0.0.1:9431", "0.0.0.0:9431"
    assert ServerOptions(here, metrics_address=here).metrics_host_and_port == ("127.0.0.1", 9431)
    for options in ({}, {"token": "t"}, TLS):
        with pytest.raises(OptionsError, match=r"refusing to serve metrics .* --insecure-metrics"):
            ServerOptions(here, metrics_address=everywhere, **options)
    ServerOptions(here, metrics_address=everywhere, **TLS, token="t")
    ServerOptions(here, metrics_address=everywhere, insecure_metrics=True)
    # Saying so for metrics says nothing about calls.
    with pytest.raises(OptionsError, match="refusing to listen"):
        ServerOptions(everywhere, metrics_address=everywhere, insecure_metrics=True)


def test_a_token_file_without_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary", "missing"):
        with pytest.raises(OptionsError, match="token file"):
            ServerOptions.from_args(parse("--token-file", str(tmp_path / name)))
