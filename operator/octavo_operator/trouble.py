"""Why pods do not come up, as Kubernetes tells it: one reason and one message a person can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from octavo_operator import names as n

Manifest = Mapping[str, Any]

MAX_MESSAGE = 600
# Kubernetes swaps between these two while it retries; a condition should not.
_SAME_REASON = {"ErrImagePull": "ImagePullBackOff"}
_WAITING = {
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
    "RegistryUnavailable", "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
}  # fmt: skip
_CRASHED = "CrashLoopBackOff"
# Events of a pod whose containers were not made yet; nothing in its status says why.
POD_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedPostStartHook")


@dataclasses.dataclass(frozen=True)
class Trouble:
    reason: str
    message: str


def of_deployment(deployment: Manifest) -> Trouble | None:
    """Pods that could not even be created: a quota, an admission rule, an invalid template."""
    for condition in deployment.get("status", {}).get("conditions", ()):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            message = condition.get("message", "")
            quota = "exceeded quota" in message or "must specify" in message
            return Trouble(
                "QuotaExceeded" if quota else condition.get("reason", "FailedCreate"), _short(message)
            )
    return None


def of_pods(pods: Sequence[Manifest], events: Mapping[str, Trouble]) -> Trouble | None:
    """The first trouble among pods that are not ready. ``events``: the newest warning by pod name."""
    for pod in pods:
        if found := of_pod(pod, events.get(pod["metadata"]["name"])):
            return found
    return None


def of_pod(pod: Manifest, event: Trouble | None = None) -> Trouble | None:
    """What keeps one pod from becoming ready; None if it is ready, ending, or on its way."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if is_ready(pod) or is_ending(pod) or status.get("phase") in ("Failed", "Succeeded"):
        return None
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Trouble(
                condition.get("reason", "Unschedulable"),
                _short(f"pod {name}: {condition.get('message', '')}"),
            )
    statuses = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    for container in statuses:
        if found := _of_container(name, container, pod):
            return found
    return Trouble(event.reason, _short(f"pod {name}: {event.message}")) if event else None


def _of_container(pod_name: str, container: Manifest, pod: Manifest) -> Trouble | None:
    state, last = container.get("state", {}), container.get("lastState", {})
    where = f"pod {pod_name}, container {container['name']}"
    waiting = state.get("waiting", {})
    if waiting.get("reason") in _WAITING:
        reason = _SAME_REASON.get(waiting["reason"], waiting["reason"])
        return Trouble(reason, _short(f"{where}: {waiting.get('message', waiting['reason'])}"))
    ended = state.get("terminated") or last.get("terminated")
    if not ended or container.get("ready") or ended.get("exitCode") == 0:
        return None
    restarts = f"; {container.get('restartCount', 0)} restarts"
    if ended.get("reason") == "OOMKilled":
        limit = _memory_limit(pod, container["name"])
        return Trouble("OOMKilled", f"{where}: out of memory{limit}{restarts}")
    said = _last_line(ended.get("message", "")) or ended.get("reason", "no message")
    reason = "ModelFetchFailed" if container["name"] == "fetch" else _CRASHED
    return Trouble(reason, _short(f"{where}: exit code {ended.get('exitCode')}: {said}{restarts}"))


def _memory_limit(pod: Manifest, container: str) -> str:
    spec = pod.get("spec", {})
    for each in [*spec.get("initContainers", ()), *spec.get("containers", ())]:
        if each["name"] == container:
            limit = each.get("resources", {}).get("limits", {}).get("memory")
            return f" at its limit of {limit}" if limit else ""
    return ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def is_ending(pod: Manifest) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def template_hash(manifest: Manifest) -> str | None:
    """The mark of the template that a pod (or the pods of a Deployment) was made from."""
    template = manifest["spec"].get("template", manifest)
    value: str | None = template["metadata"].get("annotations", {}).get(n.TEMPLATE_ANNOTATION)
    return value
