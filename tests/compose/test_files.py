"""The compose files: valid, closed to other machines, and in step with what they name."""

import argparse
import importlib
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_viz.spec.compose_spec import ComposeSpecification

from paceline.cli import services
from paceline.vllm.settings import TRIED, read_options

COMPOSE = Path(__file__).parents[2] / "compose"
DEPLOYMENTS = ("cpu", "docker-compose", "remote")
FILES = (*DEPLOYMENTS, "services", "mps", "vllm")
ENGINES = (["docker", "compose"], ["docker-compose"])


def read(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((COMPOSE / f"{name}.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def available(command: list[str]) -> bool:
    return bool(shutil.which(command[0])) and not (
        subprocess.run([*command, "version"], capture_output=True, check=False).returncode
    )


@pytest.mark.parametrize("name", FILES)
def test_each_file_keeps_the_compose_specification(name: str) -> None:
    content = {key: value for key, value in read(name).items() if not key.startswith("x-")}
    parsed = ComposeSpecification.model_validate(content)
    assert parsed.services is not None
    assert set(parsed.services) == set(content["services"])


@pytest.mark.parametrize(
    "names", [*((name,) for name in (*DEPLOYMENTS, "vllm")), ("docker-compose", "mps")]
)
def test_compose_itself_takes_each_deployment(names: tuple[str, ...]) -> None:
    commands = [command for command in ENGINES if available(command)]
    if not commands:
        pytest.skip("neither docker compose nor docker-compose is installed")
    for command in commands:
        files = [word for name in names for word in ("-f", str(COMPOSE / f"{name}.yml"))]
        words = [*files, "--profile", "observability", "config", "-q"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_with_the_multi_process_service_both_find_its_folder() -> None:
    """It is not under /tmp, which is memory of each container."""
    added = read("mps")["services"]
    for name in ("verifier", "drafter"):
        where = added[name]["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
        (volume,) = added[name]["volumes"]
        assert filled(volume) == f"/tmp/nvidia-mps:{where}"
        assert read("docker-compose")["services"][name]["ipc"] == "host"
        assert "environment" in read("docker-compose")["services"][name]


def filled(text: str, settings: Mapping[str, str] | None = None) -> str:
    """A text of a compose file with its variables replaced, by their defaults if need be."""
    given = settings or {}
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: given.get(match[1], match[2]), text)


def words(name: str, service: str) -> list[str]:
    """The command line of a service in a deployment; start.sh adds the target."""
    common = read("services")["services"][service]
    merged = {**common, **read(name)["services"][service]}
    return " ".join(map(filled, (merged["entrypoint"], merged["command"] or ""))).split()


@pytest.mark.parametrize("name", DEPLOYMENTS)
@pytest.mark.parametrize(
    ("service", "add_arguments"),
    [
        ("verifier", services.add_verifier_arguments),
        ("drafter", services.add_drafter_arguments),
        ("gateway", services.add_gateway_arguments),
    ],
)
def test_commands_are_ones_that_the_services_take(
    name: str, service: str, add_arguments: Any
) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    command = words(name, service)
    if command[0] == "/paceline/start.sh":
        command.append("--target=/models/x")
    assert command[:2] in (["/paceline/start.sh", service], ["paceline", service])
    assert parser.parse_args(command[2:]).address.startswith("0.0.0.0:")


@pytest.mark.parametrize("name", FILES)
def test_ports_are_open_to_this_machine_only_unless_told_otherwise(name: str) -> None:
    for service in read(name)["services"].values():
        for port in service.get("ports", []):
            assert filled(port).startswith("127.0.0.1:")


def test_no_container_can_write_its_image_or_gain_rights() -> None:
    for service in read("services")["services"].values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.get("privileged")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_services_share_one_folder_and_no_namespace(name: str) -> None:
    """But for CUDA IPC, which needs those of the host."""
    services = read(name)["services"]
    shared = {"ipc", "pid"} if name == "docker-compose" else set()
    for service in ("verifier", "drafter"):
        assert {"network_mode", "ipc", "pid", "shm_size"} & services[service].keys() == shared
        volumes = services[service].get("volumes", [])
        assert ("sockets:/run/sockets" in volumes) is (name != "remote")
    socket = "--draft-socket /run/sockets/verifier" in " ".join(words(name, "verifier"))
    assert socket is (name != "remote")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_drafter_joins_its_verifier(name: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    services.add_drafter_arguments(parser)
    assert parser.parse_args(words(name, "drafter")[2:]).verifier == ["verifier:7431"]


def test_drafters_join_vllm_by_a_name_of_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are ones that the proposer takes, and the drafter's arguments the service's."""
    found = read("vllm")["services"]
    given = found["vllm"]["environment"]
    monkeypatch.setattr("paceline.service.options.read_token", lambda file: "token")
    _, server = read_options({name: filled(str(value)) for name, value in given.items()})
    assert server is not None
    assert server.address == "0.0.0.0:7431"
    assert server.tls_cert is not None
    (alias,) = found["vllm"]["networks"]["default"]["aliases"]
    assert f"DNS:{alias}" in (COMPOSE / "secrets.sh").read_text()
    parser = argparse.ArgumentParser(exit_on_error=False)
    services.add_drafter_arguments(parser)
    parsed = parser.parse_args(words("vllm", "drafter")[2:])
    assert parsed.verifier == [f"{alias}:7431"]
    assert parsed.device == "cuda:0"
    seen = [found[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in ("vllm", "drafter")]
    assert [*map(filled, seen)] == ["0", "1"]
    words_of_vllm = shlex.split(filled(found["vllm"]["command"]))
    speculative = json.loads(words_of_vllm[words_of_vllm.index("--speculative-config") + 1])
    module, _, name = speculative["model"].rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), name), type)
    assert f"v{TRIED[0]}" in (COMPOSE / "Dockerfile.vllm").read_text()
    assert f"v{TRIED[0]}" in found["vllm"]["build"]["args"]["VLLM_IMAGE"]


def test_each_service_computes_on_the_gpu_named_for_it() -> None:
    settings = {"PACELINE_GPU_0": "GPU-b3a0", "PACELINE_GPU_1": "2"}
    for service, gpu in (("verifier", "GPU-b3a0"), ("drafter", "2")):
        found = read("docker-compose")["services"][service]
        visible = filled(found["environment"]["CUDA_VISIBLE_DEVICES"], settings).split(",")
        given = filled(found["command"], settings).split()
        number = given[given.index("--device") + 1].removeprefix("cuda:")
        assert visible[int(number)] == gpu, "CUDA counts those that are visible, in their order"


def test_the_file_of_settings_names_all_of_them() -> None:
    text = "".join((COMPOSE / f"{name}.yml").read_text() for name in FILES)
    passed_on = re.findall(r"^ +([A-Z_]+):$", text, re.MULTILINE)
    used = {*re.findall(r"\$\{(\w+)", text), *passed_on}
    settings = (COMPOSE / ".env").read_text()
    named = set(re.findall(r"^#?(\w+)=", settings, re.MULTILINE))
    assert named - {"COMPOSE_PROJECT_NAME", "COMPOSE_PROFILES"} == used
    assert "\nCOMPOSE_PROJECT_NAME=paceline\n" in settings
