"""Nothing that runs on a server reads a format that can carry code, or a clock that is set."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("services", "kernels", "client") for path in (ROOT / folder).rglob("*.py")
)
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}


def faults(tree: ast.Module) -> list[str]:
    """What a module does that it must not, with line numbers."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [
            f"{node.lineno}: imports {name}"  # type: ignore[attr-defined]
            for name in names
            if name.partition(".")[0] in FORBIDDEN_MODULES
        ]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in ("torch.load", "load_state_dict_from_url", "torch.hub.load"):
                if words.get("weights_only") != "True":
                    found.append(f"{node.lineno}: {called} without weights_only=True")
            elif called in ("np.load", "numpy.load") and "allow_pickle" in words:
                found.append(f"{node.lineno}: {called} with allow_pickle")
            elif called in FORBIDDEN_CALLS:
                found.append(f"{node.lineno}: {called}")
            elif words.get("trust_remote_code", "False") != "False":
                found.append(f"{node.lineno}: trust_remote_code")
    return found


def test_nothing_is_unpickled() -> None:
    found = {path: faults(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert not {str(path.relative_to(ROOT)): lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from pickle import loads", "import torch\ntorch.load(x)",
     "torch.load(x, weights_only=False)", "eval(x)", "np.load(x, allow_pickle=True)",
     "AutoTokenizer.from_pretrained(x, trust_remote_code=True)"],
)  # fmt: skip
def test_the_test_sees_what_it_looks_for(text: str) -> None:
    assert faults(ast.parse(text))


SERVICES = Path(__file__).parents[2] / "services"
WALL = re.compile(r"\btime\.time\(|datetime\.(now|utcnow|today)\(|\btime\.localtime\(")


def test_no_lease_and_no_timeout_depends_on_the_time_of_day() -> None:
    """A jump of the clock would end them all at once, or never."""
    files = [*SERVICES.rglob("*.py")]
    found = [str(file) for file in files if WALL.search(file.read_text(encoding="utf-8"))]
    assert len(files) > 100
    assert not found
