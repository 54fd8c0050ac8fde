"""How many engine replicas a service should have: a pure decision, without clock or I/O.

Three rules keep it from the traps of queue-length scaling. Pods that are starting count as capacity, so a
queue asks once for the pods it needs. A pod that cannot be asked is unknown, not idle: it holds back a fall,
never a rise. Pods that are ending are neither capacity nor load.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from octavo_operator.resource import Autoscaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What one engine says of itself."""

    waiting: int
    running: int
    kv_usage: float  # 0 to 1
    concurrency: int  # requests it runs at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pod:
    name: str
    ready: bool
    ending: bool
    load: Load | None  # None: not asked, or no answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A number of replicas that the load asked for at a time (seconds), before bounds and stabilisation."""

    time: float
    replicas: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signals:
    waiting: int
    running: int
    kv_usage_percent: int  # mean over the pods that answered
    known: int  # ready pods that answered
    unknown: int  # ready pods that did not
    starting: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    replicas: int
    reason: str
    signals: Signals
    history: tuple[Wanted, ...]  # to pass to the next decision


def decide(
    pods: Sequence[Pod], current: int, spec: Autoscaling, history: Sequence[Wanted], now: float
) -> Decision:
    """The replicas to run now.

    ``current``: what the Deployment is set to. ``history``: of the last decision; empty after a start, in
    which case nothing falls before the window has been watched whole. ``now``: seconds of any clock that only
    rises.
    """
    signals = _signals(pods)
    low, why = _needed(pods, spec, unknown_is_full=False)
    high, _ = _needed(pods, spec, unknown_is_full=True)
    if signals.known == 0:
        wanted, why = current, "no engine could be asked for its load"
    elif low > current:
        wanted = low
    elif high < current:
        wanted = high
    else:
        wanted = current
    earlier = list(history) or [Wanted(time=now, replicas=current)]
    begin = now - spec.stabilization_s
    watched_whole = earlier[0].time <= begin
    recent = [w for w in earlier if w.time > begin] + [Wanted(time=now, replicas=wanted)]
    stable = wanted
    if wanted < current:
        stable = min(current, max(w.replicas for w in recent)) if watched_whole else current
    replicas = min(max(stable, spec.min_replicas), spec.max_replicas)
    # One entry from before the window is kept: it shows next time that the window was watched whole.
    kept = [w for w in earlier if w.time <= begin][-1:] + recent
    return Decision(
        replicas=replicas,
        reason=_reason(replicas, stable, wanted, spec, why),
        signals=signals,
        history=tuple(kept),
    )


def _signals(pods: Sequence[Pod]) -> Signals:
    here = [pod for pod in pods if not pod.ending]
    loads = [pod.load for pod in here if pod.ready and pod.load]
    return Signals(
        waiting=sum(load.waiting for load in loads),
        running=sum(load.running for load in loads),
        kv_usage_percent=round(100 * sum(load.kv_usage for load in loads) / len(loads)) if loads else 0,
        known=len(loads),
        unknown=sum(1 for pod in here if pod.ready and not pod.load),
        starting=sum(1 for pod in here if not pod.ready),
    )


def _needed(pods: Sequence[Pod], spec: Autoscaling, *, unknown_is_full: bool) -> tuple[int, str]:
    """Replicas by the formula, and what asks for them.

    ``replicas x mean usage`` is the sum of usages: pods that are starting hold nothing yet, and an unknown
    pod holds nothing or exactly its target, whichever is the careful guess.
    """
    here = [pod for pod in pods if not pod.ending]
    loads = [pod.load for pod in here if pod.ready and pod.load]
    if not loads:
        return 0, ""
    full = sum(1 for pod in here if pod.ready and not pod.load) if unknown_is_full else 0
    per_replica = min(load.concurrency for load in loads) + spec.waiting_requests
    requests = sum(load.waiting + load.running for load in loads)
    usage = sum(100 * load.kv_usage for load in loads)
    by_requests = math.ceil(_exact(requests / per_replica)) + full
    by_usage = math.ceil(_exact(usage / spec.kv_cache_usage_percent)) + full
    if by_requests >= by_usage:
        return by_requests, f"{requests} requests, {per_replica} a replica"
    return by_usage, f"KV caches {usage:.0f} % in sum, {spec.kv_cache_usage_percent} % a replica"


def _exact(value: float) -> float:
    """Without the last bits of a float, which would turn 2 into 2.0000000000000004 and so into 3."""
    return round(value, 9)


def _reason(replicas: int, stable: int, wanted: int, spec: Autoscaling, why: str) -> str:
    if replicas > stable:
        return f"{why}; minReplicas is {spec.min_replicas}"
    if replicas < stable:
        asked = f", {wanted} would serve it" if wanted > replicas else ""
        return f"{why}; maxReplicas is {spec.max_replicas}{asked}"
    return why if stable == wanted else f"{why}, more in the last {spec.stabilization_s} s"
