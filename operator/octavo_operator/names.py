"""Names, labels and ports of everything the operator makes: in one place, so that they cannot drift apart."""

from __future__ import annotations

import dataclasses
import hashlib

HTTP_PORT = 8000
PRIVATE_PORT = 8001

SERVICE_LABEL = "octavo.dev/service"
ROLE_LABEL = "octavo.dev/role"
TEMPLATE_ANNOTATION = "octavo.dev/template-hash"
KEY_ANNOTATION = "octavo.dev/private-key-hash"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

FIELD_MANAGER = "octavo-operator"
ENGINE, ROUTER = "engine", "router"
PRIVATE_KEY_ENV = "OCTAVO_PRIVATE_KEY"
PRIVATE_KEY_FIELD = "key"

_MAX_LABEL = 63  # of a DNS label (a Service's name) and of a label's value


def fit(name: str) -> str:
    """``name``, or where it is over 63 characters its beginning and a hash of the whole."""
    if len(name) <= _MAX_LABEL:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _MAX_LABEL - len(digest) - 1].rstrip('-')}-{digest}"


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of the objects of one InferenceService."""

    service: str  # Service of the router: what clients call
    label: str  # value of octavo.dev/service
    engine: str  # Deployment, headless Service, ServiceAccount and PodDisruptionBudget of the engines
    router: str  # Deployment, ServiceAccount, Role, RoleBinding and PodDisruptionBudget of the router
    private: str  # Secret with the key of the private ports


def names(name: str) -> Names:
    return Names(
        service=fit(name), label=fit(name), engine=fit(f"{name}-engine"), router=fit(f"{name}-router"),
        private=fit(f"{name}-private"),
    )  # fmt: skip


def selector(name: str, role: str) -> dict[str, str]:
    """The fixed labels that a Deployment selects its pods by; they never change."""
    return {SERVICE_LABEL: names(name).label, ROLE_LABEL: role}


def labels(name: str, role: str) -> dict[str, str]:
    """Labels of every object. No version of the operator among them: upgrading it must not roll pods."""
    return selector(name, role) | {
        "app.kubernetes.io/name": "octavo",
        "app.kubernetes.io/instance": names(name).label,
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/part-of": "octavo",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def url(name: str, namespace: str) -> str:
    """Where clients inside the cluster find the OpenAI API."""
    return f"http://{names(name).service}.{namespace}.svc:{HTTP_PORT}/v1"
