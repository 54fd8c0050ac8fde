"""What goes wrong shows in the status within seconds, by its own reason, and goes when it is mended."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.access import Cluster
from cluster.service import KIND, SMALL, await_service, change, condition, example, merged, serving

SECONDS = 45  # for a fault to show: a pull or a start must fail first


def _image(name: str | None) -> dict[str, Any]:
    containers = [{"name": "engine", "image": name}] if name else []
    return {"engine": {"podTemplate": {"spec": {"containers": containers}}}}


def _memory(limit: str) -> dict[str, Any]:
    return {"engine": {"resources": {"limits": {"memory": limit}}}}


@pytest.mark.parametrize(
    ("fault", "mended", "reason", "named"),
    [
        pytest.param(
            _image("octavo.test/absent:1"), _image(None), "Image", "octavo.test/absent:1", id="image"
        ),
        pytest.param(_memory("160Mi"), _memory("4Gi"), "OOMKilled", "memory", id="memory"),
        pytest.param(
            {"engine": {"device": "cuda", "kvCacheMemory": None}},
            {"engine": {"device": "cpu", "kvCacheMemory": "64Mi"}},
            "Unschedulable",
            "nvidia.com/gpu",
            id="gpu",
        ),
    ],
)
def test_a_fault_of_the_pods_shows_its_reason_and_goes(
    cluster: Cluster, octavo: str, namespace: str, fault: dict, mended: dict, reason: str, named: str
) -> None:
    name = "faulty"
    cluster.apply(example(name, **merged(fault, {"replicas": 1})), namespace=namespace)
    broken = await_service(
        cluster, namespace, name, lambda s: reason in condition(s)["reason"], timeout=SECONDS
    )
    assert condition(broken)["status"] == "False"
    assert named in condition(broken)["message"]
    change(cluster, namespace, name, mended)
    whole = await_service(cluster, namespace, name, serving(1))
    assert reason not in str(whole["status"]["conditions"])
    cluster.kubectl("delete", KIND, name, "-n", namespace, "--timeout=60s")


@pytest.fixture
def quota(cluster: Cluster, octavo: str, namespace: str) -> Iterator[str]:
    """A quota that leaves no room for a pod; its name."""
    spec = {"hard": {"requests.cpu": "1m"}}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"}, "spec": spec},
        namespace=namespace,
    )
    cluster.watch(
        "resourcequota", lambda q: q["tight"].get("status", {}).get("hard"), namespace, name="tight"
    )
    yield "tight"
    cluster.kubectl("delete", "resourcequota", "tight", "-n", namespace, "--ignore-not-found")


def test_a_quota_that_refuses_pods_is_named_and_goes(
    cluster: Cluster, octavo: str, namespace: str, quota: str
) -> None:
    cluster.apply(example("confined", replicas=1, engine={"resources": SMALL}), namespace=namespace)
    refused = await_service(
        cluster, namespace, "confined", lambda s: "Quota" in condition(s)["reason"], timeout=SECONDS
    )
    assert quota in condition(refused)["message"]
    cluster.kubectl("delete", "resourcequota", quota, "-n", namespace)
    whole = await_service(cluster, namespace, "confined", serving(1))
    assert "Quota" not in str(whole["status"]["conditions"])
    cluster.kubectl("delete", KIND, "confined", "-n", namespace, "--timeout=60s")


def test_a_service_deleted_while_the_operator_is_down_goes_when_it_is_back(
    cluster: Cluster, octavo: str, namespace: str
) -> None:
    cluster.apply(example("orphan", replicas=1), namespace=namespace)
    selector = "octavo.dev/service=orphan"
    cluster.watch("pods", lambda pods: len(pods) == 2, namespace, selector=selector, timeout=60)
    [operator] = cluster.kubectl("get", "deployment", "-n", octavo, "-o", "name").split()
    cluster.kubectl("scale", operator, "-n", octavo, "--replicas=0")
    cluster.watch("pods", lambda pods: not pods, octavo, timeout=60)
    cluster.kubectl("delete", KIND, "orphan", "-n", namespace, "--wait=false")
    cluster.kubectl("scale", operator, "-n", octavo, "--replicas=1")
    cluster.watch(KIND, lambda found: "orphan" not in found, namespace, timeout=90)
    cluster.watch("pods", lambda pods: not pods, namespace, selector=selector, timeout=90)
    for kind in ("deployments", "services", "secrets", "serviceaccounts", "roles", "poddisruptionbudgets"):
        cluster.watch(kind, lambda found: not found, namespace, selector=selector, timeout=60)
