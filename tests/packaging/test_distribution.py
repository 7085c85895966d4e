"""What `pip install paceline` gives: whole, typed, with or without compiled kernels."""

import os
import re
import shutil
import subprocess
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import run_python

from paceline.kernels._compile import levels_here

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]
PREBUILT = "paceline/kernels/prebuilt/"
NO_COMPILER = {"CC": "no-such-compiler"}
SHOW = """
import paceline.kernels
from paceline.cli.main import main

print(paceline.kernels.__file__)
print(paceline.kernels.cpu_kernels().origin)
main(["--version"])
"""
compiles = pytest.mark.skipif(
    levels_here()[0] == "generic" or shutil.which(os.environ.get("CC", "gcc")) is None,
    reason="wheels with compiled kernels need gcc, and a processor with AVX2",
)


def run(*command: str, folder: Path, **environment: str) -> str:
    done = run_python(*command, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(target: str, source: Path, folder: Path, **environment: str) -> Path:
    run("-m", "hatchling", "build", "-t", target, "-d", str(folder), folder=source, **environment)
    (built,) = folder.iterdir()
    return built


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@dataclass(frozen=True)
class Distribution:
    sdist: Path
    wheel: Path  # built from the sdist
    pure: Path  # built from a clone where there is no compiler


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """From a clean copy: as from a fresh clone."""
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
    sdist = build("sdist", folder / "source", folder / "sdist")
    shutil.unpack_archive(sdist, folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Distribution(
        sdist=sdist,
        wheel=build("wheel", unpacked, folder / "wheel"),
        pure=build("wheel", folder / "source", folder / "pure", **NO_COMPILER),
    )


@pytest.mark.slow
def test_every_package_is_there_and_typed(built: Distribution) -> None:
    inside = names(built.pure)
    packages = {name.split("/")[1] for name in inside if name.count("/") > 1}
    expected = {"cli", "client", "drafter", "gateway", "kernels", "service", "v1", "verifier"}
    assert expected <= packages
    assert {f"paceline/{package}/py.typed" for package in packages} <= inside
    files = ("gateway/page/index.html", "gateway/page/main.js", "kernels/native/attention.c")
    assert {f"paceline/{name}" for name in files} <= inside
    assert "bench" not in packages, "it works from a source checkout only"
    assert "paceline/__init__.py" not in inside, "the namespace would be closed to others"
    assert built.pure.name.endswith("-py3-none-any.whl"), "without a compiler: for every platform"


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(built: Distribution) -> None:
    assert built.sdist.stat().st_size < 8 << 20
    sources = {name for name in names(built.wheel) if not name.startswith(PREBUILT)}
    assert sources == names(built.pure)


@compiles
@pytest.mark.slow
def test_a_wheel_with_kernels_is_for_its_platform(built: Distribution) -> None:
    assert built.wheel.name.endswith("-py3-none-linux_x86_64.whl")
    libraries = {name for name in names(built.wheel) if name.startswith(PREBUILT)}
    levels = sorted(name.split("-")[2] for name in libraries)
    assert levels == ["amx", "avx2", "avx512", "avx512bf16", "avx512vnni", "avxvnni"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("wheel", marks=compiles), "pure"])
def test_installed_where_there_is_no_compiler(
    built: Distribution, tmp_path: Path, kind: str
) -> None:
    wheel: Path = getattr(built, kind)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    run(*install, "--target", str(tmp_path / "site"), str(wheel), folder=tmp_path)
    environment = {
        **NO_COMPILER,
        "PACELINE_CPU_LEVEL": "",
        "PYTHONPATH": str(tmp_path / "site"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    if kind == "pure":
        with pytest.raises(AssertionError, match=r"Install gcc, or name a C compiler in CC; or"):
            run("-c", SHOW, folder=tmp_path, **environment)
        return
    where, origin, version = run("-c", SHOW, folder=tmp_path, **environment).splitlines()
    assert where.startswith(str(tmp_path / "site"))
    assert "the wheel" in origin
    assert version.split()[-1] in wheel.name


def test_all_requirements_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = set(project["dependencies"]).union(*project["optional-dependencies"].values())
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    # flash-attn compiles against the torch that is there.
    names_asked = {re.split(r"[^\w-]", line)[0] for line in asked}
    assert names_asked - {*pinned, "paceline"} == {"flash-attn"}
