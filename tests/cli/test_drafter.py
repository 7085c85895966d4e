"""What `paceline drafter` can be told."""

import pytest

from paceline.harness import ProcessFailed, ServiceProcess


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--load", "x=no-such-method"], "no-such-method"),
        (["--load", "none=ngram"], "none"),
        (["--load", "x=ngram,no_such_option=1"], "no_such_option"),
        (["--load", "x=lm:/nowhere/at/all"], "/nowhere/at/all"),
        (["--load", "x=ngram", "--verifier-tls-ca", "/nowhere/ca.pem"], "/nowhere/ca.pem"),
        (["--load", "x=ngram", "--verifier-tls-ca", __file__], "no PEM certificates"),
    ],
)
def test_what_cannot_be_loaded_says_why_with_code_2(arguments: list[str], says: str) -> None:
    process = ServiceProcess("drafter", arguments)
    with pytest.raises(ProcessFailed, match="ended with code 2") as failed, process:
        pytest.fail("it started")
    assert says in str(failed.value)
    assert "Traceback" not in str(failed.value)
