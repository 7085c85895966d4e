"""The images for GPUs, on a machine without one: they compile for it, and compute on the CPU."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import COMPOSE, DEMO, Deployment, serving


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """`compose/cpu.yml` with those images and all drafters of the demo target."""
    target = f"target={DEMO}/target"
    loads = [f"--load {name}={name}:{DEMO}/{name},{target}" for name in ("longspec", "dspark")]
    settings = {"PACELINE_DRAFTER_ARGS": " ".join([*loads, "--load ngram=ngram"])}
    folder = tmp_path_factory.mktemp("cuda")
    with serving("cpu", folder, project="cuda", over=["cuda"], environment=settings) as running:
        yield running


def test_what_a_gpu_needs_is_compiled_and_kept(deployment: Deployment) -> None:
    lines = deployment.run("run", "--rm", "-T", "compiler").splitlines()
    facts = {each["kernel"]: each for each in map(json.loads, lines[:2])}
    assert facts["attend_items"]["tensor_products"]
    kept = lines[2:]
    assert {Path(line).suffix for line in kept} == {".so", ".cubin"}
    # Another container of the deployment finds it.
    found = deployment.run("exec", "-T", "drafter", "find", "/home/paceline/.triton", "-type", "f")
    assert set(kept) <= set(found.split())


def test_images_for_gpus_run_unprivileged_with_a_compiler(deployment: Deployment) -> None:
    look = "id -u; command -v gcc pip || true; touch /x 2> /dev/null || echo sealed"
    for service in ("verifier", "drafter"):
        said = deployment.run("exec", "-T", service, "sh", "-c", look).split()
        assert said == ["10001", "/usr/bin/gcc", "sealed"]
        order = deployment.run("exec", "-T", service, "printenv", "CUDA_DEVICE_ORDER")
        assert order.strip() == "PCI_BUS_ID"


def test_they_generate_on_the_cpu_too(deployment: Deployment) -> None:
    words = ("generate", "import asyncio\n" * 8, "--max-new-tokens", "8", "--json")
    for drafter in ("longspec", "dspark", "ngram"):
        result = json.loads(deployment.cli(*words, "--drafter", drafter).splitlines()[-1])
        assert result["usage"]["completion_tokens"] == 8
        assert not result["stats"]["fallbacks"]


def test_a_build_without_cuda_fails(deployment: Deployment) -> None:
    probe = ("exec", "-T", "verifier", "python", "-c", "import torch; print(torch.version.cuda)")
    if deployment.run(*probe).strip() != "None":
        pytest.skip("this index has torch for CUDA")
    arguments = [f"--build-arg={name}" for name in ("PYTHON_IMAGE", "BUILD_IMAGE", "EXTRA=cuda")]
    command = ["docker", "build", "--file", "Dockerfile", "--target", "build-server", *arguments]
    done = subprocess.run([*command, ".."], cwd=COMPOSE, capture_output=True, text=True)
    assert done.returncode
    assert "has no CUDA" in done.stdout + done.stderr
