"""What a model is: shape and constants, from ``config.json`` or from GGUF metadata. No torch here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ModelLoadError
from octavo.gguf_file import GGUFFile
from octavo.layers.rope import ROPE_KINDS, RopeConfig
from octavo.models.gguf_config import gguf_as_hf_config

_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_GEMMA_LOCAL_THETA = 10_000.0  # of the sliding layers, where the checkpoint does not say (Gemma 3 report)
_GEMMA_GLOBAL_THETA = 1_000_000.0
_GEMMA_PATTERN = 6  # every sixth layer of Gemma 3 sees everything


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything the layers need to know.

    ``windows`` holds one entry a layer: None, or tokens seen (itself too).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    activation: Literal["silu", "gelu_tanh"]
    tie_word_embeddings: bool
    dtype: str
    rope: RopeConfig
    local_rope: RopeConfig | None
    windows: tuple[int | None, ...]
    query_scale: float
    attn_softcap: float | None
    final_softcap: float | None
    attention_bias: bool
    eos_token_ids: tuple[int, ...]

    @property
    def rope_of_layers(self) -> tuple[RopeConfig, ...]:
        """The rotary embedding of each layer: the local one where a layer slides and the model has one."""
        return tuple(self.local_rope if w and self.local_rope else self.rope for w in self.windows)


def load_model_config(path: Path) -> ModelConfig:
    """The config of a model folder (``config.json``) or of a GGUF file. Raises ``ModelLoadError``."""
    if path.is_file():
        with GGUFFile(path) as file:
            return from_hf_config(gguf_as_hf_config(file), str(path))
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    return from_hf_config(config if eos is None else {**config, "eos_token_id": eos}, str(path))


def from_hf_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Build from the keys of Hugging Face's ``config.json``, old and new spellings alike.

    Raises ``ModelLoadError`` naming the key when one is missing or asks for what is not supported.
    """
    merged = {**config, **config.get("text_config", {})}
    values = {key: value for key, value in merged.items() if value is not None}
    architecture = (values.get("architectures") or ["none"])[0]
    _refuse_unsupported(values, where)
    try:
        heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
        head_dim = int(values.get("head_dim") or hidden // heads)
        windows = _windows(architecture, values)
        rope, local_rope = _ropes(architecture, values, where)
        scalar = values.get("query_pre_attn_scalar") if architecture.startswith("Gemma") else None
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(values["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(values["intermediate_size"]),
            num_layers=int(values["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            max_position=int(values["max_position_embeddings"]),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            activation=_activation(values, where),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", architecture.startswith("Gemma"))),
            dtype=_dtype(values),
            rope=rope,
            local_rope=local_rope,
            windows=windows,
            query_scale=float(scalar or head_dim) ** -0.5,
            attn_softcap=values.get("attn_logit_softcapping"),
            final_softcap=values.get("final_logit_softcapping"),
            attention_bias=bool(values.get("attention_bias", False)),
            eos_token_ids=_token_ids(values.get("eos_token_id")),
        )
    except KeyError as error:
        raise ModelLoadError(f"{where}: the model's config lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{where}: the model's config cannot be used: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path.parent} is no model folder: it has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return value


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    quantisation = values.get("quantization_config") or {}
    quantised = quantisation.get("quant_method")
    cache_only = quantised == "compressed-tensors" and not quantisation.get("config_groups")
    if quantised and not cache_only:
        raise ModelLoadError(
            f"{where}: weights quantised as {quantised!r} are not supported yet; use plain safetensors, "
            "or a GGUF file"
        )
    for key in ("mlp_bias", "use_bidirectional_attention"):
        if values.get(key):
            raise ModelLoadError(f"{where}: the model's config sets {key}, which is not supported")
    if (partial := values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError(f"{where}: partial_rotary_factor is {partial}: only 1.0 is supported")


def _activation(values: Mapping[str, Any], where: str) -> Literal["silu", "gelu_tanh"]:
    name = values.get("hidden_activation") or values.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"{where}: activation {name!r} is not supported: {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def _dtype(values: Mapping[str, Any]) -> str:
    return str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _windows(architecture: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer, from ``layer_types`` or from the older keys that imply it."""
    layers, window = int(values["num_hidden_layers"]), values.get("sliding_window")
    kinds = values.get("layer_types")
    if kinds is None and architecture.startswith("Gemma"):
        pattern = int(values.get("sliding_window_pattern") or _GEMMA_PATTERN)
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    elif kinds is None:
        first = int(values.get("max_window_layers", layers)) if values.get("use_sliding_window") else layers
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"layer_types must name sliding_attention or full_attention for each of {layers} layers"
        )
    if "sliding_attention" in kinds and not window:
        raise ValueError(f"layers slide, but sliding_window is {window}")
    return tuple(int(window) if kind == "sliding_attention" and window else None for kind in kinds)


def _ropes(architecture: str, values: Mapping[str, Any], where: str) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of full layers, and of sliding ones where they differ (Gemma 3)."""
    gemma = architecture.startswith("Gemma")
    parameters = values.get("rope_parameters") or {}
    full = parameters.get("full_attention", parameters)
    theta = full.get("rope_theta") or values.get("rope_theta") or (_GEMMA_GLOBAL_THETA if gemma else 10_000.0)
    scaling = full if full.get("rope_type") else (values.get("rope_scaling") or {})
    rope = _rope(float(theta), scaling, values, where)
    if not gemma:
        return rope, None
    sliding = parameters.get("sliding_attention") or {}
    local_theta = sliding.get("rope_theta") or values.get("rope_local_base_freq") or _GEMMA_LOCAL_THETA
    return rope, _rope(float(local_theta), sliding, values, where)


def _rope(theta: float, scaling: Mapping[str, Any], values: Mapping[str, Any], where: str) -> RopeConfig:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelLoadError(f"{where}: rope scaling {kind!r} is not supported: {', '.join(ROPE_KINDS)} are")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(f"{where}: partial_rotary_factor is not supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(scaling["factor"]))
    original = scaling.get("original_max_position_embeddings") or values["max_position_embeddings"]
    return RopeConfig(
        theta,
        kind,
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(original),
    )
