"""What `pip install paceline` gives: whole, typed, and the same from wheel and sdist."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]


def run(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist of a clean copy: as from a fresh clone."""
    folder = tmp_path_factory.mktemp("distribution")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in tracked.stdout.decode().split("\0"):
        source = ROOT / name
        if name and not name.startswith(("models/", "bench/results/")) and source.is_file():
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    run("-m", "hatchling", "build", "-d", str(folder / "dist"), folder=folder / "source")
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_every_package_is_there_and_typed(built: tuple[Path, Path]) -> None:
    inside = names(built[0])
    packages = {name.split("/")[1] for name in inside if name.count("/") > 1}
    assert {
        "cli",
        "client",
        "drafter",
        "gateway",
        "kernels",
        "service",
        "v1",
        "verifier",
    } <= packages
    assert {f"paceline/{package}/py.typed" for package in packages} <= inside
    assert {"paceline/gateway/page.html", "paceline/kernels/native/attention.c"} <= inside
    assert "paceline/__init__.py" not in inside, "the namespace would be closed to others"


def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    assert sdist.stat().st_size < 8 << 20
    shutil.unpack_archive(sdist, tmp_path)
    (source,) = tmp_path.iterdir()
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist"), folder=source)
    (again,) = (tmp_path / "dist").glob("*.whl")
    assert names(again) == names(wheel)


def test_the_installed_command_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    run(*install, str(tmp_path / "site"), str(built[0]), folder=tmp_path)
    path = {"PYTHONPATH": str(tmp_path / "site")}
    where = run("-c", "import paceline.client as c; print(c.__file__)", folder=tmp_path, **path)
    assert where.startswith(str(tmp_path / "site"))
    version = run("-m", "paceline.cli.main", "--version", folder=tmp_path, **path)
    assert version.split()[-1] in built[0].name
