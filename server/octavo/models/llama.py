"""Llama: pre-norm layers, rotary embeddings, grouped KV heads, SiLU-gated MLP."""

from __future__ import annotations

from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderLayer, PreNormLayer
from octavo.layers.linear import GatedMLP
from octavo.models.base import Builder, CausalLM


class LlamaForCausalLM(CausalLM):
    def build_layer(self, build: Builder, index: int) -> DecoderLayer:
        name = f"model.layers.{index}."
        settings = build.attention_settings(index)
        return PreNormLayer(
            Attention(build.ops, build.weights, f"{name}self_attn.", settings),
            GatedMLP(build.ops, build.weights, f"{name}mlp.", build.config.activation),
            before=build.norm(f"{name}input_layernorm"),
            between=build.norm(f"{name}post_attention_layernorm"),
        )
