"""The manifests of docs/scale-out.md: what Kubernetes takes, and what this server has.

GIVEN deploy/kubernetes, WHEN each document is held to Kubernetes' own schemas (strictly: a field
that is not known is an error) or to those of the two custom resources, THEN all fit; names, ports,
flags and metrics agree with each other and with the product. Every check can fail.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from server.config import add_serve_flags, from_flags
from telemetry.metric_table import METRICS

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
CUSTOM = json.loads((ROOT / "tests" / "data" / "kubernetes" / "custom.json").read_text())
VERSIONS = ("1.31", "1.37")
PICKER_READS = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)

Document = dict[str, Any]


def documents() -> list[Document]:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert set(listed) == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    return [one for name in listed for one in yaml.safe_load_all((FOLDER / name).read_text())]


def of(kind: str) -> Document:
    (found,) = (one for one in documents() if one["kind"] == kind)
    return found


def validate(document: Document) -> None:
    if schema := CUSTOM.get(document["kind"]):
        jsonschema.validate(document, schema)
        return
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("kind", [one["kind"] for one in documents()])
def test_kubernetes_takes_it(kind: str) -> None:
    validate(of(kind))


@pytest.mark.parametrize("kind", ["Deployment", "InferencePool", "HTTPRoute", "NetworkPolicy"])
def test_a_wrong_document_is_found(kind: str) -> None:
    errors = (kubernetes_validate.ValidationError, jsonschema.ValidationError)
    unknown = copy.deepcopy(of(kind))
    unknown["spec"]["replica"] = 3
    with pytest.raises(errors):
        validate(unknown)
    missing = copy.deepcopy(of(kind))
    del missing["spec"]
    missing["spec"] = {"rules": "none", "template": 5, "ingress": 7}
    with pytest.raises(errors):
        validate(missing)


def container() -> Document:
    (found,) = of("Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def test_the_pool_is_the_servers_and_the_route_leads_to_it() -> None:
    labels = of("Deployment")["spec"]["template"]["metadata"]["labels"]
    pool = of("InferencePool")
    for selector in (
        of("Deployment")["spec"]["selector"]["matchLabels"],
        pool["spec"]["selector"]["matchLabels"],
        of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        of("Service")["spec"]["selector"],
    ):
        assert selector.items() <= labels.items()
    (port,) = container()["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    ((opened,),) = (rule["ports"] for rule in of("NetworkPolicy")["spec"]["ingress"])
    assert opened["port"] == port["containerPort"]
    (rule,) = of("HTTPRoute")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    picker = pool["spec"]["endpointPickerRef"]["name"]
    callers = of("NetworkPolicy")["spec"]["ingress"][0]["from"]
    assert callers[0]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == picker


def test_its_flags_are_the_servers_own_and_it_may_drain() -> None:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    config = from_flags(parser.parse_args(container()["args"]))
    pod = of("Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > config.drain_s + 10
    assert config.replica == "$(POD_NAME)"
    assert {one["name"] for one in container()["env"]} == {"POD_NAME"}
    probes = [container()[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness")]
    assert {probe["path"] for probe in probes} == {"/ready"}
    assert container()["livenessProbe"]["httpGet"]["path"] == "/health"
    liveness = container()["livenessProbe"]
    patience_s = liveness["periodSeconds"] * liveness["failureThreshold"]
    assert patience_s > config.engine_hang_s, "the server restarts its engine before it is killed"


def test_what_the_picker_reads_is_exported() -> None:
    exported = {name for spec in METRICS for name in (spec.name, *spec.aliases)}
    assert set(PICKER_READS) <= exported
    told = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
    assert all(name in told for name in PICKER_READS)
    labels = next(spec for spec in METRICS if "vllm:cache_config_info" in spec.aliases).labels
    assert {"block_size", "num_gpu_blocks"} <= set(labels)


def test_the_pickers_configuration_names_what_it_uses() -> None:
    settings = yaml.safe_load(of("ConfigMap")["data"]["picker.yaml"])
    assert (settings["apiVersion"], settings["kind"]) == ("llm-d.ai/v1", "EndpointPickerConfig")
    made = {plugin.get("name", plugin["type"]) for plugin in settings["plugins"]}
    (profile,) = settings["schedulingProfiles"]
    used = [plugin["pluginRef"] for plugin in profile["plugins"]]
    assert set(used) <= made
    assert used[-1].endswith("-picker")
