"""What a JSON schema says of the type of a parameter, for formats that write values without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.prompt.tools.values import as_json

_DEPTH = 16  # of references and unions looked into
_TYPES = {one: one for one in ("string", "number", "integer", "boolean", "object", "array", "null")} | {
    "str": "string", "float": "number", "int": "integer",  # schemas written by hand have Python's names
    "bool": "boolean", "dict": "object", "list": "array",
}  # fmt: skip


def properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of an object's properties."""
    named = schema.get("$ref")
    inner = _referred(named, schema) if isinstance(named, str) else schema
    found = inner.get("properties") if isinstance(inner, dict) else None
    return dict(found) if isinstance(found, dict) else {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = _DEPTH) -> set[str]:
    """The types that values may have; empty where the schema does not say."""
    if not isinstance(schema, dict) or not depth:
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {_TYPES[named]} if named in _TYPES else set()
    if isinstance(named, list):
        return {_TYPES[one] for one in named if isinstance(one, str) and one in _TYPES}
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_referred(reference, root), root, depth - 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        values = [schema["const"]]
    if values:
        return {_type_of(value) for value in values}
    branches = [types_of(one, root, depth - 1) for key in ("anyOf", "oneOf") for one in _list(schema, key)]
    if branches:
        return set().union(*branches) if all(branches) else set()
    for one in _list(schema, "allOf"):
        if found := types_of(one, root, depth - 1):
            return found
    return set()


def written_as_json(text: str, types: set[str]) -> str | None:
    """JSON of a value that a model wrote bare, when it is of one of ``types``, which are no strings; else
    None: it is a string.
    """
    written = as_json(text)
    if written is None:
        return None
    kind = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(
        written[0], "number"
    )
    return written if kind in types or (kind == "number" and "integer" in types) else None


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    place: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
