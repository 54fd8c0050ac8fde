"""The status of an InferenceService from what is seen in the cluster: pure, and derived anew each time.

Nothing is remembered between two calls but ``lastTransitionTime``, so a reason goes when its cause goes.
``Ready`` answers "does the spec as written serve?": it stays True while old pods are replaced by new ones,
and turns False when none of the new ones comes up, even if old ones still answer (the message says so).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from octavo_operator import names as n
from octavo_operator import trouble as t
from octavo_operator.trouble import Trouble

Manifest = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Condition:
    type: str
    status: bool
    reason: str
    message: str


@dataclasses.dataclass(frozen=True)
class Group:
    """The pods of one role, counted."""

    noun: str  # "engine" or "router"
    exists: bool
    desired: int
    replicas: int
    ready: int
    current_ready: int  # ready and made from the template as it is now
    trouble: Trouble | None  # of the pods that should be
    older_trouble: Trouble | None  # of those that are on their way out

    @property
    def summary(self) -> str:
        return f"{self.ready} of {self.desired} {self.noun}s ready"

    @property
    def complete(self) -> bool:
        return self.exists and self.current_ready >= self.desired and self.replicas == self.desired

    @property
    def serves(self) -> bool:
        return self.ready > 0 and not (self.trouble and self.current_ready == 0)


def group(
    role: str, deployment: Manifest | None, pods: Sequence[Manifest], events: Mapping[str, Trouble]
) -> Group:
    """Count the pods of ``role``; ``pods`` may hold others too."""
    if deployment is None:
        return Group(role, False, 0, 0, 0, 0, None, None)
    wanted = t.template_hash(deployment)
    own = [p for p in pods if p["metadata"]["labels"].get(n.ROLE_LABEL) == role and not t.is_ending(p)]
    own = [p for p in own if p.get("status", {}).get("phase") not in ("Failed", "Succeeded")]
    current = [p for p in own if t.template_hash(p) == wanted]
    older = [p for p in own if t.template_hash(p) != wanted]
    return Group(
        noun=role,
        exists=True,
        desired=deployment["spec"].get("replicas", 1),
        replicas=len(own),
        ready=sum(map(t.is_ready, own)),
        current_ready=sum(map(t.is_ready, current)),
        trouble=t.of_pods(current, events) or t.of_deployment(deployment),
        older_trouble=t.of_pods(older, events),
    )


def role_condition(group: Group) -> Condition:
    """EnginesReady or RouterReady."""
    kind = "EnginesReady" if group.noun == n.ENGINE else "RouterReady"
    if not group.exists:
        return Condition(kind, False, "Creating", f"the {group.noun}s are not created yet")
    if group.desired == 0:
        return Condition(kind, False, "ScaledToZero", f"replicas is 0, so no {group.noun} runs")
    if group.current_ready >= group.desired:
        return Condition(kind, True, "AllReady", group.summary)
    if found := group.trouble or group.older_trouble:
        older = group.ready - group.current_ready
        note = f" ({older} of an older spec)" if older else ""
        return Condition(kind, False, found.reason, f"{group.summary}{note}; {found.message}")
    if group.ready >= group.desired:
        message = f"{group.summary}, {group.current_ready} of them of the current spec"
        return Condition(kind, True, "RollingUpdate", message)
    return Condition(kind, False, "Starting", group.summary)


def conditions(
    engines: Group, routers: Group, autoscaling: Condition, error: Trouble | None, paused: bool
) -> list[Condition]:
    """All five conditions. ``error``: why the spec could not be carried out at all."""
    engines_ready, router_ready = role_condition(engines), role_condition(routers)
    return [
        _ready(engines, routers, engines_ready, router_ready, error),
        engines_ready,
        router_ready,
        autoscaling,
        _progressing(engines, routers, error, paused),
    ]


def _ready(
    engines: Group, routers: Group, engines_ready: Condition, router_ready: Condition, error: Trouble | None
) -> Condition:
    if error:
        return Condition("Ready", False, error.reason, error.message)
    for each, condition in ((engines, engines_ready), (routers, router_ready)):
        if not each.serves:
            return Condition("Ready", False, condition.reason, condition.message)
    return Condition("Ready", True, "Serving", engines_ready.message)


def _progressing(engines: Group, routers: Group, error: Trouble | None, paused: bool) -> Condition:
    if paused:
        return Condition(
            "Progressing", False, "Paused", "spec.paused is true: nothing is changed until it is false"
        )
    if found := error or engines.trouble or routers.trouble:
        return Condition("Progressing", False, found.reason, found.message)
    if engines.complete and routers.complete:
        return Condition("Progressing", False, "Complete", "everything is as the spec says")
    slow = engines if not engines.complete else routers
    message = f"{slow.current_ready} of {slow.desired} {slow.noun}s ready on this spec, {slow.replicas} exist"
    return Condition("Progressing", True, "Updating", message)


def stamped(
    conditions: Sequence[Condition], previous: Sequence[Manifest], generation: int, now: str
) -> list[dict[str, Any]]:
    """Conditions as the API holds them; ``lastTransitionTime`` moves only when a condition's status does."""
    before = {condition["type"]: condition for condition in previous}
    result = []
    for each in conditions:
        status = "True" if each.status else "False"
        old = before.get(each.type, {})
        result.append(
            {
                "type": each.type,
                "status": status,
                "reason": each.reason,
                "message": each.message,
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == status else now,
            }
        )
    return result
