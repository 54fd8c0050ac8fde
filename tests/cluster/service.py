"""InferenceServices for tests: the example with changes, and what its status says."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from cluster.access import Cluster, Object

KIND = "inferenceservices.octavo.dev"
EXAMPLE = Path(__file__).parents[2] / "manifests" / "examples" / "smollm2.yaml"
SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}}  # so that many replicas fit a small machine
START_TIMEOUT = 180.0  # seconds for an engine to load on a busy machine


def example(name: str, **spec: Any) -> Object:
    """`manifests/examples/smollm2.yaml` under another name, with `spec` laid over its spec (None removes)."""
    manifest: Object = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["name"] = name
    small = {"engine": {"kvCacheMemory": "64Mi", "resources": SMALL}, "router": {"resources": SMALL}}
    manifest["spec"] = merged(merged(manifest["spec"], small), {"model": {"name": "smollm2"}} | spec)
    return manifest


def merged(base: Any, over: Any) -> Any:
    """A JSON merge patch (RFC 7396)."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return copy.deepcopy(over)
    result = {k: v for k, v in base.items() if over.get(k, v) is not None}
    return result | {k: merged(result.get(k, {}), v) for k, v in over.items() if v is not None}


def condition(service: Object, kind: str = "Ready") -> dict[str, Any]:
    """A condition of the status; an empty one where the operator has not written it for this generation."""
    status = service.get("status", {})
    for found in status.get("conditions", ()):
        if found["type"] == kind and found.get("observedGeneration") == service["metadata"]["generation"]:
            return dict(found)
    return {"status": "Unknown", "reason": "", "message": ""}


def await_service(
    cluster: Cluster,
    namespace: str,
    name: str,
    until: Callable[[Object], Any],
    timeout: float = START_TIMEOUT,
) -> Object:
    """Watches a service until `until` holds for it; returns it as it is then."""
    return cluster.watch(
        KIND,
        lambda found: found[name] if name in found and until(found[name]) else None,
        namespace,
        name=name,
        timeout=timeout,
    )


def serving(replicas: int) -> Callable[[Object], bool]:
    """All of `replicas` engines serve what the spec says now."""

    def holds(service: Object) -> bool:
        status = service.get("status", {})
        return (
            condition(service)["status"] == "True"
            and condition(service, "Progressing")["reason"] == "Complete"
            and status.get("replicas") == status.get("readyReplicas") == replicas
        )

    return holds


def engines(cluster: Cluster, namespace: str, name: str) -> dict[str, Object]:
    """The engine pods that are not ending, by name."""
    selector = f"octavo.dev/service={name},octavo.dev/role=engine"
    pods = cluster.list("pods", namespace, selector)
    return {p["metadata"]["name"]: p for p in pods if "deletionTimestamp" not in p["metadata"]}


def change(cluster: Cluster, namespace: str, name: str, spec: dict[str, Any]) -> None:
    """Patches the spec of a service as `kubectl edit` would."""
    cluster.kubectl("patch", KIND, name, "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))
