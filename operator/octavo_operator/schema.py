"""Check a manifest as the API server does, without a cluster: schema, defaults and CEL rules of our CRD.

Walks ``crd.yaml`` itself, so that `octavo up` refuses what ``kubectl apply`` refuses, with the same
messages. Covers the parts of structural schemas that the CRD uses; a keyword it does not know is an error,
not ignored.
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import celpy
import yaml
from celpy.adapter import json_to_cel

from octavo.errors import ConfigError

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
}
_KNOWN = {
    "type", "properties", "required", "description", "default", "enum", "minimum", "maximum", "minLength",
    "maxLength", "pattern", "items", "maxItems", "maxProperties", "additionalProperties", "format",
    "x-kubernetes-validations", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
}  # fmt: skip

Node = Mapping[str, Any]


@functools.cache
def crd() -> dict[str, Any]:
    """The CustomResourceDefinition that the chart installs."""
    text = importlib.resources.files("octavo_operator").joinpath("crd.yaml").read_text()
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


@functools.cache
def root() -> Node:
    """The schema of the stored version."""
    node: Node = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    _refuse_unknown_keywords(node, "")
    return node


def at(path: str) -> Node:
    """The schema of a field, as in ``at("spec.autoscaling.targets")``."""
    node = root()
    for part in path.split("."):
        node = node["properties"][part]
    return node


def _refuse_unknown_keywords(node: Node, path: str) -> None:
    if extra := set(node) - _KNOWN:
        raise ValueError(
            f"crd.yaml uses {sorted(extra)} at {path or 'the root'}: octavo_operator.schema cannot check that"
        )
    children = list(node.get("properties", {}).items())
    children += [(key, node[key]) for key in ("items", "additionalProperties") if key in node]
    for name, child in children:
        _refuse_unknown_keywords(child, f"{path}.{name}")


def with_defaults(value: Any, node: Node) -> Any:
    """A copy of ``value`` with the defaults of the schema filled in, as the API server stores it."""
    if isinstance(value, dict):
        properties = node.get("properties", {})
        filled: dict[str, Any] = {}
        for name, item in value.items():
            child = properties.get(name) or node.get("additionalProperties") or {}
            if item is None and "default" in child:
                continue  # an explicit null takes the default
            filled[name] = with_defaults(item, child)
        for name, child in properties.items():
            if name not in filled and "default" in child:
                filled[name] = with_defaults(copy.deepcopy(child["default"]), child)
        return filled
    if isinstance(value, list):
        return [with_defaults(item, node.get("items", {})) for item in value]
    return value


def pruned(value: Any, node: Node, path: str = "") -> tuple[Any, list[str]]:
    """``value`` without the fields that the schema does not know, and the paths of those."""
    if isinstance(value, list):
        parts = [pruned(item, node.get("items", {}), f"{path}[{i}]") for i, item in enumerate(value)]
        return [part for part, _ in parts], [lost for _, some in parts for lost in some]
    if not isinstance(value, dict):
        return value, []
    kept, lost = {}, []
    for name, item in value.items():
        child, free = _child(node, name)
        if child is not None:
            kept[name], inner = pruned(item, child, _join(path, name))
            lost += inner
        elif free:
            kept[name] = item
        else:
            lost.append(_join(path, name))
    return kept, lost


def _child(node: Node, name: str) -> tuple[Node | None, bool]:
    """The schema of a field, and whether one without a schema may be there."""
    properties, others = node.get("properties", {}), node.get("additionalProperties")
    free = bool(node.get("x-kubernetes-preserve-unknown-fields")) or (not properties and others is None)
    return properties.get(name, others), free


def check(value: Any, node: Node, path: str = "") -> None:
    """Raise ``ConfigError`` for the first field that the API server would refuse (``param`` is its path)."""
    for field, message in _structural(value, node, path):
        raise ConfigError(f"{field or 'the manifest'}: {message}", param=field)
    for field, message in _rules(value, node, path):
        raise ConfigError(f"{field or 'the manifest'}: {message}", param=field)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _structural(value: Any, node: Node, path: str) -> Iterator[tuple[str, str]]:
    if node.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield path, f"Invalid value: {json.dumps(value)}: must be of type integer or string"
            return
    elif not _is_a(value, kind := node.get("type")):
        yield path, f"Invalid value: {json.dumps(value, default=str)}: must be of type {kind}"
        return
    if isinstance(value, dict):
        yield from _object(value, node, path)
    elif isinstance(value, list):
        if len(value) > node.get("maxItems", len(value)):
            yield path, f"Too many: {len(value)}: must have at most {node['maxItems']} items"
        for index, item in enumerate(value):
            yield from _structural(item, node.get("items", {}), f"{path}[{index}]")
    else:
        yield from _scalar(value, node, path)


def _is_a(value: Any, kind: str | None) -> bool:
    if kind is None:
        return True
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _object(value: dict[str, Any], node: Node, path: str) -> Iterator[tuple[str, str]]:
    for name in node.get("required", ()):
        if name not in value:
            yield _join(path, name), "Required value"
    if len(value) > node.get("maxProperties", len(value)):
        yield path, f"Too many: {len(value)}: must have at most {node['maxProperties']} items"
    for name, item in value.items():
        child, free = _child(node, name)
        if child is not None:
            yield from _structural(item, child, _join(path, name))
        elif not free:
            known = ", ".join(sorted(node.get("properties", {})))
            yield _join(path, name), f"unknown field; known here are {known}"


def _scalar(value: Any, node: Node, path: str) -> Iterator[tuple[str, str]]:
    shown = json.dumps(value)
    if "enum" in node and value not in node["enum"]:
        yield (
            path,
            f"Unsupported value: {shown}: supported values: {', '.join(json.dumps(v) for v in node['enum'])}",
        )
    if isinstance(value, str):
        if len(value) < node.get("minLength", 0):
            yield path, f"Invalid value: {shown}: should be at least {node['minLength']} chars long"
        if len(value) > node.get("maxLength", len(value)):
            yield path, f"Too long: may not be more than {node['maxLength']} bytes"
        if "pattern" in node and not re.search(node["pattern"], value):
            yield path, f"Invalid value: {shown}: should match '{node['pattern']}'"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < node.get("minimum", value):
            yield path, f"Invalid value: {shown}: should be greater than or equal to {node['minimum']}"
        if value > node.get("maximum", value):
            yield path, f"Invalid value: {shown}: should be less than or equal to {node['maximum']}"


def _rules(value: Any, node: Node, path: str) -> Iterator[tuple[str, str]]:
    """Broken CEL rules, inner fields after outer ones."""
    for rule in node.get("x-kubernetes-validations", ()):
        if not _evaluate(rule["rule"], value):
            message = rule["message"]
            if "messageExpression" in rule:
                message = str(_evaluate(rule["messageExpression"], value))
            yield path + rule.get("fieldPath", ""), " ".join(message.split())
    if isinstance(value, dict):
        properties, others = node.get("properties", {}), node.get("additionalProperties", {})
        for name, item in value.items():
            yield from _rules(item, properties.get(name, others), _join(path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _rules(item, node.get("items", {}), f"{path}[{index}]")


@functools.cache
def _program(expression: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression), functions={"format": _format})


def _format(pattern: str, values: list[Any]) -> celpy.celtypes.StringType:
    """``'%d'.format([1])``: Kubernetes has it beyond plain CEL, and allows no ``string(1)`` in a message."""
    return celpy.celtypes.StringType(str(pattern) % tuple(values))


def _evaluate(expression: str, value: Any) -> Any:
    return _program(expression).evaluate({"self": json_to_cel(value)})
