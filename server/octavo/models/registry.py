"""Architectures by name."""

from __future__ import annotations

from octavo.errors import ModelLoadError
from octavo.models.base import CausalLM
from octavo.models.gemma3 import Gemma3ForCausalLM
from octavo.models.llama import LlamaForCausalLM
from octavo.models.qwen3 import Qwen3ForCausalLM

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class that runs an architecture. Raises ``ModelLoadError`` naming the supported ones."""
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelLoadError(f"architecture {architecture!r} is not supported: {supported} are")
    return ARCHITECTURES[architecture]
