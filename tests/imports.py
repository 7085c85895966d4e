"""What a program imports."""

import subprocess
import sys


def packages_after(code: str) -> set[str]:
    """Top-level packages that a new interpreter has imported after it ran some code."""
    probe = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
