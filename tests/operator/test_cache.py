"""What the operator remembers of the cluster."""

from __future__ import annotations

from typing import Any

from octavo_operator import names as n
from octavo_operator.cache import Cache, fingerprint

LONG = "a" * 60


def thing(name: str, kind: str = "", version: int = 1, **meta: Any) -> dict[str, Any]:
    made = {
        "name": name,
        "namespace": "ns",
        "uid": f"{kind}{name}",
        "resourceVersion": str(version),
        "labels": {},
    }
    return {"metadata": made | meta, "spec": {}}


def owned(name: str, service: str, owner: str, version: int = 1) -> dict[str, Any]:
    references = [{"kind": "InferenceService", "uid": owner, "controller": True}]
    labels = {n.SERVICE_LABEL: n.names(service).label, n.ROLE_LABEL: "engine"}
    return thing(name, version=version, labels=labels, ownerReferences=references, creationTimestamp="t")


def test_a_late_event_does_not_undo_what_is_known() -> None:
    cache = Cache()
    cache.put("InferenceService", thing("m", version=5), gone=False)
    cache.put("InferenceService", thing("m", version=4), gone=False)
    assert cache.services[("ns", "m")]["metadata"]["resourceVersion"] == "5"


def test_a_deployment_of_an_earlier_service_of_the_same_name_is_not_ours() -> None:
    cache = Cache()
    cache.put("InferenceService", thing("m"), gone=False)
    cache.put("Deployment", owned("m-engine", "m", "earlier"), gone=False)
    assert cache.deployment(("ns", "m"), "engine") is None
    cache.put("Deployment", owned("m-engine", "m", "m", version=2), gone=False)
    assert cache.deployment(("ns", "m"), "engine") is not None


def test_a_service_that_is_being_deleted_is_forgotten() -> None:
    cache = Cache()
    cache.put("InferenceService", thing("m"), gone=False)
    cache.put("InferenceService", thing("m", version=2, deletionTimestamp="now"), gone=False)
    assert cache.services == {}


def test_objects_of_a_service_with_a_long_name_are_found_by_its_shortened_label() -> None:
    cache, name = Cache(), LONG + "-and-more"
    cache.put("InferenceService", thing(name), gone=False)
    pod = owned("p", name, name)
    cache.put("Pod", pod, gone=False)
    assert cache.key_of(pod) == ("ns", name)
    assert cache.pods(("ns", name), "engine") == [pod]
    cache.put("Pod", pod, gone=True)
    assert cache.pods(("ns", name)) == []


def test_status_and_scale_are_no_drift_but_a_changed_field_is() -> None:
    base = {"metadata": {"labels": {"a": "b"}}, "spec": {"replicas": 1, "x": 1}, "status": {"y": 1}}
    scaled = {"metadata": {"labels": {"a": "b"}}, "spec": {"replicas": 7, "x": 1}, "status": {"y": 2}}
    assert fingerprint(base) == fingerprint(scaled)
    assert fingerprint(base) != fingerprint(base | {"spec": {"replicas": 1, "x": 2}})
    assert fingerprint(base) != fingerprint(base | {"metadata": {"labels": {}}})
