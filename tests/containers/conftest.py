"""Deployments in real containers, once for all tests; `make containers` runs them."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import pytest
from calls import eventually
from testcontainers.compose import DockerCompose

from paceline.client import Client, DraftOptions, RetryOptions, TlsOptions
from paceline.harness import with_port

COMPOSE = Path(__file__).parents[2] / "compose"
DEMO = "/paceline/models/demo"  # the demo models in the images


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("PACELINE_CONTAINERS") != "1":
        skip = pytest.mark.skip(reason="needs a Docker Engine: make containers")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


class Deployment(DockerCompose):
    """A running compose file, by whichever compose there is, and how to call its services."""

    environment: dict[str, str]  # of compose commands: two deployments may run side by side
    ports: dict[str, int]
    ca: Path
    token: str

    @cached_property
    def compose_command_property(self) -> list[str]:
        command = super().compose_command_property
        done = os.system("docker compose version > /dev/null 2>&1")
        words = command if done == 0 else ["docker-compose", *command[2:]]
        return ["env", *(f"{key}={value}" for key, value in self.environment.items()), *words]

    def stop(self, down: bool = True) -> None:
        # All of it: docker-compose 1.29 takes no services here.
        self.run(*(("down", "--volumes") if down else ("stop",)))

    def run(self, *words: str) -> str:
        return self._run_command([*self.compose_command_property, *words]).stdout.decode()

    def cli(self, *words: str) -> str:
        """Standard output of `paceline` in a container of its own, in the services' network."""
        return self.run("run", "--rm", "-T", "cli", *words)

    def client(self, retry: RetryOptions | None = None) -> Client:
        """A client on this machine, through the published ports."""
        return Client(
            f"127.0.0.1:{self.ports['VERIFIER']}",
            token=self.token,
            tls=TlsOptions(ca=self.ca),
            retry=retry,
            # Whether it pays depends on the machine; here it is to happen.
            drafting=DraftOptions(timeout=60, adaptive=False),
        )

    def state(self, service: str) -> str:
        """`healthy`, `starting`, `unhealthy`, or what the container is doing instead."""
        container = self.run("ps", "--all", "--quiet", service).strip()
        assert container, f"no container of {service}"
        words = "{{if .State.Running}}{{.State.Health.Status}}{{else}}{{.State.Status}}{{end}}"
        inspect = ["docker", "inspect", "--format", words, container]
        return self._run_command(inspect).stdout.decode().strip()

    def until(self, service: str, *states: str) -> None:
        """Wait for a state of a service."""
        eventually(lambda: self.state(service) in states, f"{service} is {states}")

    def until_joined(self, *carriers: str) -> None:
        """Wait until the drafter service has joined the verifier, by one of some carriers."""

        def joined() -> bool:
            listed = json.loads(self.cli("drafters", "list", "--json"))
            return any(each.get("carrier") in carriers for each in listed["verifiers"])

        eventually(joined, f"the drafter has joined by {carriers}")


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """`compose/cpu.yml`, built and serving, with the gateway and a collector."""
    with serving("cpu", tmp_path_factory.mktemp("cpu"), "gateway", "collector") as running:
        yield running


@pytest.fixture(scope="session")
def far_apart(
    deployment: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with serving("remote", tmp_path_factory.mktemp("remote")) as running:
        yield running


@contextmanager
def serving(
    name: str,
    folder: Path,
    *others: str,
    project: str | None = None,
    over: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Deployment]:
    """A compose file's verifier and drafter, as a project of its own on free ports.

    Args:
        project: To tell it from another deployment of the same file; None: the file's name.
    """
    services = ["verifier", "drafter", *others]
    changes = [str(Path(__file__).with_name(f"{each}.yml")) for each in ("small", *over)]
    files = [f"{name}.yml", *changes]
    running = Deployment(COMPOSE, files, build=True, wait=False, services=services)
    names = ("VERIFIER", "DRAFTER", "GATEWAY", "OTLP")
    running.ports = {name: int(with_port("127.0.0.1:0").split(":")[1]) for name in names}
    running.environment = {
        "COMPOSE_PROJECT_NAME": f"paceline-test-{project or name}-{os.getpid()}",
        # Where only the older builder is there, compose is not to ask for another.
        "COMPOSE_DOCKER_CLI_BUILD": "0",
        "PACELINE_TARGET": f"{DEMO}/target",
        "PACELINE_DRAFTER_ARGS": "--load ngram=ngram",
        "PACELINE_VERIFIER_ARGS": "--kv-bytes 512MiB",
        **{f"PACELINE_{port}_PORT": str(number) for port, number in running.ports.items()},
        **(environment or {}),
    }
    if "collector" in others:
        running.environment["COMPOSE_PROFILES"] = "observability"
        running.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://collector:4317"
    # All before one starts: the collector runs in the verifier's image, which no registry has.
    running.run("build", *(each for each in services if each != "collector"))
    with running:
        try:
            running.until("verifier", "healthy")
            running.until("drafter", "healthy")
            running.until_joined("socket", "stream")
            running.ca = folder / "tls.crt"
            running.ca.write_text(secret(running, "tls.crt"))
            running.token = secret(running, "token").strip()
            yield running
        finally:
            print(running.run("logs", "--no-color", "--tail", "40"))


def secret(deployment: Deployment, name: str) -> str:
    return deployment.run("exec", "-T", "verifier", "cat", f"/run/paceline/{name}")
