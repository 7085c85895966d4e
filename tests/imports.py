"""What a program imports."""

from programs import run_python


def packages_after(code: str) -> set[str]:
    """Top-level packages that a new interpreter has imported after it ran some code."""
    probe = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = run_python("-c", probe)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
