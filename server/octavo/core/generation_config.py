"""The sampling defaults that a model brings along, in the words of its ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.sampling_params import SamplingParams

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NOT_APPLIED = {"typical_p": 1.0, "no_repeat_ngram_size": 0}


def sampling_defaults(
    generation_config: Mapping[str, Any], max_tokens: int | None = SamplingParams().max_tokens
) -> SamplingParams:
    """What a request gets that says nothing; ``max_tokens`` where the model does not say how many.

    Raises ``InvalidRequest`` for a value out of range.
    """
    values = {name: generation_config.get(name) for name in _FIELDS}
    given = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(**given, max_tokens=generation_config.get("max_new_tokens") or max_tokens)


def not_applied(generation_config: Mapping[str, Any]) -> list[str]:
    """The settings that ask for something the sampler does not have, as ``name value``."""
    return [
        f"{name} {generation_config[name]}"
        for name, off in _NOT_APPLIED.items()
        if generation_config.get(name, off) not in (off, None)
    ]
