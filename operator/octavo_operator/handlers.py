"""kopf's part: watch the services and what they own, and hand every event to the controller.

Only low-level events are used: kopf then writes no annotation and no finalizer into the user's objects, and
the controller, not kopf, decides what is due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf

from octavo_operator import names as n
from octavo_operator import resource
from octavo_operator.kube import Kube

Tell = Callable[[str, dict[str, Any], bool], None]

# Kinds by the group and plural they are watched by. No Secrets: the operator may not list them.
OWNED = {
    "Deployment": ("apps", "v1", "deployments"),
    "Pod": ("", "v1", "pods"),
    "PodDisruptionBudget": ("policy", "v1", "poddisruptionbudgets"),
    "Role": ("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "Service": ("", "v1", "services"),
    "ServiceAccount": ("", "v1", "serviceaccounts"),
}
# A watch can stall without an error: it is ended by the server after this, by us a little later.
WATCH_S, WATCH_LIMIT_S, CONNECT_S, REQUEST_S = 300, 330, 10, 30


def registry(kube: Kube, tell: Tell) -> kopf.OperatorRegistry:
    """Handlers that call ``tell(kind, body, gone)`` for every event, by the credentials of ``kube``."""
    made = kopf.OperatorRegistry()

    def login(**_: Any) -> kopf.ConnectionInfo:
        """The operator's own credentials; kopf asks again when the API server refuses an old token."""
        config = kube.config
        scheme, token = (kube.authorization() or " ").split(" ", 1)
        return kopf.ConnectionInfo(
            server=config.host,
            ca_path=config.ssl_ca_cert,
            insecure=not config.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=config.cert_file,
            private_key_path=config.key_file,
        )

    kopf.on.login(registry=made, id="login")(_async(login))

    def on_service(body: kopf.Body, type: str | None, **_: Any) -> None:
        tell(resource.KIND, dict(body), type == "DELETED")

    kopf.on.event(resource.GROUP, resource.VERSION, resource.PLURAL, registry=made, id="service")(
        _async(on_service)
    )
    for kind, (group, version, plural) in OWNED.items():

        def on_owned(body: kopf.Body, type: str | None, kind: str = kind, **_: Any) -> None:
            tell(kind, dict(body), type == "DELETED")

        kopf.on.event(
            group, version, plural, registry=made, id=kind.lower(), labels={n.SERVICE_LABEL: kopf.PRESENT}
        )(_async(on_owned))
    return made


def settings() -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    made.watching.server_timeout = WATCH_S
    made.watching.client_timeout = WATCH_LIMIT_S
    made.watching.connect_timeout = CONNECT_S
    made.networking.request_timeout = REQUEST_S
    made.networking.connect_timeout = CONNECT_S
    made.scanning.disabled = True  # what we watch is known: no need to read all CRDs and namespaces
    made.posting.enabled = False
    for group, version, plural in OWNED.values():
        made.watching.label_selectors[group, version, plural] = n.SERVICE_LABEL
    return made


def _async(handler: Any) -> Any:
    """On kopf's loop, not in a thread each: nothing here waits."""

    async def run(**kwargs: Any) -> Any:
        return handler(**kwargs)

    return run
