"""Leader election by a Lease, as client-go does it: one operator acts, others stand by.

A Lease counts as expired when it has not changed for its duration by our own clock, so clocks need not agree.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from typing import Any

from octavo_operator.kube import ApiError, Kube, path
from octavo_operator.metrics import LEADER

log = logging.getLogger("octavo.operator")

DURATION_S = 30
RENEW_DEADLINE_S = 20.0  # without a renewal for this long we stop acting, well before others may start
RETRY_S = 2.0
ATTEMPT_S = 5.0  # one slow answer must not use up the deadline


class Lease:
    """One candidate (``identity``) for the Lease ``namespace/name``."""

    def __init__(self, kube: Kube, namespace: str, name: str, identity: str) -> None:
        self._kube, self._namespace, self._name, self._identity = kube, namespace, name, identity
        self._seen: tuple[Any, float] | None = None  # the Lease's spec, and when it was first seen so

    async def acquire(self) -> None:
        """Return once we hold it."""
        waiting = False
        while True:
            try:
                holder = await self._try()
            except ApiError as error:
                holder = None
                log.warning("Lease %s/%s: %s", self._namespace, self._name, error.message)
            if holder == self._identity:
                LEADER.set(1)
                log.info("leading as %s", self._identity)
                return
            if not waiting and holder:
                waiting = True
                log.info("standing by: %s leads", holder)
            await asyncio.sleep(RETRY_S)

    async def hold(self) -> None:
        """Renew until it is lost, then return."""
        renewed = time.monotonic()
        while time.monotonic() - renewed < RENEW_DEADLINE_S:
            await asyncio.sleep(RETRY_S)
            try:
                holder = await self._try()
            except ApiError as error:
                log.warning("Lease %s/%s was not renewed: %s", self._namespace, self._name, error.message)
                continue
            if holder is None:  # written by somebody at the same moment
                continue
            if holder != self._identity:
                break
            renewed = time.monotonic()
        LEADER.set(0)
        log.error("the Lease %s/%s is lost", self._namespace, self._name)

    async def release(self) -> None:
        """Let the next one start at once."""
        LEADER.set(0)
        lease = await self._kube.get(self._path())
        if lease and lease["spec"].get("holderIdentity") == self._identity:
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
            await self._kube.replace(lease)

    def _path(self) -> str:
        return path("coordination.k8s.io/v1", "Lease", self._namespace, self._name)

    async def _try(self) -> str | None:
        """Create, renew or take over the Lease if we may. Returns the holder as far as known."""
        try:
            async with asyncio.timeout(ATTEMPT_S):
                return await self._attempt()
        except TimeoutError as error:
            raise ApiError(0, "Timeout", f"no answer from the API server in {ATTEMPT_S:g} s") from error

    async def _attempt(self) -> str | None:
        lease = await self._kube.get(self._path())
        if lease is None:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._claim(0),
            }
            return await self._write(self._kube.create, lease)
        spec = lease["spec"]
        holder = spec.get("holderIdentity")
        if self._seen is None or self._seen[0] != spec:
            self._seen = (spec, time.monotonic())
        expired = time.monotonic() - self._seen[1] > spec.get("leaseDurationSeconds", DURATION_S)
        if holder and holder != self._identity and not expired:
            return str(holder)
        transitions = spec.get("leaseTransitions", 0)
        if holder == self._identity:
            lease["spec"] = spec | {"renewTime": _now()}
        else:
            lease["spec"] = self._claim(transitions + 1)
        return await self._write(self._kube.replace, lease)

    async def _write(self, write: Any, lease: dict[str, Any]) -> str | None:
        try:
            await write(lease)
        except ApiError as error:
            if error.status == 409:  # another was faster
                return None
            raise
        return self._identity

    def _claim(self, transitions: int) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_S,
            "acquireTime": _now(),
            "renewTime": _now(),
            "leaseTransitions": transitions,
        }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
