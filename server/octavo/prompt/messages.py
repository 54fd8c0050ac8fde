"""Check the ``messages`` of a chat and bring them into the plain form that chat templates read."""

from __future__ import annotations

import json
from typing import Any, Literal

from octavo.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


Form = Literal["string", "given", "openai"]


class Arguments(dict[str, Any]):
    """Arguments of a call: an object, as most templates expect; where one joins it to a string, its JSON."""

    def __add__(self, other: str) -> str:
        return self._json() + other

    def __radd__(self, other: str) -> str:
        return other + self._json()

    def _json(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def template_messages(messages: Any, form: Form = "string") -> list[dict[str, Any]]:
    """Copies of the messages, contents in the form that the template reads: a string (text parts joined by
    newlines); a list of text parts ("openai"); or either, as they were given. Arguments of calls are objects,
    reasoning goes by both its names, what a tool said has the tool's name, and calls of functions and what
    those said are of tools.

    Raises ``InvalidRequest`` naming the message and the field.
    """
    if not isinstance(messages, list):
        raise InvalidRequest(f"messages must be a list of messages, not {_kind(messages)}", param="messages")
    if not messages:
        raise InvalidRequest("messages is empty: give at least one message", param="messages")
    plain = [_message(message, f"messages[{index}]", form) for index, message in enumerate(messages)]
    names: dict[Any, str] = {}
    for message in plain:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return plain


def _message(message: Any, where: str, form: Form) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(
            f"{where} must be an object with role and content, not {_kind(message)}", param=where
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(
            f"{where}.role is {role!r}: it must be one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    message = _with_calls(message, role, where)
    plain = {key: value for key, value in message.items() if value is not None}
    texts = _content(message.get("content"), role, where, bool(message.get("tool_calls")))
    if texts is not None and (form == "openai" or (form == "given" and isinstance(message["content"], list))):
        plain["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        plain["content"] = None if texts is None else "\n".join(texts)
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if name in plain:
            if not isinstance(plain[name], str):
                raise InvalidRequest(
                    f"{where}.{name} must be a string, not {_kind(plain[name])}", param=f"{where}.{name}"
                )
            plain.setdefault(other, plain[name])
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain


def _with_calls(message: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """A message of the older form, with ``function_call`` or of the role function, in that of tools."""
    if role == "function":
        return {"tool_call_id": f"call_{message.get('name')}", **message, "role": "tool"}
    call = message.get("function_call")
    if role != "assistant" or call is None or message.get("tool_calls"):
        return message
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise InvalidRequest(
            f"{where}.function_call must be an object with name and arguments, not {_kind(call)}",
            param=f"{where}.function_call",
        )
    left = {name: value for name, value in message.items() if name != "function_call"}
    function = {**call, "arguments": _arguments(call, f"{where}.function_call")}
    return {**left, "tool_calls": [{"id": f"call_{call['name']}", "type": "function", "function": function}]}


def _content(content: Any, role: str, where: str, has_calls: bool) -> list[str] | None:
    field = f"{where}.content"
    if isinstance(content, str):
        return [content]
    if content is None:
        if role == "assistant" and has_calls:
            return None
        raise InvalidRequest(f"{field} is missing: it must be a string or a list of text parts", param=field)
    if not isinstance(content, list) or not content:
        raise InvalidRequest(
            f"{field} must be a string or a list of text parts, not {_kind(content)}", param=field
        )
    return [_part(part, f"{field}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object with type and text, not {_kind(part)}", param=where)
    kind = part.get("type")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind not in ("text", "input_text", "output_text"):
        raise InvalidRequest(
            f"{where}.type is {kind!r}: this model reads parts of type text only", param=f"{where}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string, not {_kind(text)}", param=f"{where}.text")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn; their arguments become an object, which is what templates write out."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list, not {_kind(calls)}", param=where)
    plain = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f"{where}[{index}] must be an object with function.name", param=f"{where}[{index}]"
            )
        arguments = _arguments(function, f"{where}[{index}].function")
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


def _arguments(function: dict[str, Any], where: str) -> Arguments:
    field, arguments = f"{where}.arguments", function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not JSON: {error}", param=field) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{field} must be an object, not {_kind(arguments)}", param=field)
    return Arguments(arguments)


def _kind(value: Any) -> str:
    """JSON's name for the type of ``value``."""
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    kind = names.get(type(value), type(value).__name__)
    return "an empty list" if value == [] else kind
