"""The sampling defaults that a model brings along, in the words of its ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.sampling_params import SamplingParams

_FIELDS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_new_tokens": "max_tokens"}
_NOT_APPLIED = {"repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0}


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """What a request gets that says nothing. Raises ``InvalidRequest`` for a value out of range."""
    values = {ours: generation_config.get(theirs) for theirs, ours in _FIELDS.items()}
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def not_applied(generation_config: Mapping[str, Any]) -> list[str]:
    """The settings that ask for something the sampler does not have yet, as ``name value``."""
    return [
        f"{name} {generation_config[name]}"
        for name, off in _NOT_APPLIED.items()
        if generation_config.get(name, off) not in (off, None)
    ]
