"""Conditions tell the truth: from what Kubernetes reports of pods, and gone when the cause is gone."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from octavo_operator import names as n
from octavo_operator import status, trouble
from octavo_operator.status import Condition
from octavo_operator.trouble import Trouble

OFF = Condition("Autoscaling", False, "Off", "")


def deployment(
    role: str = "engine", replicas: int = 2, template: str = "new", **conditions: str
) -> dict[str, Any]:
    return {
        "metadata": {"name": f"m-{role}"},
        "spec": {
            "replicas": replicas,
            "template": {"metadata": {"annotations": {n.TEMPLATE_ANNOTATION: template}}},
        },
        "status": {
            "conditions": [
                {"type": kind, "status": "True", "reason": "FailedCreate", "message": message}
                for kind, message in conditions.items()
            ]
        },
    }


def pod(
    name: str = "p1",
    role: str = "engine",
    *,
    ready: bool = True,
    template: str = "new",
    container: str = "",
    **state: Any,
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    made = {"name": container or role, "ready": ready, "restartCount": 0, "state": {"running": {}}} | state
    return {
        "metadata": {
            "name": name,
            "labels": {n.ROLE_LABEL: role},
            "annotations": {n.TEMPLATE_ANNOTATION: template},
        },
        "spec": {"containers": [{"name": role, "resources": {"limits": {"memory": "160Mi"}}}]},
        "status": {"phase": "Running", "conditions": conditions, "containerStatuses": [made]},
    }


def unschedulable(name: str = "p1", template: str = "new") -> dict[str, Any]:
    made = pod(name, ready=False, template=template)
    made["status"] = {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            }
        ],
    }
    return made


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def crashed(code: int, message: str = "", reason: str = "Error", restarts: int = 3) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": ended,
        "restartCount": restarts,
    }


def conditions(
    engines: list[dict[str, Any]],
    routers: list[dict[str, Any]] | None = None,
    *,
    engine: dict[str, Any] | None = None,
    error: Trouble | None = None,
    paused: bool = False,
    events: dict[str, Trouble] | None = None,
) -> dict[str, Condition]:
    pods = engines + (routers if routers is not None else [pod("r1", "router")])
    first = status.group("engine", engine or deployment(), pods, events or {})
    second = status.group("router", deployment("router", 1), pods, events or {})
    return {c.type: c for c in status.conditions(first, second, OFF, error, paused)}


def test_all_pods_ready_means_serving() -> None:
    found = conditions([pod("a"), pod("b")])
    assert (found["Ready"].status, found["Ready"].reason) == (True, "Serving")
    assert found["Ready"].message == "2 of 2 engines ready"
    assert found["EnginesReady"].status and found["RouterReady"].status
    assert (found["Progressing"].status, found["Progressing"].reason) == (False, "Complete")


TROUBLES = {
    "a bad image": (
        pod(ready=False, **waiting("ErrImagePull", "failed to pull x/absent:1: not found")),
        "ImagePullBackOff",
        "x/absent:1",
    ),
    "a bad image, backing off": (
        pod(ready=False, **waiting("ImagePullBackOff", 'Back-off pulling image "x/absent:1"')),
        "ImagePullBackOff",
        "x/absent:1",
    ),
    "a name that is no image": (
        pod(ready=False, **waiting("InvalidImageName", "bad")),
        "InvalidImageName",
        "bad",
    ),
    "a missing Secret": (
        pod(ready=False, **waiting("CreateContainerConfigError", 'secret "m-private" not found')),
        "CreateContainerConfigError",
        "m-private",
    ),
    "killed for memory": (
        pod(ready=False, **crashed(137, reason="OOMKilled")),
        "OOMKilled",
        "memory at its limit of 160Mi",
    ),
    "a crash": (
        pod(ready=False, **crashed(2, "INFO loading\noctavo: the cache holds 512 tokens\n")),
        "CrashLoopBackOff",
        "exit code 2: octavo: the cache holds 512 tokens; 3 restarts",
    ),
    "a crash, running again": (
        pod(ready=False, **(crashed(1, "boom") | {"state": {"running": {}}})),
        "CrashLoopBackOff",
        "exit code 1: boom",
    ),
    "a model that cannot be fetched": (
        pod(ready=False, container="fetch", **crashed(1, "octavo: no hub is reachable")),
        "ModelFetchFailed",
        "no hub is reachable",
    ),
    "no GPU": (unschedulable(), "Unschedulable", "Insufficient nvidia.com/gpu"),
}


@pytest.mark.parametrize(("broken", "reason", "words"), TROUBLES.values(), ids=TROUBLES)
def test_trouble_has_its_own_reason_and_goes_with_its_cause(
    broken: dict[str, Any], reason: str, words: str
) -> None:
    """Case 34."""
    found = conditions([broken], engine=deployment(replicas=1))
    for kind in ("Ready", "EnginesReady"):
        assert (found[kind].status, found[kind].reason) == (False, reason)
        assert words in found[kind].message and "p1" in found[kind].message
    assert (found["Progressing"].status, found["Progressing"].reason) == (False, reason)
    mended = pod(restartCount=3, lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    whole = conditions([mended], engine=deployment(replicas=1))
    assert not any(c.reason == reason or words in c.message for c in whole.values())


def test_a_quota_that_refuses_pods_is_told_though_there_is_no_pod() -> None:
    message = 'pods "m-engine-x" is forbidden: exceeded quota: tight, requested: requests.cpu=50m'
    found = conditions([], engine=deployment(ReplicaFailure=message))
    assert found["Ready"].reason == "QuotaExceeded" and "tight" in found["Ready"].message
    assert conditions([], engine=deployment(ReplicaFailure="denied"))["Ready"].reason == "FailedCreate"


def test_a_volume_that_cannot_be_mounted_is_told_from_the_events() -> None:
    events = {"p1": Trouble("FailedMount", 'secret "keys" not found')}
    made = pod(ready=False, **waiting("ContainerCreating"))
    found = conditions([made], engine=deployment(replicas=1), events=events)
    assert found["Ready"].reason == "FailedMount" and "keys" in found["Ready"].message
    assert conditions([made], engine=deployment(replicas=1))["Ready"].reason == "Starting"


def test_old_pods_that_still_serve_do_not_hide_a_spec_that_does_not_come_up() -> None:
    bad = pod("new", ready=False, **waiting("ImagePullBackOff", "x/absent:1"))
    found = conditions([bad, pod("a", template="old"), pod("b", template="old")])
    assert (found["Ready"].status, found["Ready"].reason) == (False, "ImagePullBackOff")
    assert "2 of 2 engines ready (2 of an older spec)" in found["Ready"].message


def test_a_rolling_update_that_goes_well_stays_ready() -> None:
    coming = pod("new", ready=False)
    found = conditions([coming, pod("a", template="old"), pod("b", template="old")])
    assert found["Ready"].status and found["EnginesReady"].reason == "RollingUpdate"
    assert (found["Progressing"].status, found["Progressing"].reason) == (True, "Updating")


def test_an_old_pod_in_trouble_is_told_but_blames_not_the_new_spec() -> None:
    old = pod("b", ready=False, template="old", **crashed(137, reason="OOMKilled"))
    found = conditions([pod("new", ready=False), pod("a", template="old"), old])
    assert found["Ready"].status and "out of memory" in found["Ready"].message
    assert found["EnginesReady"].reason == "OOMKilled"
    assert found["Progressing"].status


def test_one_pod_in_trouble_beside_others_that_serve_is_told_without_alarm() -> None:
    found = conditions([pod("a"), unschedulable("b")])
    assert (found["Ready"].status, found["Ready"].reason) == (True, "Serving")
    assert "1 of 2 engines ready" in found["Ready"].message and "Insufficient" in found["Ready"].message
    assert (found["EnginesReady"].status, found["EnginesReady"].reason) == (False, "Unschedulable")


def test_no_ready_pod_is_never_ready() -> None:
    """Case 34: Available stayed True with no ready pod."""
    assert not conditions([pod("a", ready=False), pod("b", ready=False)])["Ready"].status
    assert not conditions([])["Ready"].status
    ending = pod("a") | {"metadata": pod("a")["metadata"] | {"deletionTimestamp": "now"}}
    assert not conditions([ending])["Ready"].status


def test_without_a_router_nothing_is_served() -> None:
    found = conditions([pod("a"), pod("b")], [pod("r1", "router", ready=False)])
    assert (found["Ready"].status, found["Ready"].message) == (False, "0 of 1 routers ready")


def test_zero_replicas_are_told_as_such() -> None:
    found = conditions([], engine=deployment(replicas=0))
    assert (found["Ready"].status, found["Ready"].reason) == (False, "ScaledToZero")


def test_an_invalid_spec_and_a_pause_are_told() -> None:
    error = Trouble("InvalidSpec", "spec.engine.args: unknown engine flag '--x'")
    found = conditions([pod("a"), pod("b")], error=error)
    assert (found["Ready"].status, found["Ready"].reason) == (False, "InvalidSpec")
    assert found["EnginesReady"].status
    paused = conditions([pod("a"), pod("b")], paused=True)
    assert paused["Ready"].status and paused["Progressing"].reason == "Paused"


def test_a_transition_time_moves_only_with_the_status() -> None:
    first = status.stamped([Condition("Ready", False, "Starting", "0 of 1")], [], 1, "t1")
    second = status.stamped([Condition("Ready", False, "OOMKilled", "x")], first, 2, "t2")
    third = status.stamped([Condition("Ready", True, "Serving", "1 of 1")], second, 2, "t3")
    assert [c[0]["lastTransitionTime"] for c in (first, second, third)] == ["t1", "t1", "t3"]
    assert [c[0]["observedGeneration"] for c in (first, second, third)] == [1, 2, 2]


def test_a_message_stays_one_line_of_bounded_length() -> None:
    long = crashed(1, "x" * 5000)
    found = trouble.of_pod(pod(ready=False, **long))
    assert found and len(found.message) <= trouble.MAX_MESSAGE
    many = trouble.of_pod(pod(ready=False, **waiting("ErrImagePull", "a\n  b\nc")))
    assert many and many.message.endswith("a b c")


def test_pods_that_failed_for_good_do_not_count() -> None:
    evicted = copy.deepcopy(pod("old", ready=False))
    evicted["status"]["phase"] = "Failed"
    assert conditions([evicted, pod("a"), pod("b")])["EnginesReady"].reason == "AllReady"
