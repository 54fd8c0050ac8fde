"""How the values of settings are read, from a flag's text or from Python's own."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import ConfigError

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(|k|M|G|T|Ki|Mi|Gi|Ti)B?$")
_UNIT = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30,
    "Ti": 2**40,
}  # fmt: skip


def parse_size(text: str | int) -> int:
    """Bytes from a number or a Kubernetes quantity: 268435456, ``256Mi``, ``1.5G``."""
    match = _SIZE.match(str(text).strip())
    if not match or (size := int(float(match[1]) * _UNIT[match[2]])) <= 0:
        raise ConfigError(
            f"{text!r} is not a size: give bytes, or a number with k, M, G, T, Ki, Mi, Gi or Ti, as in 256Mi"
        )
    return size


def parse_max_model_len(text: str | int) -> int | str:
    """A number of tokens, or ``auto`` (also -1): the longest that fits the cache."""
    if str(text) in ("auto", "-1"):
        return "auto"
    if not str(text).isdecimal() or int(text) == 0:
        raise ConfigError(f"max-model-len is {text!r}: give a number of tokens, or auto (-1) for what fits")
    return int(text)


def json_object(text: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(text, Mapping):
        return dict(text)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{text!r} is not a JSON object")
    return value


def text_list(value: str | Sequence[str]) -> tuple[str, ...]:
    """Texts of a JSON list, or one text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.startswith("[") else [value]
        except ValueError as error:
            raise ConfigError(f"{value!r} is not JSON: {error}") from error
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(f"{value!r} is not a list of texts")
    return tuple(value)


def root_path(value: str) -> str:
    path = value.rstrip("/")
    if not path.startswith("/"):
        raise ConfigError(f"{value!r} is not a path: it begins with /, as /api")
    return path


def json_fields(cls: type[Any], value: str | Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object whose names are fields of ``cls``."""
    fields, known = json_object(value), [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(set(fields) - set(known)):
        raise ConfigError(f"unknown field {unknown[0]!r}: known are {', '.join(known)}")
    return fields


def texts(flag: str, values: Any) -> tuple[str, ...]:
    """None is empty: an empty key, which an unset variable gives, would open the server to everyone."""
    if not isinstance(values, (list, tuple)) or not all(isinstance(one, str) for one in values):
        raise ConfigError(f"{flag} is {values!r}: give a string, or a list of strings")
    if not all(one.strip() for one in values):
        raise ConfigError(f"{flag} is empty: give a value, or leave it out")
    return tuple(values)


def number(flag: str, value: Any, whole: bool, low: float | None, high: float | None) -> float:
    try:
        number = int(value) if whole else float(value)
        same = math.isfinite(number) and (isinstance(value, str) or number == value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{flag} is {value!r}: it must be a number") from error
    if not same:
        raise ConfigError(f"{flag} is {value!r}: it must be a {'whole' if whole else 'finite'} number")
    if (low is not None and number < low) or (high is not None and number > high):
        raise ConfigError(f"{flag} is {value!r}: it must be {bounds(low, high)}")
    return number


def bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"between {low} and {high}"
    return f"at least {low}" if low is not None else f"at most {high}"
