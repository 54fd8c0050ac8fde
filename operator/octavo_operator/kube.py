"""A small asynchronous client of the Kubernetes API: get, list, server-side apply, patch, create, delete.

Credentials come from the pod's service account or a kubeconfig, as the official client finds them; tokens are
read again as they rotate. Every request has a timeout.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
import kubernetes.client
import kubernetes.config

from octavo_operator.names import FIELD_MANAGER

REQUEST_TIMEOUT_S = 20
_PLURALS = {
    "ConfigMap": "configmaps",
    "Deployment": "deployments",
    "Event": "events",
    "InferenceService": "inferenceservices",
    "Lease": "leases",
    "Pod": "pods",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "Secret": "secrets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
}
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The API server refused a request, or could not be reached (``status`` 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


def path(api_version: str, kind: str, namespace: str, name: str = "", subresource: str = "") -> str:
    """The path of an object, of a collection (no name) or of a subresource."""
    root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    parts = [root, "namespaces", namespace, _PLURALS[kind], name, subresource]
    return "/".join(part for part in parts if part)


def path_of(manifest: Mapping[str, Any]) -> str:
    meta = manifest["metadata"]
    return path(manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"])


class Kube:
    """Use as ``async with Kube() as kube``."""

    def __init__(self) -> None:
        self._config = kubernetes.client.Configuration()
        try:
            kubernetes.config.load_incluster_config(client_configuration=self._config)  # type: ignore[no-untyped-call]
        except kubernetes.config.ConfigException:
            kubernetes.config.load_kube_config(client_configuration=self._config)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Kube:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(ssl=self._ssl())
        self._session = aiohttp.ClientSession(self._config.host, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def config(self) -> kubernetes.client.Configuration:
        """Where the API server is, and its certificates."""
        return self._config

    def authorization(self) -> str | None:
        """The header's value with the token as it is now."""
        value: str | None = self._config.get_api_key_with_prefix("BearerToken", alias="authorization")
        return value

    def _ssl(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._config.ssl_ca_cert)
        if not self._config.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self._config.cert_file:
            context.load_cert_chain(self._config.cert_file, self._config.key_file)
        return context

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        **params: str,
    ) -> dict[str, Any]:
        """One request; raises ``ApiError`` for any answer that is not a success, and where there is none."""
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        if authorization := self.authorization():
            headers["Authorization"] = authorization
        data = json.dumps(body) if body is not None else None
        try:
            async with self._session.request(
                method, path, data=data, headers=headers, params=params
            ) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ApiError(0, "Unreachable", f"no answer from the API server: {error!r}") from error
        if response.status >= 300:
            answer = answer if isinstance(answer, dict) else {}
            message = answer.get("message") or response.reason or ""
            raise ApiError(response.status, answer.get("reason") or "Unknown", message)
        result: dict[str, Any] = answer
        return result

    async def get(self, path: str) -> dict[str, Any] | None:
        """The object, or None if there is none."""
        try:
            return await self.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, path: str, **params: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = (await self.request("GET", path, None, "", **params))["items"]
        return items

    async def apply(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply as our field manager; fields of others are taken over, unknown ones refused."""
        return await self.request(
            "PATCH",
            path_of(manifest),
            manifest,
            APPLY,
            fieldManager=FIELD_MANAGER,
            force="true",
            fieldValidation="Strict",
        )

    async def merge(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.request("PATCH", path, body, MERGE, fieldManager=FIELD_MANAGER)

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        where = path(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["namespace"])
        return await self.request("POST", where, manifest, fieldManager=FIELD_MANAGER)

    async def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        return await self.request("PUT", path_of(manifest), manifest, fieldManager=FIELD_MANAGER)

    async def scale(self, kind_path: str, replicas: int) -> dict[str, Any]:
        """Set replicas by the scale subresource."""
        return await self.merge(f"{kind_path}/scale", {"spec": {"replicas": replicas}})
