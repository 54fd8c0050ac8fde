"""The ``podTemplate`` overlay: a user's pod template laid over ours, as ``kubectl patch`` merges one.

Objects merge by key, the lists below by the key Kubernetes merges them by, all other lists are replaced;
null removes. What the operator itself needs (selector labels, the server's arguments and ports, the shared
key) cannot be changed: such an overlay is refused by name instead of being ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError

# Merge keys of the lists in a pod template (patchMergeKey in the Kubernetes API); "" appends.
_MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "imagePullSecrets": "name",
    "env": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort",
    "hostAliases": "ip",
    "resourceClaims": "name", "tolerations": "", "topologySpreadConstraints": "", "envFrom": "",
}  # fmt: skip
# A volume has one source and a variable one value, so an entry of the same name takes the place of ours.
_REPLACED_WHOLE = {"volumes", "env"}

_OWN_LABELS = ("octavo.dev/", "app.kubernetes.io/")
_OWN_ENV = {"OCTAVO_PRIVATE_KEY"}
_OWN_VOLUMES = {"api-keys"}
_OWN_MOUNTS = {"/models", "/etc/octavo/keys"}


def check(template: Mapping[str, Any], role: str, path: str) -> None:
    """Raise ``ConfigError`` naming the first thing in an overlay that would break the pods of ``role``."""
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    for field in ("labels", "annotations"):
        for key in metadata.get(field) or {}:
            if key.startswith(_OWN_LABELS):
                raise _refused(
                    f"{path}.metadata.{field}", f"{key} belongs to the operator; use a key of your own"
                )
    if "restartPolicy" in spec:
        raise _refused(f"{path}.spec.restartPolicy", "a Deployment's pods always restart; remove it")
    if role == "engine" and "terminationGracePeriodSeconds" in spec:
        raise _refused(
            f"{path}.spec.terminationGracePeriodSeconds",
            "it follows how long streams may run on; set --drain-timeout-s in spec.engine.args",
        )
    for kind in ("containers", "initContainers"):
        for container in _named(spec.get(kind), f"{path}.spec.{kind}"):
            if container["name"] in (role, "fetch"):
                _check_own_container(container, role, f"{path}.spec.{kind}[{container['name']}]")
    for volume in _named(spec.get("volumes"), f"{path}.spec.volumes"):
        if volume["name"] in _OWN_VOLUMES:
            raise _refused(f"{path}.spec.volumes[{volume['name']}]", "this volume belongs to the operator")


def _check_own_container(container: Mapping[str, Any], role: str, path: str) -> None:
    instead = {
        "args": "use spec.engine.args" if role == "engine" else "use spec.router",
        "command": "the operator sets it",
        "ports": "the operator sets them",
        "resources": f"use spec.{role}.resources",
    }
    for key, use in instead.items():
        if key in container:
            raise _refused(f"{path}.{key}", f"cannot be changed here: {use}")
    for variable in _named(container.get("env"), f"{path}.env"):
        if variable["name"] in _OWN_ENV:
            raise _refused(f"{path}.env[{variable['name']}]", "this variable belongs to the operator")
    for mount in container.get("volumeMounts") or ():
        if isinstance(mount, Mapping) and mount.get("mountPath") in _OWN_MOUNTS:
            raise _refused(f"{path}.volumeMounts[{mount['mountPath']}]", "the operator mounts a volume there")


def _named(items: Any, path: str) -> list[Mapping[str, Any]]:
    if items is None:
        return []
    if not isinstance(items, list) or not all(
        isinstance(i, Mapping) and isinstance(i.get("name"), str) for i in items
    ):
        raise _refused(path, "must be a list of objects, each with a name")
    return items


def _refused(path: str, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}", param=path)


def merge(base: Any, patch: Any, field: str = "") -> Any:
    """``base`` with ``patch`` laid over it, neither changed. ``field``: the name of the field they are in."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge(base.get(key), value, key)
        return merged
    if isinstance(base, list) and isinstance(patch, list) and field in _MERGE_KEYS:
        return _merge_list(base, patch, field)
    return copy.deepcopy(patch)


def _merge_list(base: list[Any], patch: list[Any], field: str) -> list[Any]:
    key, merged = _MERGE_KEYS[field], list(base)
    where = {item[key]: index for index, item in enumerate(base) if key}
    for item in patch:
        index = where.get(item.get(key)) if key and isinstance(item, Mapping) else None
        if index is None:
            merged.append(copy.deepcopy(item))
        else:
            merged[index] = copy.deepcopy(item) if field in _REPLACED_WHOLE else merge(merged[index], item)
    return merged
