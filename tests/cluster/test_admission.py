"""Wrong manifests are refused when they are applied, or marked at once, by a message that names the field."""

from typing import Any

import pytest
from cluster.access import Cluster, KubectlError
from cluster.service import await_service, condition, example


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        pytest.param(
            {"replicas": None, "autoscaling": {"mode": "native", "minReplicas": 3, "maxReplicas": 2}},
            ["spec.autoscaling.minReplicas", "3", "2"],
            id="min above max",
        ),
        pytest.param(
            {"replicas": 2, "autoscaling": {"mode": "native", "maxReplicas": 2}},
            ["spec.replicas", "autoscaling"],
            id="replicas beside native autoscaling",
        ),
        pytest.param(
            {"model": {"uri": "ftp://host/model"}},
            ["spec.model.uri", "ftp://host/model"],
            id="unknown scheme",
        ),
        pytest.param(
            {
                "replicas": None,
                "autoscaling": {"mode": "native", "maxReplicas": 2, "targets": {"kvCacheUsagePercent": 101}},
            },
            ["spec.autoscaling.targets.kvCacheUsagePercent", "101"],
            id="target out of range",
        ),
        pytest.param(
            {"engine": {"maxModelLength": 2048}},
            ["spec.engine.maxModelLength", "unknown field"],
            id="misspelt field",
        ),
    ],
)
def test_a_wrong_manifest_is_refused_by_the_field_s_name(
    cluster: Cluster, octavo: str, namespace: str, spec: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(KubectlError) as refusal:
        cluster.apply(example("wrong", **spec), namespace=namespace)
    for part in named:
        assert part in str(refusal.value)


def test_a_flag_that_the_engine_does_not_know_is_marked_with_its_name(
    cluster: Cluster, octavo: str, namespace: str
) -> None:
    cluster.apply(example("wrong", engine={"args": ["--no-such-flag=1"]}), namespace=namespace)
    service = await_service(
        cluster, namespace, "wrong", lambda s: condition(s)["status"] == "False", timeout=30
    )
    assert "spec.engine.args" in condition(service)["message"]
    assert "--no-such-flag" in condition(service)["message"]
    assert cluster.list("pods", namespace, "octavo.dev/service=wrong") == []
