"""Answers read by the client packages' own types, strictly: no value is converted, and no field is there that
the types do not know, but for those named here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter

# Fields that the types do not have: OpenAI's own server sends ``store``, vLLM the others.
BEYOND = frozenset(["reasoning", "reasoning_content", "stop_reason", "store"])


def read(kind: Any, text: str, beyond: frozenset[str] = BEYOND) -> Any:
    """JSON as ``kind``, a class or a union of them. Raises ``ValidationError`` or ``AssertionError``."""
    value = _adapter(kind).validate_json(text, strict=True)
    unknown = {place for place, name in _unknown(value, type(value).__name__) if name not in beyond}
    assert not unknown, f"the types of the package do not know {sorted(unknown)}"
    return value


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Path and name of each field that the type of its object does not have."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield f"{place}.{name}", name
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _unknown(inner, f"{place}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unknown(inner, f"{place}[{index}]")
