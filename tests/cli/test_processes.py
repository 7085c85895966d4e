"""Real service processes, started and stopped in every way."""

import json
from pathlib import Path

import pytest

from paceline.harness import ProcessFailed, ServiceProcess

from .conftest import serving


def test_it_serves_in_the_block_and_leaves_nothing(target: Path) -> None:
    verifier = ServiceProcess("verifier", ["--target", str(target), "--kv-bytes", "64MiB"])
    with verifier:
        assert serving(verifier.address)
        folder = verifier._ready_file.parent
        lines = [json.loads(line) for line in verifier.log_tail().splitlines()]
        assert any(line["message"] == "serving" for line in lines)
    assert verifier.returncode == 0
    assert not serving(verifier.address)
    assert not folder.exists()
    verifier.stop()


@pytest.mark.parametrize(
    ("command", "address", "message"),
    [
        ("verifier --target /nowhere/at/all", "127.0.0.1:0", "/nowhere/at/all"),
        ("verifier", "127.0.0.1:0", "--target"),
        ("verifier --target {target}", "0.0.0.0:0", "without TLS and a token"),
        ("verifier --target {target} --threads 0", "127.0.0.1:0", "--threads"),
        ("verifier --target {target} --lease-seconds -1", "127.0.0.1:0", "lease_seconds"),
        ("verifier --target {target} --token-file /nowhere", "127.0.0.1:0", "token file"),
        ("drafter --load x=no-such-method", "127.0.0.1:0", "no-such-method"),
        ("drafter --load x=ngram,no_such_option=1", "127.0.0.1:0", "no_such_option"),
        (f"drafter --verifier-tls-ca {__file__}", "127.0.0.1:0", "no PEM certificates"),
    ],
)
def test_a_failed_start_reports_why_with_code_2(
    target: Path, command: str, address: str, message: str
) -> None:
    kind, *arguments = command.format(target=target).split()
    process = ServiceProcess(kind, arguments, address=address)  # type: ignore[arg-type]
    with pytest.raises(ProcessFailed, match="ended with code 2") as failed, process:
        pytest.fail("it started")
    assert message in str(failed.value)
    assert "Traceback" not in str(failed.value)


def test_a_process_that_was_never_started_is_an_error() -> None:
    drafter = ServiceProcess("drafter", ["--load", "ngram"])
    for use in (lambda: drafter.address, lambda: drafter.pid, drafter.kill):
        with pytest.raises(RuntimeError, match="start"):
            use()
    drafter.stop()
