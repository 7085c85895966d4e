"""Every shell and Python block of README and Getting started runs as it is pasted.

The blocks of a page run one after the other in one shell, in a checkout that `make setup` has
prepared, with a home folder of their own and nothing of the caller's environment but where models
and packages come from. Run by `make docs-check`; the pages name the default ports, which must be
free.
"""

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORTS = (7431, 7432, 8080)
# Variables that the blocks get from the caller: paths, language, how packages are downloaded.
KEPT = re.compile(r"PATH|PYTHONPATH|LANG|TERM|(https?|no)_proxy|PIP_.*|HF_.*|SSL_.*", re.IGNORECASE)
NOT_RUN = {"make test": "these tests are a part of it"}  # lines that are left out, and why
SAID = {
    "README.md": ("identical", "deque"),
    "docs/getting-started.md": ("A deque is", "dspark: ", "identical tokens: yes"),
}  # what the output of a page must have in it
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script(page: str) -> str:
    """The blocks of a page as one script, which ends at the first command that fails."""
    parts = ["set -eo pipefail; trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT"]
    for language, text in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        lines = [
            line for line in text.splitlines() if line.partition("#")[0].strip() not in NOT_RUN
        ]
        body = "\n".join(lines)
        parts.append(body if language == "sh" else f"python - <<'END'\n{body}\nEND")
    return "\n".join(parts) + "\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A home folder of its own with the caller's cached models; skips where there is no model."""
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    home = tmp_path_factory.mktemp("home")
    found = {**kept, "HOME": str(home), "XDG_CACHE_HOME": cache, "XDG_RUNTIME_DIR": str(home)}
    fetched = subprocess.run(
        [ROOT / ".venv/bin/paceline", "fetch", "smollm2"], env=found, capture_output=True, text=True
    )
    if fetched.returncode:
        pytest.skip(f"the pages need SmolLM2: {fetched.stderr.strip()}")
    return found


@pytest.mark.pages
@pytest.mark.parametrize("page", sorted(SAID))
def test_every_block_of_a_page_runs(page: str, environment: dict[str, str]) -> None:
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                pytest.fail(
                    f"port {port} is in use ({error}): stop its program, and run this again"
                )
    text = script(page)
    run = subprocess.run(
        ["bash", "-c", text],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, f"{text}\nended with {run.returncode}:\n{run.stdout}"
    for said in SAID[page]:
        assert said in run.stdout, f"{page}: {said!r} is not in\n{run.stdout}"
