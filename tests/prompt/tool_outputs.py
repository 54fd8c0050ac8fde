"""How models write calls, written anew for the tests: for each format the ways it has."""

# ruff: noqa: RUF001  DeepSeek spells its markers with these characters.
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"$ref": "#/$defs/place"},
            "tags": {"type": ["array", "null"]},
            "share": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "ping": {},
    "f": {"type": "object", "properties": {}},
}


def _object(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _arguments_first(calls: list[Call]) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'arguments': arguments, 'id': 'x', 'name': name})}</tool_call>"
        for name, arguments in calls
    )


def _xml(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_function(call)}\n</tool_call>" for call in calls)


def _function(call: Call) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in call[1].items()
    )
    return f"<function={call[0]}>\n{parameters}</function>"


def _python(calls: list[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


def _list(calls: list[Call]) -> str:
    return f"[{', '.join(_object(call) for call in calls)}]"


def _deepseek(calls: list[Call], before: str, after: str, end: str, between: str) -> str:
    written = between.join(
        f"<｜tool▁call▁begin｜>{before}{name}{after}{json.dumps(arguments)}{end}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


WRITERS: dict[str, list[Callable[[list[Call]], str]]] = {
    "hermes": [_hermes, _arguments_first],
    "llama3_json": [
        lambda calls: "<|python_tag|>" + "; ".join(_object(call, "parameters") for call in calls),
        lambda calls: "<|python_tag|>" + ";".join(_object(call) for call in calls),
    ],
    "qwen3_xml": [_xml, lambda calls: "\n".join(map(_function, calls))],
    "qwen3_coder": [_xml],
    "mistral": [
        lambda calls: "[TOOL_CALLS] " + _list(calls),
        lambda calls: "[TOOL_CALLS]" + _list(calls),
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls),
        lambda calls: "".join(
            f"[TOOL_CALLS]{name}[CALL_ID]abcdefgh{i}[ARGS]{json.dumps(args)}"
            for i, (name, args) in enumerate(calls)
        ),
        lambda calls: "".join(f"[TOOL_CALLS]{name}{json.dumps(args)}" for name, args in calls),
    ],
    "pythonic": [lambda calls: f"<|python_start|>{_python(calls)}<|python_end|>"],
    "deepseek_v3": [
        lambda calls: _deepseek(calls, "function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
        lambda calls: _deepseek(calls, "", "<｜tool▁sep｜>", "", ""),
    ],
    "granite": [
        lambda calls: "<|tool_call|>" + _list(calls),
        lambda calls: "<tool_call>" + _list(calls),
        _hermes,
    ],
}
BARE_WRITERS: dict[str, Callable[[list[Call]], str]] = {  # the whole answer, no marker
    "llama3_json": lambda calls: "; ".join(_object(call, "parameters") for call in calls),
    "pythonic": _python,
    "granite": _list,
}
