"""What the operator does to its objects in a real cluster. Most pods here find no node, so none runs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cluster.access import Cluster, KubectlError, Object
from cluster.service import KIND, await_service, change, condition, example

from octavo.errors import ConfigError
from octavo_operator.resource import load

NOWHERE = {"podTemplate": {"spec": {"nodeSelector": {"octavo.dev/no-such-node": "true"}}}}
OWNED = "deployments,services,secrets,serviceaccounts,roles,rolebindings,poddisruptionbudgets"
CHILDREN = 11  # objects of one service


def idle(name: str, **spec: Any) -> Object:
    """A service whose pods wait for a node for ever."""
    return example(name, **({"engine": NOWHERE, "router": NOWHERE} | spec))


def replicas(cluster: Cluster, namespace: str, name: str, wanted: int, timeout: float = 60) -> None:
    cluster.watch(
        "deployment",
        lambda d: name in d and d[name]["spec"]["replicas"] == wanted,
        namespace,
        name=name,
        timeout=timeout,
    )


def children(cluster: Cluster, namespace: str, name: str) -> list[Object]:
    return cluster.list(OWNED, namespace, f"octavo.dev/service={name}")


def handled(cluster: Cluster, namespace: str, name: str, timeout: float = 60) -> Object:
    """The service once the operator has carried out its newest generation."""

    def done(service: Object) -> bool:
        return bool(condition(service)["reason"]) and len(children(cluster, namespace, name)) == CHILDREN

    return await_service(cluster, namespace, name, done, timeout=timeout)


def refused_manifests() -> ModuleType:
    """The manifests that `octavo up` refuses, of the operator's own tests."""
    where = Path(__file__).parents[1] / "operator/test_resource.py"
    spec = importlib.util.spec_from_file_location("refused_manifests", where)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_server_refuses_what_octavo_up_refuses_with_the_same_words(
    cluster: Cluster, octavo: str, namespace: str
) -> None:
    module = refused_manifests()
    compared = 0
    for fields, param, _ in module.REFUSED:
        text = module.manifest(**fields)
        with pytest.raises(ConfigError) as ours:
            load(text)
        if (
            param == "spec.engine.args" and isinstance(fields["engine__args"], list)
        ) or ".podTemplate.spec" in param:
            continue  # seen only by the operator, and marked in the status
        if "podTemplate.metadata" in param:
            continue
        with pytest.raises(KubectlError) as theirs:
            cluster.kubectl("apply", "--dry-run=server", "-n", namespace, "-f", "-", input=text)
        said = str(theirs.value)
        assert param in said
        if "unknown field" in ours.value.message or "must be of type" in ours.value.message:
            assert "unknown field" in said or "must be of type" in said
        else:
            assert ours.value.message.removeprefix(f"{param}: ").split(": should")[0] in said
        compared += 1
    assert compared > 20


def test_drift_is_corrected(cluster: Cluster, octavo: str, namespace: str) -> None:
    cluster.apply(idle("drifting", replicas=2), namespace=namespace)
    handled(cluster, namespace, "drifting")
    replicas(cluster, namespace, "drifting-engine", 2)
    key = cluster.get("secret", "drifting-private", namespace)["data"]
    kubectl = cluster.kubectl
    kubectl("delete", "service/drifting", "role/drifting-router", "-n", namespace)
    kubectl("set", "image", "deployment/drifting-engine", "engine=drifted:1", "-n", namespace)
    kubectl("label", "deployment/drifting-router", "octavo.dev/role=drifted", "--overwrite", "-n", namespace)
    kubectl("scale", "deployment/drifting-engine", "--replicas=5", "-n", namespace)

    def mended(deployments: dict[str, Object]) -> bool:
        engine, router = deployments["drifting-engine"], deployments["drifting-router"]
        image = engine["spec"]["template"]["spec"]["containers"][0]["image"]
        role = router["metadata"]["labels"]["octavo.dev/role"]
        return image == cluster.images.engine and role == "router" and engine["spec"]["replicas"] == 2

    cluster.watch("deployment", mended, namespace, timeout=60)
    cluster.watch("service", lambda found: "drifting" in found, namespace, timeout=60)
    cluster.watch("role", lambda found: "drifting-router" in found, namespace, timeout=60)
    assert cluster.get("secret", "drifting-private", namespace)["data"] == key


def test_nothing_is_written_while_nothing_changes(cluster: Cluster, octavo: str, namespace: str) -> None:
    cluster.apply(idle("quiet", replicas=1), namespace=namespace)
    handled(cluster, namespace, "quiet")
    replicas(cluster, namespace, "quiet-engine", 1)
    # The scheduler's last word on both pods, after which nothing happens any more.
    await_service(
        cluster,
        namespace,
        "quiet",
        lambda s: condition(s, "RouterReady")["reason"] == "Unschedulable",
        timeout=60,
    )
    before = {
        o["metadata"]["name"] + o["kind"]: o["metadata"].get("generation")
        for o in children(cluster, namespace, "quiet")
    }
    for number in range(5):
        cluster.kubectl("annotate", KIND, "quiet", f"note={number}", "--overwrite", "-n", namespace)
    change(cluster, namespace, "quiet", {"router": {"replicas": 2}})
    replicas(cluster, namespace, "quiet-router", 2)
    after = {
        o["metadata"]["name"] + o["kind"]: o["metadata"].get("generation")
        for o in children(cluster, namespace, "quiet")
    }
    assert (
        after["quiet-routerDeployment"] == before.pop("quiet-routerDeployment") + 1
    )  # the number of replicas
    assert before.items() <= after.items()


def test_an_outside_scaler_is_left_alone(cluster: Cluster, octavo: str, namespace: str) -> None:
    """Case 43."""
    cluster.apply(idle("outside", replicas=None, autoscaling={"mode": "external"}), namespace=namespace)
    replicas(cluster, namespace, "outside-engine", 1)
    assert cluster.get(KIND, "outside", namespace)["spec"]["replicas"] == 1
    cluster.kubectl("scale", KIND, "outside", "--replicas=4", "-n", namespace)
    replicas(cluster, namespace, "outside-engine", 4)
    before = cluster.get("deployment", "outside-engine", namespace)
    for number in range(10):
        cluster.kubectl("annotate", KIND, "outside", f"note={number}", "--overwrite", "-n", namespace)
    change(cluster, namespace, "outside", {"router": {"replicas": 2}})
    replicas(cluster, namespace, "outside-router", 2)
    after = cluster.get("deployment", "outside-engine", namespace)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    text = cluster.kubectl(
        "get", "deployment", "outside-engine", "-n", namespace, "-o", "json", "--show-managed-fields"
    )
    applied = [f for f in json.loads(text)["metadata"]["managedFields"] if f["operation"] == "Apply"]
    assert applied and all("f:replicas" not in f["fieldsV1"]["f:spec"] for f in applied)
    scale = json.loads(
        cluster.kubectl(
            "get",
            "--raw",
            f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/inferenceservices/outside/scale",
        )
    )
    assert scale["spec"]["replicas"] == 4
    assert scale["status"]["selector"] == "octavo.dev/service=outside,octavo.dev/role=engine"


def test_new_bounds_of_autoscaling_count_without_traffic(
    cluster: Cluster, octavo: str, namespace: str
) -> None:
    """Case 41."""
    scaling = {"mode": "native", "minReplicas": 1, "maxReplicas": 4}
    cluster.apply(idle("bounded", replicas=None, autoscaling=scaling), namespace=namespace)
    replicas(cluster, namespace, "bounded-engine", 1)
    change(cluster, namespace, "bounded", {"autoscaling": {"minReplicas": 3}})
    replicas(cluster, namespace, "bounded-engine", 3)
    change(cluster, namespace, "bounded", {"autoscaling": {"minReplicas": 1, "maxReplicas": 1}})
    replicas(cluster, namespace, "bounded-engine", 1)
    with pytest.raises(KubectlError, match=r"spec.replicas.*native autoscaling"):
        cluster.kubectl("scale", KIND, "bounded", "--replicas=2", "-n", namespace)


def test_a_paused_service_is_left_as_it_is(cluster: Cluster, octavo: str, namespace: str) -> None:
    cluster.apply(idle("paused", replicas=1), namespace=namespace)
    handled(cluster, namespace, "paused")
    change(cluster, namespace, "paused", {"paused": True, "replicas": 3})
    await_service(
        cluster, namespace, "paused", lambda s: condition(s, "Progressing")["reason"] == "Paused", timeout=60
    )
    assert cluster.get("deployment", "paused-engine", namespace)["spec"]["replicas"] == 1
    change(cluster, namespace, "paused", {"paused": False})
    replicas(cluster, namespace, "paused-engine", 3)


def test_an_object_of_somebody_else_is_never_taken_over(
    cluster: Cluster, octavo: str, namespace: str
) -> None:
    cluster.kubectl("create", "service", "clusterip", "taken", "--tcp=80:80", "-n", namespace)
    cluster.apply(idle("taken"), namespace=namespace)
    service = await_service(
        cluster, namespace, "taken", lambda s: condition(s)["reason"] == "NameConflict", timeout=60
    )
    assert "Service taken" in condition(service)["message"]
    assert cluster.get("service", "taken", namespace)["spec"]["ports"][0]["port"] == 80
    cluster.kubectl("delete", "service", "taken", "-n", namespace)
    handled(cluster, namespace, "taken", timeout=90)


def test_a_podtemplate_that_kubernetes_refuses_is_told_by_its_field(
    cluster: Cluster, octavo: str, namespace: str
) -> None:
    overlay = {"podTemplate": {"spec": {"nodeSelectr": {"a": "b"}}}}
    cluster.apply(idle("misspelt", engine=overlay), namespace=namespace)
    service = await_service(
        cluster, namespace, "misspelt", lambda s: condition(s)["reason"] == "InvalidSpec", timeout=60
    )
    assert "nodeSelectr" in condition(service)["message"]


@pytest.mark.parametrize("length", [40, 70])
def test_long_names_give_valid_objects(cluster: Cluster, octavo: str, length: int) -> None:
    """Case 37."""
    namespace, name = "n" * 40, "m" * length
    cluster.kubectl("create", "namespace", namespace)
    try:
        cluster.apply(idle(name, replicas=1), namespace=namespace)
        selector = "app.kubernetes.io/part-of=octavo"
        cluster.watch("pods", lambda pods: len(pods) == 2, namespace, selector=selector, timeout=60)
        service = await_service(
            cluster, namespace, name, lambda s: condition(s)["reason"] == "Unschedulable", timeout=60
        )
        host = service["status"]["url"].removeprefix("http://").split(":")[0]
        assert all(len(label) <= 63 for label in host.split("."))
        assert host.split(".")[0] in [s["metadata"]["name"] for s in cluster.list("services", namespace)]
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--timeout=120s", timeout=130)


def test_pods_are_admitted_where_pod_security_is_restricted(cluster: Cluster, octavo: str) -> None:
    namespace = "restricted"
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }
    )
    try:
        cluster.apply(idle("strict", replicas=1), namespace=namespace)
        cluster.watch("pods", lambda pods: len(pods) == 2, namespace, timeout=60)
        # The operator's own pods, looked at as if their namespace were restricted too.
        args = (
            "label",
            "namespace",
            octavo,
            "pod-security.kubernetes.io/enforce=restricted",
            "--dry-run=server",
        )
        done = cluster.kubectl(*args, "--warnings-as-errors")
        assert octavo in done
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def operator(cluster: Cluster, octavo: str) -> Iterator[str]:
    """The operator's Deployment, which runs again after the test."""
    [deployment] = cluster.kubectl("get", "deployment", "-n", octavo, "-o", "name").split()
    yield deployment
    cluster.kubectl("scale", deployment, "-n", octavo, "--replicas=1")
    cluster.kubectl("rollout", "status", deployment, "-n", octavo, "--timeout=60s")


def test_what_happened_while_the_operator_was_down_is_made_up_for(
    cluster: Cluster, octavo: str, namespace: str, operator: str
) -> None:
    """Case 35."""
    names = [f"down-{number}" for number in range(10)]
    cluster.apply(*(idle(name, replicas=1) for name in names), namespace=namespace)
    for name in names:
        handled(cluster, namespace, name, timeout=120)
    cluster.kubectl("scale", operator, "-n", octavo, "--replicas=0")
    cluster.watch("pods", lambda pods: not pods, octavo, timeout=60)
    cluster.kubectl("delete", KIND, *names[:5], "-n", namespace, "--timeout=30s")
    for name in names[5:8]:
        change(cluster, namespace, name, {"replicas": 2})
    cluster.kubectl("scale", operator, "-n", octavo, "--replicas=1")
    for name in names[5:8]:
        replicas(cluster, namespace, f"{name}-engine", 2)
    for name in names[:5]:
        selector = f"octavo.dev/service={name}"
        for kind in OWNED.split(","):
            cluster.watch(kind, lambda found: not found, namespace, selector=selector, timeout=60)
    assert cluster.get("deployment", "down-9-engine", namespace)["metadata"]["generation"] == 1


def test_one_gpu_is_enough_to_change_a_service_that_uses_it(
    cluster: Cluster, octavo: str, namespace: str
) -> None:
    """Case 38."""
    if not cluster.own:
        pytest.skip("changes the node's capacity, so it wants a cluster of the tests' own")
    [node] = cluster.kubectl("get", "nodes", "-o", "name").split()
    patch = [
        {"op": "add", "path": f"/status/{kind}/nvidia.com~1gpu", "value": "1"}
        for kind in ("capacity", "allocatable")
    ]
    cluster.kubectl("patch", node, "--subresource=status", "--type=json", "-p", json.dumps(patch))
    gpu = {"device": "cuda", "kvCacheMemory": None, "dtype": "float32"}
    cluster.apply(idle("single", replicas=1, engine=gpu), namespace=namespace)
    selector = "octavo.dev/service=single,octavo.dev/role=engine"
    [first] = cluster.watch("pods", _placed, namespace, selector=selector, timeout=60)
    change(cluster, namespace, "single", {"engine": {"args": ["--max-num-seqs=7"]}})

    def replaced(pods: dict[str, Object]) -> bool:
        return first not in pods and bool(_placed(pods))

    cluster.watch("pods", replaced, namespace, selector=selector, timeout=120)
    cluster.kubectl("delete", KIND, "single", "-n", namespace, "--timeout=60s")


def _placed(pods: dict[str, Object]) -> list[str]:
    """Pods that have a node."""
    return [name for name, pod in pods.items() if pod["spec"].get("nodeName")]


def test_another_operator_goes_on_when_the_leader_ends(
    cluster: Cluster, octavo: str, namespace: str, operator: str
) -> None:
    cluster.kubectl("scale", operator, "-n", octavo, "--replicas=2")
    cluster.kubectl("rollout", "status", operator, "-n", octavo, "--timeout=60s")
    leader = _holder(cluster.get("lease", "octavo-operator", octavo))
    assert leader in [pod["metadata"]["name"] for pod in cluster.list("pods", octavo)]
    cluster.kubectl("delete", "pod", leader, "-n", octavo, "--wait=false")
    cluster.watch(
        "lease",
        lambda leases: _holder(leases["octavo-operator"]) not in ("", leader),
        octavo,
        name="octavo-operator",
        timeout=60,
    )
    cluster.apply(idle("succeeded"), namespace=namespace)
    handled(cluster, namespace, "succeeded")


def _holder(lease: Object) -> str:
    """The pod that leads."""
    return str(lease["spec"]["holderIdentity"]).split("_")[0]
