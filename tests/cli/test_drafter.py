"""What `paceline drafter` can be told."""

from pathlib import Path

import pytest

from paceline.harness import ProcessFailed, ServiceProcess

from .conftest import serving

METHOD = """
from paceline.drafter.methods.ngram import NgramDrafter


class Mine(NgramDrafter):
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--load", "x=no-such-method"], "no-such-method"),
        (["--load", "none=ngram"], "none"),
        (["--load", "x=ngram,no_such_option=1"], "no_such_option"),
        (["--load", "x=lm:/nowhere/at/all"], "/nowhere/at/all"),
        (["--load", "x=ngram", "--verifier-tls-ca", "/nowhere/ca.pem"], "/nowhere/ca.pem"),
        (["--load", "x=ngram", "--verifier-tls-ca", __file__], "no PEM certificates"),
        (["--test-method", "mine"], "NAME=MODULE:CLASS"),
        (["--test-method", "mine=m:C"], "--allow-test-methods"),
        (["--allow-test-methods", "--test-method=mine=nowhere:C", "--load=mine"], "nowhere"),
    ],
)
def test_what_cannot_be_loaded_says_why_with_code_2(arguments: list[str], says: str) -> None:
    process = ServiceProcess("drafter", arguments)
    with pytest.raises(ProcessFailed, match="ended with code 2") as failed, process:
        pytest.fail("it started")
    assert says in str(failed.value)
    assert "Traceback" not in str(failed.value)


def test_a_method_of_the_tests_is_served_when_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(METHOD)
    arguments = ["--allow-test-methods", "--test-method", "m=mine:Mine", "--load", "x=m"]
    with ServiceProcess("drafter", arguments, environment={"PYTHONPATH": str(tmp_path)}) as drafter:
        assert serving(drafter.address)
