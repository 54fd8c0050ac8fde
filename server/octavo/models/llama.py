"""Llama: pre-norm layers, rotary embeddings, grouped KV heads, SiLU-gated MLP."""

from __future__ import annotations

from octavo.layers.decoder import DecoderLayer, PreNormLayer
from octavo.models.base import Builder, CausalLM


class LlamaForCausalLM(CausalLM):
    def build_layer(self, build: Builder, index: int) -> DecoderLayer:
        name = f"model.layers.{index}."
        settings = build.attention_settings(index)
        return PreNormLayer(
            build.attention(f"{name}self_attn.", settings),
            build.mlp(f"{name}mlp."),
            before=build.norm(f"{name}input_layernorm"),
            between=build.norm(f"{name}post_attention_layernorm"),
        )
