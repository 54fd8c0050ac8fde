"""Native autoscaling on a real load: to the maximum, its reason in the status, down with no broken stream."""

from cluster import client
from cluster.access import Cluster, Object
from cluster.service import await_service, condition, example, serving

NAME = "scaled"
SCALING = {
    "mode": "native",
    "minReplicas": 1,
    "maxReplicas": 2,
    "targets": {"waitingRequests": 1, "kvCacheUsagePercent": 80},
    "scaleDown": {"stabilizationSeconds": 10},
}


def test_replicas_follow_the_load_and_no_stream_breaks(cluster: Cluster, octavo: str, namespace: str) -> None:
    args = ["--max-num-seqs=2"]
    cluster.apply(
        example(NAME, replicas=None, autoscaling=SCALING, engine={"args": args}), namespace=namespace
    )
    await_service(cluster, namespace, NAME, serving(1))
    url = f"http://{NAME}.{namespace}.svc:8000/v1"
    bodies = [client.chat(f"{i} {i * 7919}: count.", "smollm2", max_tokens=64) for i in range(32)]

    with client.Load(cluster, namespace, url, bodies, concurrency=7, repeat=True) as heavy:
        grown = await_service(cluster, namespace, NAME, serving(2))
        decision = _last_decision(grown)
        assert (decision["from"], decision["to"]) == (1, 2)
        assert decision["reason"]
        assert decision["signals"]["waiting"] + decision["signals"]["running"] > 3
        assert condition(grown, "Autoscaling")["status"] == "True"
        heavy.wait_for(len(heavy.answers) + 4)

    with client.Load(cluster, namespace, url, bodies, concurrency=1, repeat=True) as light:
        fallen = await_service(cluster, namespace, NAME, serving(1))
        decision = _last_decision(fallen)
        assert (decision["from"], decision["to"]) == (2, 1)
        pods = f"octavo.dev/service={NAME},octavo.dev/role=engine"
        cluster.watch("pods", lambda found: len(found) == 1, namespace, selector=pods, timeout=120)
        light.wait_for(len(light.answers) + 1)

    assert [a for a in heavy.answers + light.answers if not a.whole] == []
    reasons = cluster.kubectl(
        "get", "events", "-n", namespace, "-o", "jsonpath={.items[*].message}",
        "--field-selector=involvedObject.kind=InferenceService",
    )  # fmt: skip
    assert "1" in reasons and "2" in reasons


def _last_decision(service: Object) -> dict:
    decisions = service["status"]["autoscaling"]["decisions"]
    return max(decisions, key=lambda d: d["time"])
