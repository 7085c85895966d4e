"""Text files as editors and shells of several systems write them."""

from pathlib import Path

import pytest

from paceline.service.files import decoded, read_text
from paceline.service.options import OptionsError, read_token


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_names_the_encoding_and_is_no_text(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes("naïve\r\n日\n".encode(encoding))
    assert read_text(file) == "naïve\n日\n"


def test_a_mark_within_a_text_is_left() -> None:
    assert decoded("a\ufeffb".encode(), "x") == "a\ufeffb"


def test_bytes_that_are_no_text_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"file is not text in UTF-8: byte 2 is invalid"):
        read_text(file)
    with pytest.raises(OptionsError, match=r"cannot read the token file .*: byte 2"):
        read_token(file)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_token_from_a_file_of_windows(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes("secret\r\n".encode(encoding))
    assert read_token(file) == "secret"
