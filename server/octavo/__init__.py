"""Octavo: a paged-attention engine with an OpenAI-compatible server.

``LLM``, ``SamplingParams`` and ``StructuredOutputs`` are the offline API. ``LLM`` is imported on first use,
so that the router and the operator can import ``octavo.config`` and ``octavo.core`` where there is no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.core.sampling_params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from octavo.llm import LLM

__all__ = ["LLM", "SamplingParams", "StructuredOutputs"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from octavo.llm import LLM

        return LLM
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
