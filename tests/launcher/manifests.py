"""Checks Kubernetes manifests without a cluster: published schemas, and what they cannot say."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from kubernetes_validate import utils

SCHEMAS = Path(__file__).parent / "schemas"
# Of what Kubernetes itself does not have.
CUSTOM = {
    "LeaderWorkerSet": "leaderworkerset-v1.json",
    "PodMonitor": "podmonitor-v1.json",
}
# The oldest that has all that manifests use, and the newest that there is a schema for.
KUBERNETES = ("1.30", "1.37")

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_REFERENCE = re.compile(r"(?<!\$)\$\((\w+)\)")
_BY_LWS = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}

# It reads megabytes of schema from disk for each object.
utils.schema_contents = functools.lru_cache(maxsize=64)(utils.schema_contents)


class Invalid(Exception):
    """A manifest that a cluster would refuse, or that would not do what it is meant to."""


def validate(body: Mapping[str, Any], version: str = KUBERNETES[-1]) -> None:
    """One object against its schema, unknown fields refused.

    Raises:
        Invalid: it does not hold.
    """
    try:
        if body.get("kind") in CUSTOM:
            _custom_validator(body["kind"]).validate(body)
            _validate_pod_template({"metadata": body["metadata"]}, version)
            for template in pod_templates(body):
                _validate_pod_template(template, version)
        else:
            kubernetes_validate.validate(dict(body), version, strict=True)
    except (jsonschema.ValidationError, utils.SchemaNotFoundError, KeyError, TypeError) as error:
        raise Invalid(str(error)) from error


@functools.cache
def _custom_validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / CUSTOM[kind]).read_text()))


def _validate_pod_template(template: Any, version: str) -> None:
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
    kubernetes_validate.validate(whole, version, strict=True)


def pod_templates(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pods that an object makes."""
    spec = body.get("spec", {})
    if body.get("kind") == "Deployment":
        return [spec["template"]]
    if body.get("kind") == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        return [group[key] for key in ("leaderTemplate", "workerTemplate") if key in group]
    return []


def check_together(objects: Sequence[Mapping[str, Any]]) -> None:
    """What the objects say of each other.

    Raises:
        Invalid: something refers to what is not there.
    """
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    _require(len(names) == len(objects), "two objects of one kind have one name")
    pods = [template for each in objects for template in pod_templates(each)]
    for each in objects:
        _require(_LABEL.fullmatch(each["metadata"]["name"]) is not None, f"name of {each}")
        for template in pod_templates(each):
            _check_pod(template)
    namespaces = {
        each["metadata"].get("namespace") for each in objects if each["kind"] != "Namespace"
    }
    _require(namespaces == {name for kind, name in names if kind == "Namespace"}, f"{namespaces}")
    for each in objects:
        spec = each.get("spec", {})
        match each["kind"]:
            case "Deployment":
                (template,) = pod_templates(each)
                owns = bool(spec["selector"]) and _selects(spec["selector"], template)
                _require(owns, "a Deployment does not own its pods")
            case "Service":
                selected = [pod for pod in pods if _selects_leaders(spec["selector"], pod)]
                _require(bool(selected), "a Service selects nothing")
                for port in spec["ports"]:
                    for pod in selected:
                        _require(port["targetPort"] in _ports(pod), f"no port {port}")
            case "PodMonitor":
                exported = {
                    name for pod in pods if _selects(spec["selector"], pod) for name in _ports(pod)
                }
                for endpoint in spec["podMetricsEndpoints"]:
                    _require(endpoint["port"] in exported, f"nobody has {endpoint['port']}")
            case "HorizontalPodAutoscaler":
                target = spec["scaleTargetRef"]
                _require((target["kind"], target["name"]) in names, "scales nothing")
                _require(spec["minReplicas"] < spec["maxReplicas"], "scales nowhere")
            case "RoleBinding":
                _require(("Role", each["roleRef"]["name"]) in names, "binds no role")
                for subject in each["subjects"]:
                    _require((subject["kind"], subject["name"]) in names, "binds nobody")
            case "NetworkPolicy":
                _require(
                    any(_selects(spec["podSelector"], pod) for pod in pods), "protects nothing"
                )
    for pod in pods:
        account = pod["spec"].get("serviceAccountName")
        _require(account is None or ("ServiceAccount", account) in names, f"no account {account}")


def _check_pod(template: Mapping[str, Any]) -> None:
    spec = template["spec"]
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    for container in spec["containers"]:
        for mount in container.get("volumeMounts", ()):
            _require(mount["name"] in volumes, f"no volume {mount['name']}")
        ports = {port["name"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                _require(container[probe]["httpGet"]["port"] in ports, f"no port for {probe}")
        known: set[str] = set(_BY_LWS)
        for variable in container.get("env", ()):
            # Only what comes before is replaced in a value.
            _check_references(variable.get("value", ""), known)
            _require(variable["name"] not in known, f"{variable['name']} twice")
            known.add(variable["name"])
        for text in (*container.get("command", ()), *container.get("args", ())):
            _check_references(text, known)
        resources = container.get("resources", {})
        for name, limit in resources.get("limits", {}).items():
            wanted = resources.get("requests", {}).get(name, limit)
            _require(_quantity(wanted) <= _quantity(limit), f"{name}: more than its limit")


def _check_references(text: str, known: set[str]) -> None:
    for name in _REFERENCE.findall(text):
        _require(name in known, f"$({name}) is not set")


def _quantity(text: str) -> float:
    found = re.fullmatch(r"(\d+)(m|Mi|Gi)?", text)
    _require(found is not None, f"{text} is no quantity")
    assert found is not None
    return int(found[1]) * {None: 1, "m": 0.001, "Mi": 2**20, "Gi": 2**30}[found[2]]


def _ports(pod: Mapping[str, Any]) -> Iterator[str]:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            yield port["name"]


def _selects_leaders(labels: Mapping[str, str], pod: Mapping[str, Any]) -> bool:
    """LeaderWorkerSet's controller labels pods by their place in the group."""
    wanted = dict(labels)
    index = wanted.pop("leaderworkerset.sigs.k8s.io/worker-index", None)
    leads = index is None or "http" in _ports(pod)
    return leads and _selects({"matchLabels": wanted}, pod)


def _selects(selector: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    labels = pod["metadata"]["labels"]
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Invalid(what)
