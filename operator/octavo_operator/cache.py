"""What the watches have shown of the cluster: the newest body of each object, by namespace and name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from octavo_operator import names as n

Key = tuple[str, str]  # namespace and name of an InferenceService
Body = dict[str, Any]


class Cache:
    def __init__(self) -> None:
        self.services: dict[Key, Body] = {}
        self._deployments: dict[Key, Body] = {}
        self._pods: dict[
            tuple[str, str], dict[str, Body]
        ] = {}  # by namespace and service label, then by name

    def put(self, kind: str, body: Body, gone: bool) -> None:
        """Take in an event of a watch (or an answer to a write, so that nothing waits for the watch)."""
        meta = body["metadata"]
        key = (meta["namespace"], meta["name"])
        if kind == "Pod":
            pods = self._pods.setdefault((meta["namespace"], meta["labels"][n.SERVICE_LABEL]), {})
            _keep(pods, meta["name"], body, gone)
            if not pods:
                del self._pods[(meta["namespace"], meta["labels"][n.SERVICE_LABEL])]
        elif kind == "Deployment":
            _keep(self._deployments, key, body, gone)
        elif kind == "InferenceService":
            _keep(self.services, key, body, gone or "deletionTimestamp" in meta)

    def deployment(self, key: Key, role: str) -> Body | None:
        """The Deployment of a service, if it belongs to this very service and not to one deleted before."""
        own = n.names(key[1])
        body = self._deployments.get((key[0], own.engine if role == n.ENGINE else own.router))
        service = self.services.get(key)
        if body and service and owner_uid(body) == service["metadata"]["uid"]:
            return body
        return None

    def pods(self, key: Key, role: str | None = None) -> list[Body]:
        """Pods of a service, the newest first."""
        pods = self._pods.get((key[0], n.names(key[1]).label), {}).values()
        chosen = [p for p in pods if role in (None, p["metadata"]["labels"].get(n.ROLE_LABEL))]
        return sorted(
            chosen, key=lambda p: (p["metadata"]["creationTimestamp"], p["metadata"]["name"]), reverse=True
        )

    def key_of(self, body: Mapping[str, Any]) -> Key | None:
        """The service that an object carries the label of."""
        namespace, label = (
            body["metadata"]["namespace"],
            body["metadata"].get("labels", {}).get(n.SERVICE_LABEL),
        )
        if (namespace, label) in self.services:
            return (namespace, label)
        for key in self.services:  # a name over 63 characters, shortened in the label
            if key[0] == namespace and n.names(key[1]).label == label:
                return key
        return None


def _keep(store: dict[Any, Body], key: Any, body: Body, gone: bool) -> None:
    old = store.get(key)
    if old and _is_older(body, old):
        return  # an answer to our own write came before the watch told of an earlier state
    if gone:
        store.pop(key, None)
    else:
        store[key] = body


def _is_older(body: Body, than: Body) -> bool:
    one, other = body["metadata"], than["metadata"]
    return one["uid"] == other["uid"] and int(one["resourceVersion"]) < int(other["resourceVersion"])


def owner_uid(body: Mapping[str, Any]) -> str | None:
    """The uid of the InferenceService that an object belongs to."""
    for owner in body["metadata"].get("ownerReferences", ()):
        if owner.get("controller") and owner["kind"] == "InferenceService":
            return str(owner["uid"])
    return None


def fingerprint(body: Mapping[str, Any]) -> str:
    """Changes when somebody changes what we applied; not with status, nor with the scale."""
    meta = body["metadata"]
    rest = {k: v for k, v in body.items() if k not in ("metadata", "status", "apiVersion", "kind")}
    if isinstance(rest.get("spec"), dict):
        rest["spec"] = {k: v for k, v in rest["spec"].items() if k != "replicas"}
    rest["labels"], rest["owners"] = meta.get("labels"), meta.get("ownerReferences")
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
