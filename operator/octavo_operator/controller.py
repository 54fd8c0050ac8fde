"""Bring each InferenceService about: apply its objects, keep them so, and tell the truth in its status.

Level-triggered: any event of the service or of what it owns marks it as due; one task a service then looks at
the whole and acts. A failure is retried with growing pauses, and shown in the status meanwhile. There is no
finalizer: owner references let Kubernetes delete everything, also while the operator is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo_operator import builders, resource, scaling, status
from octavo_operator import names as n
from octavo_operator import trouble as t
from octavo_operator.cache import Body, Cache, Key, fingerprint, owner_uid
from octavo_operator.kube import ApiError, Kube, path, path_of
from octavo_operator.metrics import RECONCILES
from octavo_operator.platform import Platform
from octavo_operator.resource import InferenceService
from octavo_operator.trouble import Trouble

log = logging.getLogger("octavo.operator")

RESYNC_S = 300.0  # everything is applied again this often, for drift that no watch shows (the Secret)
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
STUCK_S = 300.0  # a reconcile takes seconds; the liveness probe fails after this


class Conflict(Exception):
    """An object of a name we need belongs to somebody else."""


class Controller:
    """Holds one task for each service. ``kube`` must be open; everything runs on one event loop."""

    def __init__(self, kube: Kube, platform: Platform) -> None:
        self.kube = kube
        self.platform = platform
        self.cache = Cache()
        self._loops: dict[Key, ServiceLoop] = {}

    def seen(self, kind: str, body: Body, gone: bool) -> None:
        """An event of a watch."""
        self.cache.put(kind, body, gone)
        if kind == "InferenceService":
            key = (body["metadata"]["namespace"], body["metadata"]["name"])
            if key not in self.cache.services:
                self._end(key)
                return
            if key not in self._loops:
                self._loops[key] = ServiceLoop(self, key)
            self._loops[key].service_seen(body)
            return
        key_of = self.cache.key_of(body)
        if key_of and (loop := self._loops.get(key_of)):
            loop.owned_seen(kind, body, gone)

    def _end(self, key: Key) -> None:
        if loop := self._loops.pop(key, None):
            loop.end()

    def stuck(self) -> bool:
        """Whether a reconcile hangs, for the liveness probe."""
        return any(loop.busy_for() > STUCK_S for loop in self._loops.values())

    async def close(self) -> None:
        loops = list(self._loops.values())
        for key in list(self._loops):
            self._end(key)
        await asyncio.gather(*(loop.ended() for loop in loops))


class ServiceLoop:
    """Reconciles one service, one pass at a time."""

    def __init__(self, controller: Controller, key: Key) -> None:
        self.controller = controller
        self.key = key
        self.scaler = scaling.Scaler(controller.kube, controller.cache, key, self._scaled)
        self._due = asyncio.Event()
        self._apply_due = True
        self._applied: dict[tuple[str, str], str] = {}  # fingerprints by kind and name
        self._fixed: dict[str, int] = {}  # replicas by Deployment, where nobody else may set them
        self._generation = -1  # the newest seen
        self._done_generation = 0  # carried out, or found impossible
        self._error: Trouble | None = None
        self._retry_s = FIRST_RETRY_S
        self._busy_since: float | None = None
        self._task = asyncio.create_task(self._run(), name=f"service {key[0]}/{key[1]}")

    def service_seen(self, body: Body) -> None:
        if body["metadata"]["generation"] != self._generation:
            self._generation = body["metadata"]["generation"]
            self._apply_due = True
        self._due.set()

    def owned_seen(self, kind: str, body: Body, gone: bool) -> None:
        """An object of ours was changed or deleted; what differs from what we applied is applied again."""
        name = (kind, body["metadata"]["name"])
        if name in self._applied and (gone or fingerprint(body) != self._applied[name]):
            self._apply_due = True
        if kind == "Deployment" and self._fixed.get(name[1], now := body["spec"].get("replicas")) != now:
            self._apply_due = True
        self._due.set()

    def _scaled(self) -> None:
        self._due.set()

    def end(self) -> None:
        self._task.cancel()
        self.scaler.stop()

    async def ended(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def busy_for(self) -> float:
        return time.monotonic() - self._busy_since if self._busy_since is not None else 0.0

    async def _run(self) -> None:
        wait_s = RESYNC_S
        while True:
            try:
                await asyncio.wait_for(self._due.wait(), wait_s)
            except TimeoutError:
                self._apply_due = True
            self._due.clear()
            self._busy_since = time.monotonic()
            try:
                wait_s = await self._pass()
            except ApiError as error:  # of the status, or of a read: nothing could be said, so try again
                log.warning("%s/%s: %s", *self.key, error.message)
                RECONCILES.labels("error").inc()
                wait_s = self._backoff()
            except Exception:
                log.exception("%s/%s: reconcile failed", *self.key)
                RECONCILES.labels("error").inc()
                wait_s = self._backoff()
            self._busy_since = None

    def _backoff(self) -> float:
        self._apply_due = True
        pause, self._retry_s = self._retry_s, min(2 * self._retry_s, LAST_RETRY_S)
        return pause

    async def _pass(self) -> float:
        """Apply if due, then write the status. Returns the longest wait until the next pass, in seconds."""
        wait_s = RESYNC_S
        if self._apply_due:
            self._apply_due = False
            wait_s = await self._apply()
        if body := self.controller.cache.services.get(self.key):
            trouble = await self._write_status(body)
            if trouble and trouble.reason == "CreateContainerConfigError":
                wait_s = min(wait_s, self._backoff())  # perhaps the Secret was deleted, which no watch shows
        return wait_s

    async def _apply(self) -> float:
        body = await self.controller.kube.get(path(resource.API_VERSION, resource.KIND, *self.key))
        cached = self.controller.cache.services.get(self.key)
        if body is None or cached is None or body["metadata"]["uid"] != cached["metadata"]["uid"]:
            return RESYNC_S  # deleted; the watch will say so
        generation = body["metadata"]["generation"]
        try:
            service, unknown = resource.from_stored(body)
            if unknown:
                log.warning("%s/%s: not known to this version, left aside: %s", *self.key, ", ".join(unknown))
            if service.external_scaler and service.replicas is None:
                await self._first_replicas(body, service.start_replicas)
            if not service.paused:
                await self._apply_objects(service)
            self._error = None
        except ConfigError as error:
            self._error = Trouble("InvalidSpec", error.message)
        except Conflict as error:
            self._error = Trouble("NameConflict", str(error))
            return self._failed(generation)
        except ApiError as error:
            self._error = Trouble("InvalidSpec" if _is_users_fault(error) else "ApplyFailed", error.message)
            return self._failed(generation)
        self._retry_s = FIRST_RETRY_S
        self._done_generation = generation
        if self._error:
            self.scaler.stop()
        else:
            RECONCILES.labels("ok").inc()
            self.scaler.configure(service)
        return RESYNC_S

    def _failed(self, generation: int) -> float:
        RECONCILES.labels("error").inc()
        log.warning(
            "%s/%s: %s: %s",
            *self.key,
            self._error and self._error.reason,
            self._error and self._error.message,
        )
        self._done_generation = generation
        return self._backoff()

    async def _apply_objects(self, service: InferenceService) -> None:
        private_key = await self._private_key(service)
        manifests = builders.build_all(service, self.controller.platform, private_key)
        for manifest in manifests:
            if (manifest["kind"], manifest["metadata"]["name"]) not in self._applied:
                await self._refuse_foreign(service, manifest)
        for manifest in manifests:
            name = (manifest["kind"], manifest["metadata"]["name"])
            stored = await self.controller.kube.apply(manifest)
            self._applied[name] = fingerprint(stored)
            self.controller.cache.put(manifest["kind"], stored, gone=False)
        await self._write_replicas(service)

    async def _refuse_foreign(self, service: InferenceService, manifest: Mapping[str, Any]) -> None:
        """Never take over an object that was there before us."""
        existing = await self.controller.kube.get(path_of(manifest))
        if existing and owner_uid(existing) != service.uid:
            what = f"{manifest['kind']} {manifest['metadata']['name']}"
            ending = owner_uid(existing) or "deletionTimestamp" in existing["metadata"]
            why = (
                "is still being deleted"
                if ending
                else "exists and belongs to somebody else; delete or rename one of the two"
            )
            raise Conflict(f"{what} {why}")

    async def _private_key(self, service: InferenceService) -> str:
        """The key in the service's Secret, made on the first pass and kept from then on."""
        manifest = builders.build_private_secret(service, secrets.token_hex(32))
        await self._refuse_foreign(service, manifest)
        existing = await self.controller.kube.get(path_of(manifest))
        stored = existing or await self.controller.kube.create(manifest)
        return str(stored["data"][n.PRIVATE_KEY_FIELD])

    async def _first_replicas(self, body: Body, replicas: int) -> None:
        """An HPA takes no number for "switched off", so spec.replicas gets one to begin with."""
        where = path(resource.API_VERSION, resource.KIND, *self.key, "scale")
        seen = {"metadata": {"resourceVersion": body["metadata"]["resourceVersion"]}}
        try:
            await self.controller.kube.merge(where, seen | {"spec": {"replicas": replicas}})
        except ApiError as error:
            if error.status != 409:  # changed since we looked; the watch will tell
                raise

    async def _write_replicas(self, service: InferenceService) -> None:
        """Replicas of both Deployments as the spec fixes them; under native autoscaling only the bounds."""
        kube, cache = self.controller.kube, self.controller.cache
        own = n.names(service.name)
        for role, name in ((n.ENGINE, own.engine), (n.ROUTER, own.router)):
            deployment = cache.deployment(self.key, role)
            if deployment is None:
                continue
            now = deployment["spec"].get("replicas", 1)
            wanted = service.start_replicas if role == n.ENGINE else service.router.replicas
            if role == n.ENGINE and service.autoscaling:
                wanted = min(max(now, service.autoscaling.min_replicas), service.autoscaling.max_replicas)
                self._fixed.pop(name, None)
            else:
                self._fixed[name] = wanted
            if wanted != now:
                where = path("apps/v1", "Deployment", service.namespace, name)
                await kube.scale(where, wanted)
                deployment["spec"]["replicas"] = wanted

    async def _write_status(self, body: Body) -> Trouble | None:
        """Patch the status if it is not what it should be. Returns the engines' trouble, if any."""
        cache = self.controller.cache
        meta, old, spec = body["metadata"], body.get("status", {}), body["spec"]
        events = await self._pod_events()
        pods = cache.pods(self.key)
        engines = status.group(n.ENGINE, cache.deployment(self.key, n.ENGINE), pods, events)
        routers = status.group(n.ROUTER, cache.deployment(self.key, n.ROUTER), pods, events)
        found = status.conditions(
            engines,
            routers,
            self.scaler.condition(spec, old.get("conditions", ())),
            self._error,
            bool(spec.get("paused")),
        )
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        labels = n.selector(meta["name"], n.ENGINE)
        new = {
            "observedGeneration": self._done_generation,
            "url": n.url(meta["name"], meta["namespace"]),
            "model": spec["model"].get("name") or meta["name"],
            "replicas": engines.replicas,
            "readyReplicas": engines.ready,
            "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
            "conditions": status.stamped(found, old.get("conditions", ()), self._done_generation, now),
            "autoscaling": self.scaler.status(old.get("autoscaling")),
        }
        if any(old.get(key) != value for key, value in new.items()):
            where = path(resource.API_VERSION, resource.KIND, *self.key, "status")
            try:
                stored = await self.controller.kube.merge(where, {"status": new})
            except ApiError as error:
                if error.status == 404:
                    return None  # deleted meanwhile
                raise
            cache.put("InferenceService", stored, gone=False)
            await self._tell(body, old.get("conditions", ()), found[0])
        return engines.trouble

    async def _pod_events(self) -> dict[str, Trouble]:
        """The newest warning of each pod whose containers do not exist yet; asked only while there is one."""
        waiting = {
            p["metadata"]["name"] for p in self.controller.cache.pods(self.key) if _no_container_yet(p)
        }
        if not waiting:
            return {}
        where = path("v1", "Event", self.key[0])
        events = await self.controller.kube.list(where, fieldSelector="involvedObject.kind=Pod,type=Warning")
        events.sort(key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or "")
        return {
            e["involvedObject"]["name"]: Trouble(e["reason"], e.get("message", ""))
            for e in events
            if e["involvedObject"].get("name") in waiting and e["reason"] in t.POD_EVENTS
        }

    async def _tell(self, body: Body, before: Any, ready: status.Condition) -> None:
        """An Event when Ready changes or changes its reason."""
        old: Mapping[str, Any] = next((c for c in before if c["type"] == "Ready"), {})
        if (old.get("status"), old.get("reason")) == ("True" if ready.status else "False", ready.reason):
            return
        calm = ready.status or ready.reason in ("Creating", "Starting", "ScaledToZero", "Updating")
        await scaling.post_event(
            self.controller.kube, body, "Normal" if calm else "Warning", ready.reason, ready.message
        )


def _is_users_fault(error: ApiError) -> bool:
    """Whether the API server refused what the spec makes; a misspelt field in podTemplate comes as 500."""
    return error.status in (400, 422) or "failed to create typed patch object" in error.message


def _no_container_yet(pod: Body) -> bool:
    statuses = [
        *pod.get("status", {}).get("initContainerStatuses", ()),
        *pod.get("status", {}).get("containerStatuses", ()),
    ]
    return not t.is_ending(pod) and any(
        s.get("state", {}).get("waiting", {}).get("reason") in ("ContainerCreating", "PodInitializing")
        for s in statuses
    )
