"""From an InferenceService to the objects that serve it: pure functions, each returns a manifest.

Nothing here holds a version of the operator, a time or a random number: the same spec gives the same bytes,
so a restart or an upgrade of the operator changes nothing. Replica counts are left out on purpose: the
operator writes them through the scale subresource, so that applying a manifest never resets what an
autoscaler has set.
"""

from __future__ import annotations

import hashlib
from typing import Any

from octavo_operator import names as n
from octavo_operator import pods
from octavo_operator.platform import Platform
from octavo_operator.resource import API_VERSION, KIND, InferenceService

Manifest = dict[str, Any]


def build_all(service: InferenceService, platform: Platform, private_key: str) -> list[Manifest]:
    """Every object but the Secret, in the order to apply them. Of ``private_key`` only a hash is kept."""
    key_hash = hashlib.sha256(private_key.encode()).hexdigest()[:16]
    router_template = pods.router_template(service, platform, key_hash)
    return [
        build_service_account(service, n.ENGINE),
        build_service_account(service, n.ROUTER),
        build_role(service),
        build_role_binding(service, router_template["spec"]["serviceAccountName"]),
        build_engine_service(service),
        build_router_service(service),
        build_disruption_budget(service, n.ENGINE),
        build_disruption_budget(service, n.ROUTER),
        build_deployment(service, n.ENGINE, pods.engine_template(service, platform, key_hash)),
        build_deployment(service, n.ROUTER, router_template),
    ]


def build_private_secret(service: InferenceService, key: str) -> Manifest:
    """The key that router and operator show to the engines' private ports; made once, then left alone."""
    secret = _object(service, "v1", "Secret", n.names(service.name).private, n.ENGINE)
    return secret | {"type": "Opaque", "stringData": {n.PRIVATE_KEY_FIELD: key}}


def build_deployment(service: InferenceService, role: str, template: Manifest) -> Manifest:
    deployment = _object(service, "apps/v1", "Deployment", _role_name(service, role), role)
    return deployment | {
        "spec": {
            "selector": {"matchLabels": n.selector(service.name, role)},
            "strategy": _strategy(service, role),
            "template": template,
        }
    }


def _strategy(service: InferenceService, role: str) -> Manifest:
    """GPUs are rarely to spare: end an old engine first, or the new one waits for its GPU for ever."""
    if role == n.ENGINE and service.engine.device == "cuda":
        return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def build_engine_service(service: InferenceService) -> Manifest:
    """Headless: its EndpointSlices are the router's membership."""
    manifest = _object(service, "v1", "Service", n.names(service.name).engine, n.ENGINE)
    return manifest | {
        "spec": {
            "clusterIP": "None",
            "selector": n.selector(service.name, n.ENGINE),
            "ports": [_port("http", n.HTTP_PORT), _port("private", n.PRIVATE_PORT)],
        }
    }


def build_router_service(service: InferenceService) -> Manifest:
    """What clients call."""
    manifest = _object(service, "v1", "Service", n.names(service.name).service, n.ROUTER)
    return manifest | {
        "spec": {
            "type": "ClusterIP",
            "selector": n.selector(service.name, n.ROUTER),
            "ports": [_port("http", n.HTTP_PORT)],
        }
    }


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}


def build_service_account(service: InferenceService, role: str) -> Manifest:
    account = _object(service, "v1", "ServiceAccount", _role_name(service, role), role)
    return account | {"automountServiceAccountToken": role == n.ROUTER}


def build_role(service: InferenceService) -> Manifest:
    """The router reads which engines there are, and nothing else."""
    role = _object(service, "rbac.authorization.k8s.io/v1", "Role", n.names(service.name).router, n.ROUTER)
    rule = {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }
    return role | {"rules": [rule]}


def build_role_binding(service: InferenceService, account: str) -> Manifest:
    name = n.names(service.name).router
    binding = _object(service, "rbac.authorization.k8s.io/v1", "RoleBinding", name, n.ROUTER)
    return binding | {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": service.namespace}],
    }


def build_disruption_budget(service: InferenceService, role: str) -> Manifest:
    """A drained node takes one pod at a time; pods that serve nothing never stand in its way."""
    budget = _object(service, "policy/v1", "PodDisruptionBudget", _role_name(service, role), role)
    return budget | {
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": n.selector(service.name, role)},
        }
    }


def _role_name(service: InferenceService, role: str) -> str:
    return n.names(service.name).engine if role == n.ENGINE else n.names(service.name).router


def _object(service: InferenceService, api_version: str, kind: str, name: str, role: str) -> Manifest:
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
    }
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": n.labels(service.name, role),
            "ownerReferences": [owner],
        },
    }
