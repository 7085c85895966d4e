"""The example of each call, on real services."""

import asyncio
import subprocess
import sys
from pathlib import Path

from paceline.harness import local_services

ROOT = Path(__file__).parents[2]


async def test_the_example_of_each_call_runs() -> None:
    target = ["--target", str(ROOT / "models" / "demo" / "target")]
    with local_services(target, ["--load=ngram"]) as (verifier, _):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, str(ROOT / "docs" / "examples" / "calls.py"), verifier.address],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert "top_k must be an integer >= 0 (0 keeps all tokens), not -1" in done.stdout
    assert "('local', 'ngram')" in done.stdout
