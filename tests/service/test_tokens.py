"""Tokens: where they may be sent, and who finds the one that a service made. Text files."""

import os
from pathlib import Path

import pytest

from paceline.drafter.connection import ServiceParts
from paceline.drafter.exchange import Exchange
from paceline.drafter.kv.exchange import KvExchange, VerifierAccess
from paceline.service.files import decoded, read_text
from paceline.service.options import OptionsError, read_token
from paceline.tokens import TokenError, check_encrypted, is_local, local_token, own_token

ADDRESSES = ("127.0.0.1:7431", "127.0.0.1:7432")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "paceline"


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("unix:/a/b", True),
        ("127.8.9.1:1", True),
        ("10.0.0.1:1", False), ("example.org:1", False), ("[2001:db8::1]:1", False),
        ("localhost.example.org:1", False), ("dns:///example.org:1", False), ("0.0.0.0:1", True),
    ],
)  # fmt: skip
def test_a_token_leaves_this_machine_encrypted_only(address: str, local: bool) -> None:
    """The same for clients and drafter services."""
    assert is_local(address) is local
    check_encrypted(address, None, tls=False)
    check_encrypted(address, "secret", tls=True)
    access = VerifierAccess(token="secret")
    parts = ServiceParts(*[None] * 2, KvExchange(access), *[None] * 3, 1, 1)  # type: ignore[arg-type]
    if local:
        check_encrypted(address, "secret", tls=False)
        access.metadata(address)
        Exchange([address], parts)
        return
    with pytest.raises(TokenError, match="unencrypted"):
        check_encrypted(address, "secret", tls=False)
    with pytest.raises(TokenError, match="unencrypted"):
        access.metadata(address)
    if not address.startswith("dns:"):
        with pytest.raises(OptionsError, match=r"unencrypted.*--verifier-tls-ca"):
            Exchange([address], parts)


def test_its_own_commands_find_the_token_of_a_service(folder: Path) -> None:
    with own_token(ADDRESSES) as file:
        token = file.read_text()
        assert len(token) >= 32
        assert file.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        assert local_token("localhost:7431") == local_token("[::1]:7432") == token
        assert VerifierAccess().metadata(ADDRESSES[0]) == (("authorization", f"Bearer {token}"),)
        assert VerifierAccess(token="given").metadata(ADDRESSES[0])[0][1] == "Bearer given"
        assert local_token("127.0.0.1:7433") is None
        assert local_token("10.0.0.1:7431") is None, "it is of this machine alone"
        assert VerifierAccess().metadata("10.0.0.1:7431") == ()
    assert local_token(ADDRESSES[0]) is None
    assert not list(folder.iterdir())


def test_every_start_has_another_and_leaves_that_of_a_later_one() -> None:
    with own_token(ADDRESSES) as first:
        old = first.read_text()
        with own_token(ADDRESSES[:1]) as second:
            assert second.read_text() != old
        with own_token(ADDRESSES[:1]):
            pass
    later = own_token(ADDRESSES)
    with own_token(ADDRESSES):
        file = later.__enter__()
    assert local_token(ADDRESSES[0]) == file.read_text()
    later.__exit__(None, None, None)


def test_of_a_unix_socket_by_its_path() -> None:
    with own_token(["unix:/a", "unix:/b"]):
        assert local_token("unix:/a") == local_token("unix:/b") is not None
        assert local_token("unix:/c") is None


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_of_others_is_not_trusted(folder: Path, mode: int) -> None:
    with own_token(ADDRESSES):
        folder.chmod(mode)
        assert local_token(ADDRESSES[0]) is None
        with pytest.raises(TokenError, match="alone"), own_token(ADDRESSES):
            pass
        folder.chmod(0o700)


def test_nor_a_link(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    folder.symlink_to(other)
    with pytest.raises(TokenError, match="alone"), own_token(ADDRESSES):
        pass
    folder.unlink()
    with own_token(ADDRESSES):
        os.replace(folder / "7431.token", tmp_path / "elsewhere")
        (folder / "7431.token").symlink_to(tmp_path / "elsewhere")
        assert local_token(ADDRESSES[0]) is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_names_the_encoding_and_is_no_text(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes("naïve\r\n日\n".encode(encoding))
    assert read_text(file) == "naïve\n日\n"
    file.write_bytes("secret\r\n".encode(encoding))
    assert read_token(file) == "secret"
    assert decoded("a\ufeffb".encode(), "x") == "a\ufeffb", "within a text it is left"


def test_bytes_that_are_no_text_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"file is not text in UTF-8: byte 2 is invalid"):
        read_text(file)
    with pytest.raises(OptionsError, match=r"cannot read the token file .*: byte 2"):
        read_token(file)
