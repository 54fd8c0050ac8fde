"""Pod templates of engines and routers: pure functions from the spec to dicts."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from octavo_operator import names as n
from octavo_operator import overlay
from octavo_operator.platform import Platform
from octavo_operator.resource import InferenceService, engine_args, router_args, settings

MODELS = "/models"
FETCHED = f"{MODELS}/model"  # the link that `octavo fetch URI /models` leaves
KEYS = "/etc/octavo/keys"
# After the engine has cut its last streams it still has to exit before the kubelet kills it.
EXIT_MARGIN_S = 10
# Loading a large model over a network takes long; a dead engine ends its own pod, so this bounds only a hang.
STARTUP_PERIOD_S, STARTUP_LIMIT_S = 2, 3600

Manifest = dict[str, Any]


def engine_template(service: InferenceService, platform: Platform, key_hash: str) -> Manifest:
    """The engines' PodTemplateSpec under the user's overlay; ``key_hash`` marks the private key they read."""
    fetch = _fetch_container(service, platform)
    spec = _pod_spec(service, platform) | {
        "serviceAccountName": n.names(service.name).engine,
        "automountServiceAccountToken": False,
        "containers": [_engine_container(service, platform)],
        "volumes": _engine_volumes(service),
    }
    if fetch:
        spec["initContainers"] = [fetch]
    return _finished(service, n.ENGINE, spec, service.engine.pod_template, key_hash)


def router_template(service: InferenceService, platform: Platform, key_hash: str) -> Manifest:
    """The router's PodTemplateSpec with the overlay laid over it."""
    spec = _pod_spec(service, platform) | {
        "serviceAccountName": n.names(service.name).router,
        "containers": [_router_container(service, platform)],
        "volumes": [_tmp_volume(), *_key_volumes(service)],
    }
    return _finished(service, n.ROUTER, spec, service.router.pod_template, key_hash)


def grace_period_s(service: InferenceService) -> int:
    """Seconds from SIGTERM to SIGKILL: streams may run to the engine's drain limit."""
    config = settings(service)
    return math.ceil(config.drain_grace_s + config.drain_timeout_s) + EXIT_MARGIN_S


def _pod_spec(service: InferenceService, platform: Platform) -> Manifest:
    spec: Manifest = {
        "terminationGracePeriodSeconds": grace_period_s(service),
        "enableServiceLinks": False,  # a Service named octavo would set OCTAVO_PORT and the like
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    if platform.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in platform.pull_secrets]
    return spec


def _engine_container(service: InferenceService, platform: Platform) -> Manifest:
    args = [
        "serve",
        _model_path(service.model.uri),
        "--host=0.0.0.0",
        f"--port={n.HTTP_PORT}",
        f"--private-port={n.PRIVATE_PORT}",
        *engine_args(service),
        *_key_args(service),
    ]
    container = _container(n.ENGINE, platform.engine_image, platform, args)
    container |= {
        "env": [*container["env"], _private_key_env(service), *_threads_env(service)],
        "ports": [
            {"name": "http", "containerPort": n.HTTP_PORT, "protocol": "TCP"},
            {"name": "private", "containerPort": n.PRIVATE_PORT, "protocol": "TCP"},
        ],
        "startupProbe": _probe("/startup", STARTUP_PERIOD_S, STARTUP_LIMIT_S // STARTUP_PERIOD_S),
        "readinessProbe": _probe("/ready", 2, 2),
        "livenessProbe": _probe("/live", 10, 6),
        "resources": _engine_resources(service, platform),
        "volumeMounts": [*container["volumeMounts"], *_model_mounts(service), *_key_mounts(service)],
    }
    if service.engine.device == "cuda":
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    return container


def _fetch_container(service: InferenceService, platform: Platform) -> Manifest | None:
    """The init container that brings the model, or None where it is there already."""
    if service.model.uri.startswith(("file://", "pvc://")):
        return None
    container = _container("fetch", platform.engine_image, platform, ["fetch", service.model.uri, MODELS])
    container["resources"] = dict(service.engine.resources)
    container["volumeMounts"] = [*container["volumeMounts"], *_model_mounts(service)]
    if service.model.secret:
        container["envFrom"] = [{"secretRef": {"name": service.model.secret}}]
    return container


def _router_container(service: InferenceService, platform: Platform) -> Manifest:
    args = [
        "router",
        "--host=0.0.0.0",
        f"--port={n.HTTP_PORT}",
        f"--service={n.names(service.name).engine}",
        f"--namespace={service.namespace}",
        f"--drain-timeout-s={settings(service).drain_timeout_s:g}",  # as long as the engines behind it
        *router_args(service),
        *_key_args(service),
    ]
    container = _container(n.ROUTER, platform.image, platform, args)
    return container | {
        "env": [*container["env"], _private_key_env(service)],
        "ports": [{"name": "http", "containerPort": n.HTTP_PORT, "protocol": "TCP"}],
        "readinessProbe": _probe("/ready", 2, 2),
        "livenessProbe": _probe("/live", 10, 6),
        "resources": dict(service.router.resources),
        "volumeMounts": [*container["volumeMounts"], *_key_mounts(service)],
    }


def _container(name: str, image: str, platform: Platform, args: list[str]) -> Manifest:
    """What every container of ours has: passes Pod Security "restricted", and only /tmp can be written."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": platform.pull_policy,
        "args": args,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The last lines of a failed container's log become its message, and so the condition's.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _probe(path: str, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _model_path(uri: str) -> str:
    if uri.startswith("file://"):
        return uri
    if uri.startswith("pvc://"):
        path = uri.removeprefix("pvc://").partition("/")[2].strip("/")
        return f"{MODELS}/{path}" if path else MODELS
    return FETCHED


def _model_mounts(service: InferenceService) -> list[Manifest]:
    if service.model.uri.startswith("file://"):
        return []
    mount: Manifest = {"name": "model", "mountPath": MODELS}
    return [mount | {"readOnly": True}] if service.model.uri.startswith("pvc://") else [mount]


def _engine_volumes(service: InferenceService) -> list[Manifest]:
    volumes = [_tmp_volume(), *_key_volumes(service)]
    uri = service.model.uri
    if uri.startswith("pvc://"):
        claim = uri.removeprefix("pvc://").partition("/")[0]
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    elif not uri.startswith("file://"):
        volumes.append({"name": "model", "emptyDir": {}})
    if service.engine.device == "cuda":
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})  # NCCL, and torch between processes
    return volumes


def _engine_resources(service: InferenceService, platform: Platform) -> Manifest:
    resources = dict(service.engine.resources)
    if service.engine.device == "cuda":
        gpus = {platform.gpu_resource: str(service.engine.tensor)}
        resources["limits"] = gpus | dict(resources.get("limits", {}))
    return resources


def _tmp_volume() -> Manifest:
    return {"name": "tmp", "emptyDir": {}}


def _key_args(service: InferenceService) -> list[str]:
    return [f"--api-key-dir={KEYS}"] if service.api_key_secret else []


def _key_mounts(service: InferenceService) -> list[Manifest]:
    return [{"name": "api-keys", "mountPath": KEYS, "readOnly": True}] if service.api_key_secret else []


def _key_volumes(service: InferenceService) -> list[Manifest]:
    if not service.api_key_secret:
        return []
    return [{"name": "api-keys", "secret": {"secretName": service.api_key_secret}}]


def _private_key_env(service: InferenceService) -> Manifest:
    key = {"name": n.names(service.name).private, "key": n.PRIVATE_KEY_FIELD}
    return {"name": n.PRIVATE_KEY_ENV, "valueFrom": {"secretKeyRef": key}}


def _threads_env(service: InferenceService) -> list[Manifest]:
    """As many threads as the CPU limit allows: more would be stopped together for the rest of each period."""
    if "cpu" not in service.engine.resources.get("limits", {}):
        return []
    limit = {"containerName": n.ENGINE, "resource": "limits.cpu", "divisor": "1"}
    return [{"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": limit}}]


def _finished(service: InferenceService, role: str, spec: Manifest, patch: Any, key_hash: str) -> Manifest:
    """Our template with the user's over it, marked by its own hash: it tells which pods are current."""
    template: Manifest = {
        "metadata": {"labels": n.labels(service.name, role), "annotations": {n.KEY_ANNOTATION: key_hash}},
        "spec": spec,
    }
    merged: Manifest = overlay.merge(template, patch)
    text = json.dumps(merged, sort_keys=True)
    merged["metadata"]["annotations"][n.TEMPLATE_ANNOTATION] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return merged
