"""The compose files: valid, closed to other machines, and in step with what they name."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_viz.spec.compose_spec import ComposeSpecification

from paceline.cli import drafter, gateway, verifier
from paceline.telemetry.names import Metric

COMPOSE = Path(__file__).parents[2] / "compose"
DEPLOYMENTS = ("cpu", "docker-compose", "remote")
FILES = (*DEPLOYMENTS, "services")
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
    ComposeSpecification.model_validate(content)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_compose_itself_takes_each_deployment(name: str) -> None:
    commands = [command for command in ENGINES if available(command)]
    if not commands:
        pytest.skip("neither docker compose nor docker-compose is installed")
    for command in commands:
        words = ["-f", str(COMPOSE / f"{name}.yml"), "--profile", "observability", "config", "-q"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("service", "module"),
    [("verifier", verifier), ("drafter", drafter), ("gateway", gateway)],
)
def test_commands_are_ones_that_the_services_take(service: str, module: Any) -> None:
    command = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", read("services")["services"][service]["command"])
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    assert parser.parse_args(command.split()).address.startswith("0.0.0.0:")


@pytest.mark.parametrize("name", FILES)
def test_ports_are_open_to_this_machine_only_unless_told_otherwise(name: str) -> None:
    for service in read(name)["services"].values():
        for port in service.get("ports", []):
            assert port.startswith("${PACELINE_BIND:-127.0.0.1}:")


def test_no_container_can_write_its_image_or_gain_rights() -> None:
    for service in read("services")["services"].values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.get("privileged")


@pytest.mark.parametrize("name", ["cpu", "docker-compose"])
def test_verifier_and_drafter_share_what_shared_kv_needs(name: str) -> None:
    services = read(name)["services"]
    for service in ("verifier", "drafter"):
        for namespace in ("network_mode", "ipc", "pid"):
            assert services[service][namespace] == "service:pod"


def test_both_services_see_both_gpus_each_its_own_first() -> None:
    services = read("docker-compose")["services"]
    seen = {name: services[name]["deploy"] for name in ("verifier", "drafter")}
    assert seen["verifier"] == seen["drafter"]
    first = {services[name]["environment"]["CUDA_VISIBLE_DEVICES"][0] for name in seen}
    assert first == {"0", "1"}


def test_the_example_of_settings_names_all_of_them() -> None:
    text = "".join((COMPOSE / f"{name}.yml").read_text() for name in FILES)
    used = set(re.findall(r"\$\{(\w+)", text)) | {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}
    example = (COMPOSE / ".env.example").read_text()
    named = set(re.findall(r"^#(\w+)=", example, re.MULTILINE))
    assert named - {"COMPOSE_PROFILES"} == used


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((COMPOSE / "observability/dashboards/paceline.json").read_text())
    asked = {
        re.sub("_(bucket|total|sum|count)$", "", name)
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:specdec|gen_ai)_\w+", target["expr"])
    }
    assert asked
    assert asked <= {value for name, value in vars(Metric).items() if name.isupper()}
