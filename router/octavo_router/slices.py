"""Which endpoints there are, in a cluster: the EndpointSlices of a Service, listed and watched.

A plain client of two Kubernetes verbs (list and watch of ``endpointslices`` in one namespace) with the pod's
own service-account token, over aiohttp. The last good list stays while the API server is away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from octavo.errors import ConfigError
from octavo_router.membership import Endpoint, Membership

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIST_TIMEOUT_S = 15.0
PAGE_SIZE = 500
# The server ends a watch after this; the client gives up on one that shows nothing, not even its end, a
# little later.
WATCH_S = 240
WATCH_MARGIN_S = 30
# A full list anyway after this, in case an event was lost.
RESYNC_S = 600.0
BACKOFF_S = (0.5, 10.0)  # first and longest wait after a fault
HTTP_PORT, PRIVATE_PORT = "http", "private"


@dataclass(frozen=True)
class ClusterAccess:
    """How to reach the API server. ``token_file`` is read at each request: projected tokens are rotated."""

    base_url: str
    token_file: Path | None
    ca_file: Path | None

    @classmethod
    def in_pod(cls, environ: Mapping[str, str] = os.environ) -> ClusterAccess:
        """From the pod's environment. Raises ``ConfigError`` outside a cluster."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "--service is for a pod in a cluster (KUBERNETES_SERVICE_HOST is not set); "
                "elsewhere give --endpoints-file"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", SERVICE_ACCOUNT / "token", SERVICE_ACCOUNT / "ca.crt")

    def headers(self) -> dict[str, str]:
        """Authorization of one request."""
        if self.token_file is None:
            return {}
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}

    def ssl_context(self) -> ssl.SSLContext | bool:
        """Trusts the cluster's own authority."""
        return ssl.create_default_context(cafile=str(self.ca_file)) if self.ca_file else True


def pod_namespace() -> str:
    """The namespace of this pod. Raises ``ConfigError`` outside a cluster."""
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip()
    except OSError as error:
        raise ConfigError(f"--namespace is not given and this is no pod: {error}") from error


class _Relist(Exception):
    """The watch cannot go on from where it was."""


class SliceMembership(Membership):
    """Endpoints of all EndpointSlices labelled with the Service's name."""

    def __init__(
        self, access: ClusterAccess, service: str, namespace: str, *, watch_s: int = WATCH_S,
        backoff_s: tuple[float, float] = BACKOFF_S,
    ) -> None:  # fmt: skip
        self._access = access
        self._service = service
        self._namespace = namespace
        self._watch_s = watch_s
        self._backoff_s = backoff_s
        self._slices: dict[str, dict[str, Any]] = {}
        self._current: list[Endpoint] | None = None
        self.problem = f"EndpointSlices of {namespace}/{service} have not been listed yet"

    async def run(self, on_change: Callable[[list[Endpoint]], None]) -> None:
        connector = aiohttp.TCPConnector(ssl=self._access.ssl_context())
        async with aiohttp.ClientSession(self._access.base_url, connector=connector) as session:
            wait = self._backoff_s[0]
            while True:
                try:
                    version = await self._list(session, on_change)
                    wait = self._backoff_s[0]
                    listed_at = time.monotonic()
                    while time.monotonic() - listed_at < RESYNC_S:
                        version = await self._watch(session, version, on_change)
                except _Relist as reason:
                    log.info("EndpointSlices are listed again: %s", reason)
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    self._trouble(f"{error or type(error).__name__}")
                    await asyncio.sleep(wait * random.uniform(0.5, 1.5))
                    wait = min(wait * 2, self._backoff_s[1])

    def _trouble(self, error: str) -> None:
        problem = f"EndpointSlices of {self._namespace}/{self._service} cannot be read: {error}"
        if problem != self.problem:
            log.error("%s%s", problem, "" if self._current is None else "; the last good list stays")
        self.problem = problem

    @property
    def _path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"

    def _query(self, **more: str) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._service}", **more}

    async def _list(self, session: aiohttp.ClientSession, on_change: Callable[[list[Endpoint]], None]) -> str:
        slices: dict[str, dict[str, Any]] = {}
        query = self._query(limit=str(PAGE_SIZE))
        timeout = aiohttp.ClientTimeout(total=LIST_TIMEOUT_S)
        while True:
            async with session.get(
                self._path, params=query, headers=self._access.headers(), timeout=timeout
            ) as response:
                body = await self._checked(response)
            slices |= {item["metadata"]["name"]: item for item in body.get("items") or []}
            token = body["metadata"].get("continue")
            if not token:
                break
            query["continue"] = token
        self._slices = slices
        self.problem = ""
        self._publish(on_change)
        return str(body["metadata"]["resourceVersion"])

    async def _checked(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        """The JSON of an answer. Raises ``ValueError`` that says what to do when it is a refusal."""
        data = await response.read()
        if response.status == 410:
            raise _Relist("the list expired between two pages")
        if response.status in (401, 403):
            raise ValueError(
                f"the API server answered {response.status}: {_message(data)}. The router's ServiceAccount "
                "needs a Role "
                f"with get, list and watch on endpointslices.discovery.k8s.io in namespace {self._namespace}"
            )
        if response.status != 200:
            raise ValueError(f"the API server answered {response.status}: {_message(data)}")
        body = msgspec.json.decode(data)
        if not isinstance(body, dict):
            raise ValueError("the API server's answer is not an object")
        return body

    async def _watch(
        self, session: aiohttp.ClientSession, version: str, on_change: Callable[[list[Endpoint]], None]
    ) -> str:
        """Follow changes until the server ends the watch; returns the version to go on from."""
        query = self._query(
            watch="1", resourceVersion=version, allowWatchBookmarks="true", timeoutSeconds=str(self._watch_s)
        )
        timeout = aiohttp.ClientTimeout(total=self._watch_s + WATCH_MARGIN_S, sock_connect=LIST_TIMEOUT_S)
        async with session.get(
            self._path, params=query, headers=self._access.headers(), timeout=timeout
        ) as response:
            if response.status != 200:
                await self._checked(response)
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        version = self._event(msgspec.json.decode(line)) or version
                if lines:
                    self._publish(on_change)
        return version

    def _event(self, event: dict[str, Any]) -> str | None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise _Relist(f"{item.get('code')} {item.get('reason')}: {item.get('message')}")
        metadata = item["metadata"]
        if kind == "DELETED":
            self._slices.pop(metadata["name"], None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[metadata["name"]] = item
        version = metadata.get("resourceVersion")
        return str(version) if version else None

    def _publish(self, on_change: Callable[[list[Endpoint]], None]) -> None:
        endpoints = endpoints_of(list(self._slices.values()))
        if endpoints != self._current:
            self._current = endpoints
            on_change(endpoints)


def endpoints_of(slices: list[dict[str, Any]]) -> list[Endpoint]:
    """The endpoints of EndpointSlices, by name. Slices without our two named ports are left out.

    ``terminating`` comes from the conditions. ``ready`` and ``serving`` are not used to leave an endpoint
    out: the router asks each engine itself, which is fresher in both directions than the kubelet's probes. A
    pod that stands in two slices (dual stack, or moved from one to the other) is taken once, IPv4 first, and
    terminating only where all say so.
    """
    found: dict[str, Endpoint] = {}
    for item in sorted(slices, key=lambda s: (s.get("addressType") != "IPv4", s["metadata"]["name"])):
        if item.get("addressType") not in ("IPv4", "IPv6"):
            continue
        ports = {port.get("name"): port.get("port") for port in item.get("ports") or []}
        if not ports.get(HTTP_PORT) or not ports.get(PRIVATE_PORT):
            continue
        for entry in item.get("endpoints") or []:
            address = entry["addresses"][0]
            host = f"[{address}]" if item["addressType"] == "IPv6" else address
            name = (entry.get("targetRef") or {}).get("name") or address
            terminating = bool((entry.get("conditions") or {}).get("terminating"))
            known = found.get(name)
            if known is None or (known.terminating and not terminating):
                found[name] = Endpoint(
                    name,
                    f"http://{host}:{ports[HTTP_PORT]}",
                    f"http://{host}:{ports[PRIVATE_PORT]}",
                    terminating,
                )
    return sorted(found.values(), key=lambda e: e.name)


def _message(data: bytes) -> str:
    try:
        status = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data[:200].decode("utf-8", "replace")
    return str(status.get("message", status)) if isinstance(status, dict) else str(status)
