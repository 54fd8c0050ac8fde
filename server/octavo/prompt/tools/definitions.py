"""The tools of a request and which of them the model has to call, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from octavo.errors import InvalidRequest

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. ``schema`` is of its arguments, an object; ``where`` the field that
    holds it.
    """

    name: str
    schema: dict[str, Any]
    strict: bool = False
    where: str = "tools"


class ToolChoice(msgspec.Struct, frozen=True):
    """none: no calls; auto: the model decides; required: at least one call. ``names``: of the tools that may
    be called, where not all may.
    """

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None


def parse_tools(value: Any) -> tuple[Tool, ...]:
    """Raises ``InvalidRequest`` naming the tool and its field."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest(f"tools is {value!r:.100}: it must be a list of tools", param="tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(f"tools holds {len(value)} tools: at most {MAX_TOOLS}", param="tools")
    tools = tuple(_tool(one, f"tools[{index}]") for index, one in enumerate(value))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _wrong(f"tools[{index}].function.name", name, "a name that no other tool has")
    return tools


def _tool(value: Any, where: str) -> Tool:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object with type and function")
    if value.get("type", "function") != "function":
        raise _wrong(f"{where}.type", value["type"], "'function', the only type of tool known here")
    function, where = value.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise _wrong(where, function, "an object with name, description and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = "1 to 128 of letters, digits and _ . : / -"
        raise _wrong(f"{where}.name", name, allowed)
    if not isinstance(function.get("description") or "", str):
        raise _wrong(f"{where}.description", function["description"], "a string")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _wrong(f"{where}.strict", strict, "true or false")
    schema, where = function.get("parameters"), f"{where}.parameters"
    if schema is not None and not isinstance(schema, dict):
        raise _wrong(where, schema, "a JSON schema")
    schema = schema or {}
    if schema.get("type", "object") != "object":
        raise _wrong(f"{where}.type", schema["type"], "'object'")
    if not isinstance(schema.get("properties") or {}, dict):
        raise _wrong(f"{where}.properties", schema["properties"], "an object")
    return Tool(name, {"type": "object", **schema}, bool(strict), where)


def parse_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Raises ``InvalidRequest``; without tools only none and auto are possible."""
    if value is None or value in ("auto", "none"):
        return ToolChoice("none" if not tools or value == "none" else "auto")
    if not isinstance(value, dict) and value != "required":
        raise _wrong("tool_choice", value, "none, auto, required or an object that names functions")
    if not tools:
        raise InvalidRequest("tool_choice asks for a call but there are no tools", param="tool_choice")
    if value == "required":
        return ToolChoice("required")
    if value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools"), tools)
    return ToolChoice("required", (_named(value, tools, "tool_choice"),))


def _allowed(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Some of the tools, to be called or not."""
    where = "tool_choice.allowed_tools"
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object with mode and tools")
    mode, given = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise _wrong(f"{where}.mode", mode, "auto or required")
    if not isinstance(given, list) or not given:
        raise _wrong(f"{where}.tools", given, "a list of at least one tool")
    names = tuple(_named(one, tools, f"{where}.tools[{index}]") for index, one in enumerate(given))
    return ToolChoice(mode, names)


def _named(value: Any, tools: Sequence[Tool], where: str) -> str:
    """The name of a tool in an object that refers to it."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or value.get("type", "function") != "function":
        raise _wrong(where, value, '{"type": "function", "function": {"name": ...}}')
    if name not in (known := [tool.name for tool in tools]):
        raise _wrong(f"{where}.function.name", name, f"one of the tools: {', '.join(known):.300}")
    return name


def _wrong(where: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is {value!r:.100}: it must be {allowed}", param=where)
