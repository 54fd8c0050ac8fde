"""OpenAI's first form of tools, ``functions`` and ``function_call``, as tools.

Its answers have one call at most, in ``function_call`` of the message, and finish reason "function_call".
"""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidRequest
from octavo.prompt.dialect import Dialect, objects, wrong
from octavo.prompt.tools.definitions import parse_tool_choice, parse_tools


def with_tools(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat with ``tools`` in place of ``functions``. Raises ``InvalidRequest`` naming the field
    that was sent.
    """
    functions, call = body.get("functions"), body.get("function_call")
    if functions in (None, []) and call in (None, "none", "auto"):
        return body
    for name in ("tools", "tool_choice"):
        if body.get(name) is not None:
            message = f"functions and {name} are both given: functions is the older form of tools, choose one"
            raise InvalidRequest(message, param="functions")
    tools = [
        {"type": "function", "function": one}
        for one in objects([] if functions is None else functions, "functions")
    ]
    choice = call
    if isinstance(call, dict):
        choice = {"type": "function", "function": call}
    elif call not in (None, "none", "auto"):
        raise wrong("function_call", call, "none, auto or an object with the name of a function")
    try:
        parse_tool_choice(choice, parse_tools(tools))
    except InvalidRequest as error:
        raise LEGACY.as_asked(error) from error
    left = {name: value for name, value in body.items() if name not in ("functions", "function_call")}
    return {**left, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


LEGACY = Dialect(
    fields=frozenset(["functions", "function_call"]),
    chat=with_tools,
    renamed=(
        (r"tools\[(\d+)\]\.function|tools\[(\d+)\]", r"functions[\1\2]"),
        ("tools", "functions"),
        (r"tool_choice\.function|tool_choice", "function_call"),
    ),
)
