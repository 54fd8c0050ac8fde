"""A user's way through Octavo: apply, ask, lose a pod, change, upgrade, delete. In this order."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from cluster import client
from cluster.access import Cluster
from cluster.chart import CHART, values
from cluster.service import KIND, await_service, change, engines, example, serving

NAME = "smollm2"
URL = f"http://{NAME}.test-serving.svc:8000/v1"
LONG = (
    "Octavo keeps the keys and values of a prompt in blocks, and a prompt that begins alike finds them. " * 30
)


@pytest.fixture(scope="module")
def service(cluster: Cluster, octavo: str, namespace: str) -> str:
    """Two engines of the example, serving; the namespace."""
    cluster.apply(example(NAME), namespace=namespace)
    await_service(cluster, namespace, NAME, serving(replicas=2))
    return namespace


def test_the_url_of_the_status_answers_another_pod(cluster: Cluster, service: str) -> None:
    status = cluster.get(KIND, NAME, service)["status"]
    assert status["url"] == URL
    assert status["model"] == NAME
    [answer] = client.Load(cluster, service, status["url"], [client.chat("Say hello.", NAME)]).run()
    assert (answer.status, answer.whole) == (200, True), answer
    assert answer.text.strip()
    models = json.loads(client.fetch(cluster, service, f"{URL}/models"))
    assert [m["id"] for m in models["data"]] == [NAME]


def test_kubectl_get_shows_model_readiness_replicas_url_and_age(cluster: Cluster, service: str) -> None:
    head, row = cluster.kubectl("get", KIND, "-n", service).splitlines()
    assert head.split() == ["NAME", "MODEL", "READY", "REPLICAS", "URL", "AGE"]
    assert row.split()[:5] == [NAME, NAME, "True", "2", URL]


def test_a_shared_prefix_stays_with_one_replica_and_others_spread(cluster: Cluster, service: str) -> None:
    before = _metrics(cluster, service)
    shared = [client.chat(f"{LONG} Question {i}?", NAME, max_tokens=2) for i in range(20)]
    answers = client.Load(cluster, service, URL, shared).run()
    assert all(a.whole for a in answers), [a for a in answers if not a.whole]
    after = _metrics(cluster, service)
    hits = sorted(after[pod]["hits"] - before[pod]["hits"] for pod in after)
    served = sorted(after[pod]["requests"] - before[pod]["requests"] for pod in after)
    assert served == [0, 20]
    cached = [a.cached_tokens for a in answers]
    assert min(cached[1:]) > 400  # all but the first found the prefix
    assert hits == [0, sum(cached)]

    distinct = [client.chat(f"{i} {i * 7919} {LONG}", NAME, max_tokens=2) for i in range(12)]
    client.Load(cluster, service, URL, distinct, concurrency=4).run()
    spread = _metrics(cluster, service)
    assert all(spread[pod]["requests"] - after[pod]["requests"] >= 2 for pod in spread)


def test_a_killed_engine_pod_is_replaced_and_no_request_fails_that_had_not_begun(
    cluster: Cluster, service: str
) -> None:
    victim = next(iter(engines(cluster, service, NAME)))
    with client.Load(cluster, service, URL, _mixed(24), concurrency=4, repeat=True) as load:
        load.wait_for(4)
        cluster.kubectl("delete", "pod", victim, "-n", service, "--grace-period=0", "--force")
        await_service(cluster, service, NAME, lambda s: not serving(2)(s), timeout=60)
        await_service(cluster, service, NAME, serving(2))
        load.wait_for(len(load.answers) + 4)
    assert victim not in engines(cluster, service, NAME)
    lost = [a for a in load.answers if not a.whole]
    assert all(a.began for a in lost), [a for a in lost if not a.began]
    assert len(lost) <= 4  # what the killed engine was answering


def test_a_changed_engine_flag_rolls_the_engines_without_a_failed_request(
    cluster: Cluster, service: str
) -> None:
    before = set(engines(cluster, service, NAME))
    with client.Load(cluster, service, URL, _mixed(24), concurrency=3, repeat=True) as load:
        load.wait_for(3)
        change(cluster, service, NAME, {"engine": {"args": ["--max-num-seqs=16"]}})
        await_service(cluster, service, NAME, serving(2))
        selector = f"octavo.dev/service={NAME},octavo.dev/role=engine"
        cluster.watch("pods", lambda pods: not before & set(pods), service, selector=selector, timeout=150)
        load.wait_for(len(load.answers) + 3)
    after = engines(cluster, service, NAME)
    assert len(after) == 2
    assert all("--max-num-seqs=16" in p["spec"]["containers"][0]["args"] for p in after.values())
    assert [a for a in load.answers if not a.whole] == []


def test_an_upgrade_of_the_chart_rolls_no_pod_and_brings_the_new_crd(
    cluster: Cluster, service: str, octavo: str, tmp_path: Path
) -> None:
    before = _pods(cluster, service)
    newer = tmp_path / "octavo"
    shutil.copytree(CHART, newer)
    chart = yaml.safe_load((newer / "Chart.yaml").read_text())
    chart["version"] = "99.0.0"
    (newer / "Chart.yaml").write_text(yaml.safe_dump(chart))
    crd = yaml.safe_load((newer / "files" / "crd.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["comment"] = {"type": "string"}
    (newer / "files" / "crd.yaml").write_text(yaml.safe_dump(crd))

    cluster.helm("upgrade", "octavo", str(newer), "-n", octavo, "--wait", *values(cluster))
    newer_manifest = example(NAME, engine={"args": ["--max-num-seqs=16"]}, comment="kept")
    cluster.apply(newer_manifest, namespace=service)
    assert cluster.get(KIND, NAME, service)["spec"]["comment"] == "kept"
    _expect_handled(cluster, service, router_replicas=2)
    after = _pods(cluster, service)
    assert before.items() <= after.items()
    cluster.helm("upgrade", "octavo", str(CHART), "-n", octavo, "--wait", *values(cluster))


def test_a_restart_of_the_operator_rolls_nothing(cluster: Cluster, service: str, octavo: str) -> None:
    _expect_handled(cluster, service, router_replicas=1)
    before = _pods(cluster, service)
    cluster.kubectl("rollout", "restart", "deployment", "-n", octavo)
    cluster.kubectl("rollout", "status", "deployment", "-n", octavo, "--timeout=60s")
    _expect_handled(cluster, service, router_replicas=2)
    after = _pods(cluster, service)
    assert before.items() <= after.items()


def test_deletion_leaves_nothing(cluster: Cluster, service: str, octavo: str) -> None:
    cluster.kubectl("delete", KIND, NAME, "-n", service, "--timeout=60s")
    selector = f"octavo.dev/service={NAME}"
    cluster.watch("pods", lambda pods: not pods, service, selector=selector, timeout=120)
    kinds = cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    kinds = [k for k in kinds if not k.startswith(("events", "pods.metrics"))]
    cluster.watch("endpointslices", lambda slices: not slices, service, timeout=60)
    left = cluster.kubectl("get", ",".join(kinds), "-n", service, "-o", "name").split()
    ours = [
        o
        for o in left
        if o not in (f"pod/{client.POD}", "serviceaccount/default", "configmap/kube-root-ca.crt")
    ]
    assert ours == []


def test_the_operator_was_never_refused_by_its_rights(cluster: Cluster, octavo: str) -> None:
    log = cluster.kubectl("logs", "-n", octavo, "-l", "app.kubernetes.io/part-of=octavo", "--tail=-1")
    assert log
    assert [line for line in log.splitlines() if "forbidden" in line.lower() or "403" in line.split()] == []


def _mixed(count: int) -> list[dict]:
    """Chats of different beginnings, some longer than others."""
    return [
        client.chat(f"{i} {i * 7919}: tell a story.", NAME, max_tokens=8 + i % 3 * 16) for i in range(count)
    ]


def _metrics(cluster: Cluster, namespace: str) -> dict[str, dict[str, float]]:
    """Tokens found in the prefix cache and requests served, by engine pod."""
    found = {}
    for name, pod in engines(cluster, namespace, NAME).items():
        text = client.fetch(cluster, namespace, f"http://{pod['status']['podIP']}:8000/metrics")
        found[name] = {
            "hits": client.metric(text, "vllm:prefix_cache_hits_total"),
            "requests": client.metric(text, "vllm:request_success_total"),
        }
    return found


def _pods(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Octavo's pods and their start: a pod that was replaced, or whose container restarted, differs."""
    pods = cluster.list("pods", namespace, f"octavo.dev/service={NAME}")
    return {
        p["metadata"]["name"]: p["status"]["containerStatuses"][0]["containerID"]
        for p in pods
        if "deletionTimestamp" not in p["metadata"]
    }


def _expect_handled(cluster: Cluster, namespace: str, router_replicas: int) -> None:
    """Changes the number of routers and waits for it: the operator that runs now has handled the service."""
    change(cluster, namespace, NAME, {"router": {"replicas": router_replicas}})
    await_service(cluster, namespace, NAME, serving(2), timeout=90)
    ready = "{.status.readyReplicas}"
    cluster.kubectl(
        "wait", f"deployment/{NAME}-router", "-n", namespace, f"--for=jsonpath={ready}={router_replicas}",
        "--timeout=60s",
    )  # fmt: skip
