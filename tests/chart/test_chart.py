"""The chart: valid for each Kubernetes we name, no wider than it must be, and no value without effect."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kube_tools import helm

from octavo_operator import handlers

CHART = Path(__file__).parents[2] / "charts/octavo"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
VERSIONS = ("1.34", "1.35", "1.36", "1.37")
Objects = list[dict[str, Any]]


def run(*args: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(helm()), *args]
    if values is not None:
        command += ["--values", "-"]
    return subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, check=False
    )


def render(values: dict[str, Any] | None = None) -> Objects:
    done = run("template", "rel", str(CHART), "--namespace", "octavo-system", values=values or {})
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="module")
def default() -> Objects:
    return render()


def of_kind(objects: Objects, kind: str) -> Objects:
    return [o for o in objects if o["kind"] == kind]


def operator_pod(objects: Objects) -> dict[str, Any]:
    [deployment] = of_kind(objects, "Deployment")
    template: dict[str, Any] = deployment["spec"]["template"]
    return template


def test_helm_lint_has_nothing_to_say() -> None:
    done = run("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout and "ERROR" not in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(default: Objects, version: str) -> None:
    for manifest in default + render({"watchNamespaces": ["a"]}):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_crd_is_upgraded_with_the_chart_and_kept_without_it(default: Objects) -> None:
    """Case 46: helm upgrades templates, and never what lies in crds/."""
    [crd] = of_kind(default, "CustomResourceDefinition")
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not (CHART / "crds").exists()
    assert crd == yaml.safe_load((CHART / "files/crd.yaml").read_text())


def test_the_operator_passes_pod_security_restricted(default: Objects) -> None:
    pod = operator_pod(default)["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def rules(objects: Objects) -> list[dict[str, Any]]:
    return [rule for o in objects if o["kind"] in ("ClusterRole", "Role") for rule in o["rules"]]


def verbs(objects: Objects, group: str, resource: str) -> set[str]:
    found: set[str] = set()
    for rule in rules(objects):
        if group in rule["apiGroups"] and resource in rule["resources"]:
            found |= set(rule["verbs"])
    return found


def test_the_rights_are_no_wider_than_what_the_operator_does(default: Objects) -> None:
    for rule in rules(default):
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        assert not {"delete", "deletecollection", "escalate", "bind", "impersonate"} & set(rule["verbs"])
    assert verbs(default, "", "secrets") == {"get", "create"}
    assert verbs(default, "octavo.dev", "inferenceservices") == {"get", "list", "watch"}
    assert verbs(default, "", "nodes") == set() and verbs(default, "", "pods/exec") == set()


def test_the_operator_may_watch_all_that_it_watches(default: Objects) -> None:
    for group, _, plural in handlers.OWNED.values():
        assert {"list", "watch"} <= verbs(default, group, plural), plural


def test_on_request_the_rights_end_at_the_namespaces_named() -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b"]})
    assert of_kind(objects, "ClusterRole") == of_kind(objects, "ClusterRoleBinding") == []
    roles = {o["metadata"]["namespace"] for o in of_kind(objects, "Role")}
    assert roles == {"team-a", "team-b", "octavo-system"}
    args = operator_pod(objects)["spec"]["containers"][0]["args"]
    assert [a for a in args if a.startswith("--namespace")] == ["--namespace=team-a", "--namespace=team-b"]


# A value for every key of values.yaml, and what must then be found in the rendered text.
SETTINGS: dict[str, tuple[Any, str]] = {
    "nameOverride": ("short", "app.kubernetes.io/name: short"),
    "fullnameOverride": ("mine", "name: mine\n"),
    "image.repository": ("registry.test/o", "registry.test/o:"),
    "image.tag": ("t1", "octavo:t1"),
    "image.pullPolicy": ("Always", "imagePullPolicy: Always"),
    "engineImage.repository": ("registry.test/e", "registry.test/e:"),
    "engineImage.tag": ("t2", "octavo-engine:t2"),
    "imagePullSecrets": ([{"name": "regcred"}], "- name: regcred"),
    "workloadImagePullSecrets": (["pods-cred"], "value: \"pods-cred\""),
    "crds.install": (False, ""),
    "watchNamespaces": (["team-a"], "--namespace=team-a"),
    "gpuResourceName": ("amd.com/gpu", "amd.com/gpu"),
    "rbac.create": (False, ""),
    "serviceAccount.create": (False, ""),
    "serviceAccount.name": ("robot", "serviceAccountName: robot"),
    "serviceAccount.annotations": ({"iam": "role-x"}, "iam: role-x"),
    "replicas": (2, "replicas: 2"),
    "logLevel": ("debug", "--log-level=debug"),
    "extraArgs": (["--host=::"], "--host=::"),
    "extraEnv": ([{"name": "HTTPS_PROXY", "value": "http://p"}], "HTTPS_PROXY"),
    "extraVolumes": ([{"name": "ca", "emptyDir": {}}], "name: ca"),
    "extraVolumeMounts": ([{"name": "ca", "mountPath": "/ca"}], "mountPath: /ca"),
    "resources": ({"limits": {"cpu": "3"}}, "cpu: \"3\""),
    "podLabels": ({"team": "ml"}, "team: ml"),
    "podAnnotations": ({"note": "x1"}, "note: x1"),
    "nodeSelector": ({"pool": "control"}, "pool: control"),
    "tolerations": ([{"key": "dedicated", "operator": "Exists"}], "key: dedicated"),
    "affinity": ({"nodeAffinity": {}}, "nodeAffinity: {}"),
    "topologySpreadConstraints": (
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "topologyKey: zone",
    ),
    "priorityClassName": ("high", "priorityClassName: high"),
    "terminationGracePeriodSeconds": (77, "terminationGracePeriodSeconds: 77"),
    "podSecurityContext": ({"fsGroup": 4242}, "fsGroup: 4242"),
    "securityContext": ({"runAsUser": 4243}, "runAsUser: 4243"),
    "livenessProbe": ({"initialDelaySeconds": 41}, "initialDelaySeconds: 41"),
    "readinessProbe": ({"successThreshold": 1}, "successThreshold: 1"),
    "metrics.annotations": (False, ""),
}  # fmt: skip
GONE = {
    "crds.install": "CustomResourceDefinition",
    "rbac.create": "RoleBinding",
    "serviceAccount.create": "kind: ServiceAccount\n",
    "metrics.annotations": "prometheus.io",
}
# Keys that hold a whole object of Kubernetes; what is in them is the user's.
WHOLE = {path for path, (value, _) in SETTINGS.items() if isinstance(value, dict)}


def keys(values: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for key, value in values.items():
        here = f"{path}.{key}" if path else key
        nested = isinstance(value, dict) and value and here not in WHOLE
        found |= keys(value, here) if nested else {here}
    return found


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return copy.deepcopy(value)


def test_every_key_of_the_values_has_a_test() -> None:
    assert keys(VALUES) == set(SETTINGS)


@pytest.mark.parametrize("path", SETTINGS)
def test_every_value_takes_effect(path: str) -> None:
    """Case 53."""
    value, expected = SETTINGS[path]
    values = nested(path, value)
    if path == "serviceAccount.create":
        values["serviceAccount"]["name"] = "robot"
    done = run("template", "rel", str(CHART), "--namespace", "octavo-system", values=values)
    assert done.returncode == 0, done.stderr
    text = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("#")) + "\n"
    if path in GONE:
        subjects = "kind: ServiceAccount\n" if path == "serviceAccount.create" else ""
        cut = text.split("subjects:")[0] if subjects else text
        assert GONE[path] not in cut
    else:
        assert expected in text
        before = run("template", "rel", str(CHART), "--namespace", "octavo-system", values={}).stdout
        assert expected not in before


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"fullNameOverride": "x"}, "fullNameOverride"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"engineImage": {"pullPolicy": "Always"}}, "pullPolicy"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"replicas": "two"}, "replicas"),
        ({"watchNamespaces": ["Team A"]}, "watchNamespaces"),
        ({"livenessProbe": {"periodSecond": 3}}, "periodSecond"),
    ],
    ids=json.dumps,
)
def test_a_misspelt_key_or_a_wrong_value_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    done = run("template", "rel", str(CHART), values=values)
    assert done.returncode != 0
    assert named in done.stderr


def test_every_value_that_the_readme_names_exists() -> None:
    text = (CHART / "README.md").read_text()
    named = set(re.findall(r"--set '?([A-Za-z.]+)=", text)) | {
        "imagePullSecrets",
        "workloadImagePullSecrets",
        "crds.install",
    }
    assert named <= set(SETTINGS)
    assert all(f"`{key}" in text or f"{key}=" in text for key in named)
