"""The images for GPUs, on a machine without one: they compile for it, and compute on the CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import COMPOSE, Deployment, serving


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """`compose/cpu.yml` with those images, and the devices and drafters of the two-GPU file."""
    two_gpus = (COMPOSE / "docker-compose.yml").read_text()
    names = "PACELINE_DEVICE|PACELINE_DRAFTER_DEVICE|PACELINE_DRAFTER"
    defaults = dict(re.findall(rf"\$\{{({names}):-([^}}]*)\}}", two_gpus))
    settings = {name: " ".join(value.split()) for name, value in defaults.items()}
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


def test_without_a_gpu_they_say_so_and_generate_on_the_cpu(deployment: Deployment) -> None:
    for service in ("verifier", "drafter"):
        log = deployment.run("logs", "--no-color", service)
        assert "device auto: using the CPU" in log
    words = ("generate", "import asyncio\n" * 8, "--max-new-tokens", "8", "--json")
    for drafter in ("longspec", "dspark", "ngram"):
        result = json.loads(deployment.cli(*words, "--drafter", drafter).splitlines()[-1])
        assert result["usage"]["completion_tokens"] == 8
        assert not result["stats"]["fallbacks"]
