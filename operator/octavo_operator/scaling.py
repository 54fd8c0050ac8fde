"""The autoscaling loop of one service: ask the engines for their load, decide, write the Deployment's scale.

Only the Deployment is written, never the user's spec. Each change is kept in status (the last ten) and told
as an Event. Before a fall the pods are marked with what each would lose, so that Kubernetes ends the idlest.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from octavo_operator import autoscaler
from octavo_operator import names as n
from octavo_operator import trouble as t
from octavo_operator.cache import Body, Cache, Key
from octavo_operator.kube import ApiError, Kube, path
from octavo_operator.metrics import DESIRED_REPLICAS, SCRAPE_FAILURES
from octavo_operator.resource import InferenceService
from octavo_operator.status import Condition

log = logging.getLogger("octavo.operator")

INTERVAL_S = 5.0
SCRAPE_TIMEOUT_S = 3.0
KEPT_DECISIONS = 10
UNKNOWN_COST = 1_000_000  # a pod that does not answer may be the busiest

Decisions = list[dict[str, Any]]


class Scaler:
    """Runs while its service is under native autoscaling. ``changed`` is called when status has news."""

    def __init__(self, kube: Kube, cache: Cache, key: Key, changed: Callable[[], None]) -> None:
        self._kube, self._cache, self._key, self._changed = kube, cache, key, changed
        self._service: InferenceService | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._history: tuple[autoscaler.Wanted, ...] = ()
        self._last: autoscaler.Decision | None = None
        self._silent: set[str] = set()
        self._new: Decisions = []  # decided but perhaps not in status yet

    def configure(self, service: InferenceService) -> None:
        """Start, stop or go on by the spec as it is now."""
        if service.autoscaling is None or service.paused:
            self.stop()
            return
        self._service = service
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(
                self._run(), name=f"autoscaler {service.namespace}/{service.name}"
            )

    def stop(self) -> None:
        if self._task:
            self._task.cancel()
        self._task, self._service, self._last, self._history = None, None, None, ()

    def condition(self, spec: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> Condition:
        """The Autoscaling condition; until a first decision what stood there ``before`` is kept."""
        scaling = spec.get("autoscaling")
        if not scaling:
            return Condition("Autoscaling", False, "Off", "spec.replicas sets the number of replicas")
        if scaling["mode"] == "external":
            return Condition("Autoscaling", True, "External", "a scaler of yours writes spec.replicas")
        if spec.get("paused"):
            return Condition("Autoscaling", False, "Paused", "spec.paused is true: replicas stay as they are")
        if self._last is None:
            return _kept(before) or Condition("Autoscaling", False, "Starting", "no decision yet")
        signals = self._last.signals
        if signals.known == 0:
            return Condition("Autoscaling", False, "NoSignals", "no engine could be asked for its load")
        unknown = f"; {signals.unknown} did not answer" if signals.unknown else ""
        low, high = scaling.get("minReplicas", 1), scaling["maxReplicas"]
        message = f"{self._last.replicas} wanted, of {low} to {high}"
        return Condition("Autoscaling", True, "Active", message + unknown)

    def status(self, old: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """``status.autoscaling``: what it held before, with new decisions at its end."""
        if self._service is None:
            return dict(old) if old and old.get("decisions") else None
        decisions = [*(old or {}).get("decisions", ())]
        decisions += [d for d in self._new if d not in decisions]
        result: dict[str, Any] = {"decisions": decisions[-KEPT_DECISIONS:]}
        if self._last:
            result["desiredReplicas"] = self._last.replicas
        elif old and "desiredReplicas" in old:
            result["desiredReplicas"] = old["desiredReplicas"]
        return result

    async def _run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)) as session:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), INTERVAL_S)
                self._wake.clear()
                try:
                    await self._tick(session)
                except ApiError as error:
                    log.warning("%s/%s: autoscaling: %s", *self._key, error.message)
                except Exception:
                    log.exception("%s/%s: autoscaling failed", *self._key)

    async def _tick(self, session: aiohttp.ClientSession) -> None:
        service, deployment = self._service, self._cache.deployment(self._key, n.ENGINE)
        if service is None or service.autoscaling is None or deployment is None:
            return
        bodies = [p for p in self._cache.pods(self._key, n.ENGINE) if _counts(p)]
        self._silent &= {body["metadata"]["name"] for body in bodies}
        key = await self._private_key(service)
        pods = await asyncio.gather(*(_ask(session, body, key, self._silent) for body in bodies))
        current = deployment["spec"].get("replicas", 1)
        decision = autoscaler.decide(pods, current, service.autoscaling, self._history, time.monotonic())
        before, self._last, self._history = self._last, decision, decision.history
        DESIRED_REPLICAS.labels(*self._key).set(decision.replicas)
        if decision.replicas != current:
            await self._scale(service, deployment, pods, current, decision)
        if (
            before is None
            or decision.replicas != current
            or _condition_facts(before) != _condition_facts(decision)
        ):
            self._changed()

    async def _scale(
        self,
        service: InferenceService,
        deployment: Body,
        pods: list[autoscaler.Pod],
        current: int,
        decision: autoscaler.Decision,
    ) -> None:
        if decision.replicas < current:
            await self._mark_costs(pods)
        where = path("apps/v1", "Deployment", service.namespace, deployment["metadata"]["name"])
        await self._kube.scale(where, decision.replicas)
        deployment["spec"]["replicas"] = decision.replicas
        signals = decision.signals
        self._new.append(
            {
                "time": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "from": current,
                "to": decision.replicas,
                "reason": decision.reason,
                "signals": {
                    "waiting": signals.waiting,
                    "running": signals.running,
                    "kvCacheUsagePercent": signals.kv_usage_percent,
                },
            }
        )
        del self._new[:-KEPT_DECISIONS]
        log.info("%s/%s: scaled from %d to %d: %s", *self._key, current, decision.replicas, decision.reason)
        if body := self._cache.services.get(self._key):
            reason = "ScaledUp" if decision.replicas > current else "ScaledDown"
            message = f"engines from {current} to {decision.replicas}: {decision.reason}"
            await post_event(self._kube, body, "Normal", reason, message)

    async def _mark_costs(self, pods: list[autoscaler.Pod]) -> None:
        """Kubernetes ends the pods of the least cost first."""
        for pod in pods:
            if not pod.ending:
                body = {"metadata": {"annotations": {n.DELETION_COST: str(deletion_cost(pod))}}}
                try:
                    await self._kube.merge(path("v1", "Pod", self._key[0], pod.name), body)
                except ApiError as error:
                    if error.status != 404:  # gone by itself
                        raise

    async def _private_key(self, service: InferenceService) -> str:
        where = path("v1", "Secret", service.namespace, n.names(service.name).private)
        secret = await self._kube.get(where)
        if secret is None:
            raise ApiError(404, "NotFound", f"Secret {n.names(service.name).private} is not there")
        return base64.b64decode(secret["data"][n.PRIVATE_KEY_FIELD]).decode()


def _kept(before: Sequence[Mapping[str, Any]]) -> Condition | None:
    """What an operator before us said while autoscaling was on: a restart is no news."""
    for old in before:
        if old["type"] == "Autoscaling" and old["reason"] in ("Active", "NoSignals"):
            return Condition("Autoscaling", old["status"] == "True", old["reason"], old["message"])
    return None


def deletion_cost(pod: autoscaler.Pod) -> int:
    """What ending a pod would lose: its requests first, then what its cache holds."""
    if pod.load is None:
        return UNKNOWN_COST if pod.ready else 0
    return 1000 * (pod.load.running + pod.load.waiting) + round(100 * pod.load.kv_usage)


def _condition_facts(decision: autoscaler.Decision) -> tuple[int, bool, int]:
    return decision.replicas, decision.signals.known > 0, decision.signals.unknown


def _counts(pod: Body) -> bool:
    return pod.get("status", {}).get("phase") not in ("Failed", "Succeeded")


async def _ask(session: aiohttp.ClientSession, body: Body, key: str, silent: set[str]) -> autoscaler.Pod:
    """A pod with the load it tells on its private port; without, where it does not answer in time.

    ``silent``: pods that did not answer before; one is logged once.
    """
    pod = autoscaler.Pod(
        name=body["metadata"]["name"], ready=t.is_ready(body), ending=t.is_ending(body), load=None
    )
    address = body.get("status", {}).get("podIP")
    if pod.ending or not pod.ready or not address:
        return pod
    host = f"[{address}]" if ":" in address else address
    try:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.get(f"http://{host}:{n.PRIVATE_PORT}/server_info", headers=headers) as response:
            response.raise_for_status()
            info = await response.json()
        load = autoscaler.Load(
            waiting=int(info["load"]["waiting"]),
            running=int(info["load"]["running"]),
            kv_usage=float(info["load"]["kv_usage"]),
            concurrency=int(info["limits"]["max_num_seqs"]),
        )
    except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
        SCRAPE_FAILURES.inc()
        if pod.name not in silent:
            silent.add(pod.name)
            log.warning("pod %s does not tell its load: %s: %s", pod.name, type(error).__name__, error)
        return pod
    silent.discard(pod.name)
    return autoscaler.Pod(name=pod.name, ready=True, ending=False, load=load)


async def post_event(kube: Kube, body: Body, kind: str, reason: str, message: str) -> None:
    """An Event about an InferenceService; losing one is logged, not fatal."""
    meta = body["metadata"]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{n.fit(meta['name'])}.{uuid.uuid4().hex[:16]}",
            "namespace": meta["namespace"],
        },
        "involvedObject": {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": n.FIELD_MANAGER},
        "reportingComponent": n.FIELD_MANAGER,
        "reportingInstance": n.FIELD_MANAGER,
    }
    try:
        await kube.create(event)
    except ApiError as error:
        log.warning(
            "%s/%s: the event %s was not posted: %s", meta["namespace"], meta["name"], reason, error.message
        )
