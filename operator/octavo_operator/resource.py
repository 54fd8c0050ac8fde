"""The ``InferenceService`` as typed, immutable values, from a manifest or from an object of the API server.

``load`` is what `octavo up` and the operator share: schema and rules of the CRD, then the engine's own
settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from octavo.config import EngineConfig, engine_config
from octavo.errors import ConfigError
from octavo_operator import overlay, schema

GROUP, VERSION, PLURAL, KIND = "octavo.dev", "v1alpha1", "inferenceservices", "InferenceService"
API_VERSION = f"{GROUP}/{VERSION}"
DEFAULT_MIN_REPLICAS = 1
# What the API server accepts under `metadata`; it fills in most of it itself.
_METADATA = {
    "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers",
    "generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences",
    "resourceVersion", "selfLink", "uid",
}  # fmt: skip

# Flags of `octavo serve` that `engine.args` must not hold, and what to use.
_RESERVED = {
    "--host": "the operator sets the address",
    "--port": "the operator sets the ports",
    "--private-port": "the operator sets the ports",
    "--device": "set spec.engine.device",
    "--dtype": "set spec.engine.dtype",
    "--max-model-len": "set spec.engine.maxModelLen",
    "--kv-cache-memory-bytes": "set spec.engine.kvCacheMemory",
    "--gpu-memory-utilization": "set spec.engine.gpuMemoryUtilizationPercent",
    "--block-size": "set spec.engine.blockSize",
    "--enable-prefix-caching": "set spec.engine.prefixCaching",
    "--no-enable-prefix-caching": "set spec.engine.prefixCaching",
    "--tensor-parallel-size": "set spec.engine.parallelism.tensor",
    "--pipeline-parallel-size": "set spec.engine.parallelism.pipeline",
    "--api-key": "put the keys in a Secret and name it in spec.auth.apiKeySecretRef",
    "--api-key-dir": "put the keys in a Secret and name it in spec.auth.apiKeySecretRef",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    uri: str
    name: str
    secret: str | None  # Secret with the download's environment, such as HF_TOKEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    device: str
    dtype: str
    max_model_len: int | str  # tokens, or "auto"
    kv_cache_memory: int | str | None  # bytes, or a quantity such as 256Mi
    gpu_memory_utilization_percent: int | None
    block_size: int
    prefix_caching: bool
    args: tuple[str, ...]
    tensor: int
    resources: Mapping[str, Any]
    pod_template: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    replicas: int
    policy: str
    resources: Mapping[str, Any]
    pod_template: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """Native autoscaling: bounds and targets per ready replica."""

    min_replicas: int
    max_replicas: int
    waiting_requests: int
    kv_cache_usage_percent: int
    stabilization_s: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceService:
    name: str
    namespace: str
    uid: str  # empty for a manifest that no API server has seen
    generation: int
    model: Model
    engine: Engine
    router: Router
    replicas: int | None  # as written; None under native autoscaling, or left out
    autoscaling: Autoscaling | None  # only in mode native
    external_scaler: bool  # mode external: somebody else writes spec.replicas
    api_key_secret: str | None
    paused: bool

    @property
    def start_replicas(self) -> int:
        """Engine replicas before any autoscaling decision: as written, else the minimum."""
        if self.replicas is not None:
            return self.replicas
        return self.autoscaling.min_replicas if self.autoscaling else DEFAULT_MIN_REPLICAS


def load(text: str) -> InferenceService:
    """The one InferenceService in a YAML (or JSON) text; other kinds of objects in it are left alone.

    Raises ``ConfigError`` naming the field, its value and what is allowed.
    """
    try:
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except yaml.YAMLError as error:
        raise ConfigError(f"the manifest is not YAML: {' '.join(str(error).split())}") from error
    if not all(isinstance(d, dict) for d in documents):
        raise ConfigError(
            "the manifest is not a Kubernetes object: it needs apiVersion, kind, metadata and spec"
        )
    ours = [d for d in documents if d.get("kind") == KIND]
    if len(ours) != 1:
        kinds = ", ".join(str(d.get("kind", "no kind")) for d in documents) or "nothing"
        raise ConfigError(
            f"the manifest must hold one {KIND} of {API_VERSION}; it holds {kinds}", param="kind"
        )
    return from_body(ours[0])


def from_body(body: Mapping[str, Any]) -> InferenceService:
    """An object to be sent to the API server; ``status`` is not read. Raises ``ConfigError``."""
    if body.get("apiVersion") != API_VERSION:
        raise ConfigError(
            f"apiVersion: {body.get('apiVersion')!r} is not known: give {API_VERSION}", param="apiVersion"
        )
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        raise ConfigError("metadata.name: Required value", param="metadata.name")
    if extra := sorted(set(metadata) - _METADATA):
        raise ConfigError(f"metadata.{extra[0]}: unknown field", param=f"metadata.{extra[0]}")
    checked = {key: value for key, value in body.items() if key != "status"}
    checked["metadata"] = {"name": metadata["name"]}
    checked = schema.with_defaults(checked, schema.root())
    schema.check(checked, schema.root())
    service = _typed(metadata, checked["spec"])
    overlay.check(service.engine.pod_template, "engine", "spec.engine.podTemplate")
    overlay.check(service.router.pod_template, "router", "spec.router.podTemplate")
    _refuse_reserved(service.engine.args)
    settings(service)
    return service


def from_stored(body: Mapping[str, Any]) -> tuple[InferenceService, list[str]]:
    """An object of the API server, and the paths of fields we do not know: its CRD may be newer than we are.

    Raises ``ConfigError`` for what the CRD cannot see, such as an engine flag that does not exist.
    """
    spec, unknown = schema.pruned(body.get("spec", {}), schema.at("spec"), "spec")
    metadata = {key: value for key, value in body["metadata"].items() if key in _METADATA}
    return from_body({**body, "metadata": metadata, "spec": spec}), unknown


def engine_args(service: InferenceService) -> list[str]:
    """Flags of ``octavo serve`` for one engine, but those of its place: model, addresses, ports, keys."""
    engine = service.engine
    args = [
        f"--served-model-name={service.model.name}",
        f"--device={engine.device}",
        f"--dtype={engine.dtype}",
        f"--max-model-len={engine.max_model_len}",
        f"--block-size={engine.block_size}",
        "--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching",
    ]
    if engine.kv_cache_memory is not None:
        args.append(f"--kv-cache-memory-bytes={engine.kv_cache_memory}")
    if engine.gpu_memory_utilization_percent is not None:
        args.append(f"--gpu-memory-utilization={engine.gpu_memory_utilization_percent / 100}")
    if engine.tensor > 1:
        args.append(f"--tensor-parallel-size={engine.tensor}")
    return args + list(engine.args)


def router_args(service: InferenceService) -> list[str]:
    """Flags of ``octavo router``, without addresses, membership and keys."""
    return [f"--policy={service.router.policy}"]


def settings(service: InferenceService) -> EngineConfig:
    """The engine's settings as its flags make them; ``ConfigError`` where the engine would refuse them."""
    try:
        return engine_config(service.model.uri, engine_args(service))
    except ConfigError as error:
        raise ConfigError(f"spec.engine.args: {error.message}", param="spec.engine.args") from error


def _refuse_reserved(args: tuple[str, ...]) -> None:
    for arg in args:
        flag = arg.partition("=")[0]
        if flag in _RESERVED:
            raise ConfigError(
                f"spec.engine.args: {flag} cannot be given here: {_RESERVED[flag]}", param="spec.engine.args"
            )


def _typed(metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> InferenceService:
    model, engine, router = spec["model"], spec["engine"], spec["router"]
    scaling: Mapping[str, Any] = spec.get("autoscaling") or {"mode": None}
    return InferenceService(
        name=metadata["name"],
        namespace=metadata.get("namespace") or "default",
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        model=Model(
            uri=model["uri"],
            name=model.get("name") or metadata["name"],
            secret=model["secretRef"]["name"] if "secretRef" in model else None,
        ),
        engine=Engine(
            device=engine["device"],
            dtype=engine["dtype"],
            max_model_len=engine["maxModelLen"],
            kv_cache_memory=engine.get("kvCacheMemory"),
            gpu_memory_utilization_percent=engine.get("gpuMemoryUtilizationPercent"),
            block_size=engine["blockSize"],
            prefix_caching=engine["prefixCaching"],
            args=tuple(engine["args"]),
            tensor=engine["parallelism"]["tensor"],
            resources=engine["resources"],
            pod_template=engine["podTemplate"],
        ),
        router=Router(
            replicas=router["replicas"],
            policy=router["policy"],
            resources=router["resources"],
            pod_template=router["podTemplate"],
        ),
        replicas=spec.get("replicas"),
        autoscaling=_autoscaling(scaling) if scaling["mode"] == "native" else None,
        external_scaler=scaling["mode"] == "external",
        api_key_secret=spec["auth"]["apiKeySecretRef"]["name"] if "auth" in spec else None,
        paused=spec["paused"],
    )


def _autoscaling(scaling: Mapping[str, Any]) -> Autoscaling:
    targets = schema.with_defaults(scaling.get("targets", {}), schema.at("spec.autoscaling.targets"))
    down = schema.with_defaults(scaling.get("scaleDown", {}), schema.at("spec.autoscaling.scaleDown"))
    return Autoscaling(
        min_replicas=scaling.get("minReplicas", DEFAULT_MIN_REPLICAS),
        max_replicas=scaling["maxReplicas"],
        waiting_requests=targets["waitingRequests"],
        kv_cache_usage_percent=targets["kvCacheUsagePercent"],
        stabilization_s=down["stabilizationSeconds"],
    )
