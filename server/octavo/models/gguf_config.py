"""GGUF metadata, spelt as Hugging Face's ``config.json`` spells it, and the names of the tensors."""

from __future__ import annotations

from typing import Any

from octavo.errors import ModelLoadError
from octavo.gguf_file import GGUFFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
_ACTIVATION = {"llama": "silu", "qwen3": "silu", "gemma3": "gelu_pytorch_tanh"}
_GEMMA_27B_LAYERS = 62  # the one Gemma 3 whose query scale is hidden_size / heads, as in llama.cpp
# How chat models end a turn. A file may number the end of the sequence alone, so these are looked for by
# name, as llama.cpp does.
_ENDS_OF_TURN = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")

# Parameter names inside a layer: GGUF's to ours (Hugging Face's).
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def gguf_as_hf_config(file: GGUFFile) -> dict[str, Any]:
    """The metadata as ``config.json`` keys.

    Raises ``ModelLoadError`` naming an architecture or key it cannot use.
    """
    kind = file.metadata.get("general.architecture", "none")
    if kind not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: GGUF architecture {kind!r} is not supported: {', '.join(ARCHITECTURES)} are"
        )

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{kind}.{key}", default)

    heads, hidden = get("attention.head_count"), get("embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": embedding.shape[0] if embedding else get("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _rope_scaling(get("rope.scaling.type"), get("rope.scaling.factor")),
        "rope_local_base_freq": get("rope.freq_base_swa"),
        "sliding_window": get("attention.sliding_window"),
        "hidden_act": _ACTIVATION[kind],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "eos_token_id": _eos(file),
        **_layer_kinds(get("attention.sliding_window_pattern"), get("block_count")),
    }
    if kind == "gemma3" and get("block_count") == _GEMMA_27B_LAYERS:
        config["query_pre_attn_scalar"] = hidden // heads
    if get("rope.dimension_count", 0) not in (0, config["head_dim"] or hidden // heads):
        raise ModelLoadError(f"{file.path}: rotary embeddings over a part of the head are not supported")
    return {key: value for key, value in config.items() if value is not None}


def from_gguf_name(name: str, architecture: str) -> str:
    """Our name of a GGUF tensor: ``blk.3.ffn_up.weight`` is ``model.layers.3.mlp.up_proj.weight``.

    A name that no architecture has is given back as it is.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    block, _, inner = stem.removeprefix("blk.").partition(".")
    names = _GEMMA_LAYER_NAMES if architecture.startswith("Gemma") else _LAYER_NAMES
    return f"model.layers.{block}.{names[inner]}.{suffix}" if inner in names else name


def _rope_scaling(kind: str | None, factor: float | None) -> dict[str, Any] | None:
    """Scaling by name; Llama 3's comes as a tensor of factors (``rope_freqs``), not as metadata."""
    if kind in (None, "none"):
        return None
    return {"rope_type": kind, "factor": factor}


def _layer_kinds(pattern: int | list[bool] | None, layers: int) -> dict[str, Any]:
    if isinstance(pattern, list):  # one flag a layer: does it slide?
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern[:layers]]
        return {"layer_types": kinds}
    return {} if pattern is None else {"sliding_window_pattern": pattern}


def _eos(file: GGUFFile) -> list[int]:
    """Every token that ends generation: end of sequence, of turn, of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    if "tokenizer.chat_template" in file.metadata:
        tokens = file.metadata.get("tokenizer.ggml.tokens", [])
        found += [tokens.index(token) for token in _ENDS_OF_TURN if token in tokens]
    return list(dict.fromkeys(token for token in found if token is not None))
