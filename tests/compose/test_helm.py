"""The chart, rendered by Helm and held to the schemas of Kubernetes; `make chart` installs both."""

import argparse
import base64
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli import services
from paceline.cli.service_process import VERIFIER_ADDRESS
from paceline.client._transport import CLIENT_HEADER

helm = pytest.importorskip("helm_python", reason="no Helm: make chart installs it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="see make chart")

CHART = Path(__file__).parents[2] / "compose" / "helm"
KUBERNETES = ("1.27", "1.33")

DRAFTERS = [
    {"name": "ngram", "version": "1", "load": "ngram=ngram"},
    {"name": "ngram", "version": "2", "load": "ngram=ngram,max_nodes=4"},
]
SCALED = {"autoscaling": {"enabled": True, "maxReplicas": 3, "queueLength": 2}}
DEMO = yaml.safe_load((CHART / "demo.yaml").read_text())
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "co-located": {"coLocated": True, "verifier": {"count": 3}},
    "demo": DEMO,
    "apart": {"verifier": {"count": 2}, "drafters": DRAFTERS, "metrics": {"insecure": True}},
    "scaled verifiers": {"coLocated": True, "verifier": {"count": 2, **SCALED}},
    "scaled drafters": {"drafters": [{**DRAFTERS[0], **SCALED}]},
    "own secret, no GPU": {"existingSecret": "mine", "verifier": {"gpu": ""}},
    "guarded": {
        "gateway": {"ingress": {"enabled": True, "host": "llm.example", "tlsSecret": "llm"}},
        "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    },
}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(copy.deepcopy(values), name="demo", namespace="prod")
    texts = [text for file, text in files.items() if file.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def of_kind(objects: list[dict[str, Any]], kind: str, part: str = "") -> dict[str, dict[str, Any]]:
    named = {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}
    return {name: found for name, found in named.items() if part in name}


def workloads(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return of_kind(objects, "Deployment") | of_kind(objects, "StatefulSet")


def containers(deployment: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in deployment["spec"]["template"]["spec"]["containers"]}


def envoy(objects: list[dict[str, Any]]) -> dict[str, Any]:
    text = of_kind(objects, "ConfigMap")["demo-paceline-balancer"]["data"]["envoy.yaml"]
    resources = yaml.safe_load(text)["static_resources"]
    assert isinstance(resources, dict)
    return resources


def routes(objects: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What each of Envoy's ports does with a call."""
    found = {}
    for listener in envoy(objects)["listeners"]:
        (manager,) = listener["filter_chains"][0]["filters"]
        (host,) = manager["typed_config"]["route_config"]["virtual_hosts"]
        found[listener["address"]["socket_address"]["port_value"]] = host["routes"][0]["route"]
    return found


@pytest.fixture(params=SETTINGS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(SETTINGS[request.param])


def test_lint_finds_nothing() -> None:
    assert not helm.lint(str(CHART))["errors"]


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_object(objects: list[dict[str, Any]], version: str) -> None:
    # A ServiceMonitor is of an operator: Kubernetes has no schema for it.
    known = [found for found in objects if found["kind"] != "ServiceMonitor"]
    for found in known:
        kubernetes_validate.validate(found, version, strict=True)
    assert {"Service", "Deployment"} <= {found["kind"] for found in known}


def test_containers_gain_no_rights_and_their_ports_have_names(
    objects: list[dict[str, Any]],
) -> None:
    for deployment in workloads(objects).values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        ports = []
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            ports += [port["name"] for port in container["ports"]]
        assert len(set(ports)) == len(ports)
        assert all(len(name) <= 15 for name in ports)


def test_arguments_are_ones_that_the_services_take(objects: list[dict[str, Any]]) -> None:
    seen = set()
    for deployment in workloads(objects).values():
        for name, container in containers(deployment).items():
            if name != "envoy":
                parser = argparse.ArgumentParser(exit_on_error=False)
                commands = {
                    "verifier": services.add_verifier_arguments,
                    "drafter": services.add_drafter_arguments,
                    "gateway": services.add_gateway_arguments,
                }
                commands[name](parser)
                parser.parse_args(container["args"])
                seen.add(name)
    assert seen == {"verifier", "drafter", "gateway"}


def test_selectors_and_services_meet_their_pods(objects: list[dict[str, Any]]) -> None:
    pods = [each["spec"]["template"] for each in workloads(objects).values()]
    for found in objects:
        if found["kind"] not in ("Service", "PodDisruptionBudget"):
            continue
        selector = found["spec"]["selector"]
        wanted = dict(selector.get("matchLabels", selector))
        wanted.pop("apps.kubernetes.io/pod-index", None)  # which Kubernetes adds
        met = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
        assert met, found["metadata"]["name"]
        for port in found["spec"].get("ports", []):
            number = port.get("targetPort", port["port"])
            for pod in met:
                listed = [p for each in pod["spec"]["containers"] for p in each["ports"]]
                assert any(number in (p["name"], p["containerPort"]) for p in listed)


def test_envoy_finds_its_hosts_and_clusters(objects: list[dict[str, Any]]) -> None:
    clusters = {each["name"]: each for each in envoy(objects)["clusters"]}
    for route in routes(objects).values():
        assert {each["name"] for each in route["weighted_clusters"]["clusters"]} <= set(clusters)
    services = of_kind(objects, "Service")
    for cluster in clusters.values():
        for endpoint in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]:
            address = endpoint["endpoint"]["address"]["socket_address"]
            ports = services[address["address"]]["spec"]["ports"]
            assert address["port_value"] in [port["port"] for port in ports]


def test_each_gpu_has_a_deployment_of_its_own() -> None:
    drafters = [{**DRAFTERS[0], "gpu": "nvidia.com/gpu"}]
    objects = render({"verifier": {"count": 3}, "drafters": drafters})
    (deployment,) = of_kind(objects, "Deployment", "-drafter-").values()
    assert "--device=cuda" in containers(deployment)["drafter"]["args"]
    verifiers = of_kind(objects, "Deployment", "-verifier-")
    assert len(verifiers) == 3
    for deployment in verifiers.values():
        assert deployment["spec"]["replicas"] == 1
        limits = containers(deployment)["verifier"]["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": 1}
        assert "--device=cuda" in containers(deployment)["verifier"]["args"]


def test_calls_of_a_client_stay_together() -> None:
    objects = render({"verifier": {"count": 2}})
    assert routes(objects)[7431]["hash_policy"] == [{"header": {"header_name": CLIENT_HEADER}}]
    (cluster,) = [each for each in envoy(objects)["clusters"] if each["name"] == "verifiers"]
    assert cluster["lb_policy"] == "RING_HASH"


def test_a_co_located_drafter_shares_the_pod_and_the_place_on_the_ring() -> None:
    objects = render(SETTINGS["co-located"])
    assert not of_kind(objects, "Deployment", "-drafter-")
    for deployment in of_kind(objects, "Deployment", "-verifier-").values():
        assert deployment["spec"]["template"]["spec"]["shareProcessNamespace"]
        assert {*containers(deployment)} == {"verifier", "drafter"}
    rings = [
        [
            (endpoint["metadata"]["filter_metadata"]["envoy.lb"]["hash_key"], cluster["lb_policy"])
            for endpoint in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        ]
        for cluster in envoy(objects)["clusters"]
    ]
    assert len(rings) == 2
    assert rings[0] == rings[1]


def joined(objects: list[dict[str, Any]]) -> list[list[str]]:
    """The verifiers that each drafter service joins."""
    commands = []
    for deployment in workloads(objects).values():
        if "drafter" in containers(deployment):
            parser = argparse.ArgumentParser(exit_on_error=False)
            services.add_drafter_arguments(parser)
            given = parser.parse_args(containers(deployment)["drafter"]["args"]).verifier
            commands.append(given or [VERIFIER_ADDRESS])
    return commands


def test_a_drafter_of_its_own_joins_every_verifier_by_a_name_of_the_certificate() -> None:
    objects = render(SETTINGS["apart"])
    found = joined(objects)
    assert len(found) == 2
    (secret,) = of_kind(objects, "Secret").values()
    # The names lie in the certificate as plain text.
    text = "".join(base64.b64decode(secret["data"]["tls.crt"]).decode().splitlines()[1:-1])
    assert b"*.prod.svc" in base64.b64decode(text)
    for addresses in found:
        services = [address.removesuffix(".prod.svc:7431") for address in addresses]
        assert services == [f"demo-paceline-verifier-{index}" for index in range(2)]
        assert set(services) <= set(of_kind(objects, "Service"))


def test_a_co_located_drafter_joins_the_verifier_of_its_pod() -> None:
    found = joined(render(SETTINGS["co-located"]))
    assert found == [["127.0.0.1:7431"]] * 3


def test_pods_are_scaled_by_queues_that_the_services_report() -> None:
    for name, queue, count in (
        ("scaled verifiers", "specdec_engine_queue_length", 2),
        ("scaled drafters", "specdec_drafter_queue_length", 1),
    ):
        objects = render(SETTINGS[name])
        scalers = of_kind(objects, "HorizontalPodAutoscaler")
        deployments = of_kind(objects, "Deployment")
        assert len(scalers) == count
        for scaler in scalers.values():
            (metric,) = scaler["spec"]["metrics"]
            assert metric["pods"]["metric"]["name"] == queue
            assert "replicas" not in deployments[scaler["spec"]["scaleTargetRef"]["name"]]["spec"]


def test_the_monitor_reads_every_service_with_metrics() -> None:
    objects = render(SETTINGS["guarded"])
    (monitor,) = of_kind(objects, "ServiceMonitor").values()
    ports = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
    wanted = monitor["spec"]["selector"]["matchLabels"]
    offered = {
        port["name"]
        for service in of_kind(objects, "Service").values()
        if wanted.items() <= service["metadata"]["labels"].items()
        for port in service["spec"]["ports"]
    }
    assert {"metrics-9431", "metrics-9432", "metrics-9433"} <= offered & ports
    assert all(endpoint["scheme"] == "https" for endpoint in monitor["spec"]["endpoints"])


@pytest.mark.parametrize("together", [False, True])
def test_the_gateway_knows_every_verifier(together: bool) -> None:
    objects = render({"coLocated": together, "verifier": {"count": 3}})
    (gateway,) = of_kind(objects, "Deployment", "-gateway").values()
    variables = {each["name"]: each["value"] for each in containers(gateway)["gateway"]["env"]}
    name, _, port = variables["PACELINE_VERIFIER_ADDRESS"].rpartition(":")
    spec = of_kind(objects, "Service")[name.removeprefix("dns:///")]["spec"]
    assert int(port) in [each["port"] for each in spec["ports"]]
    assert name.startswith("dns:///")
    assert spec["clusterIP"] == "None"


def test_every_pod_has_a_policy_for_its_ports() -> None:
    objects = render(SETTINGS["guarded"])
    policies = list(of_kind(objects, "NetworkPolicy").values())
    for found in workloads(objects).values():
        labels = found["spec"]["template"]["metadata"]["labels"]
        (policy,) = [each for each in policies if selects(each["spec"]["podSelector"], labels)]
        rules = policy["spec"]["ingress"]
        allowed = {port["port"] for rule in rules for port in rule["ports"]}
        for container in containers(found).values():
            assert {port["containerPort"] for port in container["ports"]} <= allowed
        if labels["app.kubernetes.io/component"] not in ("balancer", "gateway"):
            assert all("from" in rule for rule in rules)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector["matchExpressions"]
    )


@pytest.mark.parametrize(
    "values",
    [
        {"verifier": {"count": 0}},
        {"gateway": {"ingress": {"enabled": True}}},
        {"nonsense": 1},
        {"drafters": []},
        {"drafters": [{**DRAFTERS[0], "name": "Not A Name"}]},
        {"verifier": SCALED},
        {"coLocated": True, "drafters": DRAFTERS},
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        render(values)
