"""Requests of ``/v1/responses`` as chats: items become messages, flat tools those of chats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.prompt.dialect import (
    EXTENSIONS,
    Dialect,
    content,
    objects,
    parts,
    refuse_off,
    string,
    unsupported,
    wrong,
)

LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text")
_SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "stop", "top_k")
_OFF: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": (),
    "moderation": (),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
}
_FIELDS = [
    "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "max_tool_calls",
    "top_logprobs", "include", "reasoning", "metadata", "store", "previous_response_id", "background",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier",
]  # fmt: skip


def items_of(value: Any) -> list[dict[str, Any]]:
    """The ``input`` of a request as items."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if value is None or value == []:
        raise wrong("input", value, "a string or a list of items")
    return objects(value, "input")


def chat_of_response(body: dict[str, Any], before: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The body of the chat that a response is. ``before``: the items of the responses that it follows.

    Raises ``InvalidRequest`` naming the field of ``body``.
    """
    refuse_off(body, _OFF)
    items = items_of(body.get("input"))
    turns = _Turns()
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise wrong("instructions", instructions, "a string")
        turns.add({"type": "message", "role": "system", "content": instructions}, "instructions")
    for item in before:
        turns.add(item, "previous_response_id")
    for index, item in enumerate(items):
        turns.add(item, f"input[{index}]")
    chat = {name: body[name] for name in (*_SAME, *EXTENSIONS) if body.get(name) is not None}
    chat["messages"] = turns.messages
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool, i) for i, tool in enumerate(objects(body["tools"], "tools"))]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    return {**chat, **_text(body.get("text")), **_reasoning(body.get("reasoning")), **_logprobs(body)}


class _Turns:
    """Items as they join to messages: what the assistant thought, said and called in a row is one."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                told = content(parts(item.get("output"), f"{where}.output", _TEXTS))
                call_id = string(item, "call_id", where)
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": told})
            case _:
                known = "message, function_call, function_call_output and reasoning items are read"
                raise unsupported(f"{where}.type", kind, known)

    def _call(self, item: dict[str, Any], where: str) -> None:
        function = {name: string(item, name, where) for name in ("name", "arguments")}
        call = {"id": string(item, "call_id", where), "type": "function", "function": function}
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            if item.get("status") == "incomplete":  # it was cut: the model never finished it
                return
            arguments = None
        if not isinstance(arguments, dict):
            raise wrong(f"{where}.arguments", function["arguments"], "an object as JSON")
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self, *taken: str) -> dict[str, Any]:
        """The assistant's message that goes on; a new one where it has one of ``taken`` already."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in taken):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise wrong(f"{where}.role", role, "user, assistant, system or developer")
        said = content(parts(item.get("content"), f"{where}.content", _TEXTS))
        if role != "assistant":
            self.messages.append({"role": role, "content": said})
            return
        turn = self._turn()
        if turn["content"] and turn.get("tool_calls"):  # more words after the calls
            both = [turn["content"], said]
            turn["content"] = "".join(one if isinstance(one, str) else _joined(one) for one in both)
        else:
            self._turn("content")["content"] = said

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        if item.get("encrypted_content") is not None:
            raise unsupported(f"{where}.encrypted_content", "...", "send the content itself")
        texts = parts(item.get("content") or [], f"{where}.content", ("reasoning_text",))
        texts = texts or parts(item.get("summary") or [], f"{where}.summary", ("summary_text",))
        self._turn("content", "reasoning", "tool_calls")["reasoning"] = _joined(texts)


def _joined(texts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in texts)


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(
            f"tools[{index}].type", tool.get("type"), "only tools of type 'function' are run here"
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        named = objects(choice.get("tools"), "tool_choice.tools")
        tools = [_tool_named(one, f"tool_choice.tools[{index}]") for index, one in enumerate(named)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    if choice.get("type") != "function":
        allowed = "give none, auto, required, allowed_tools or a function by its name"
        raise unsupported("tool_choice.type", choice.get("type"), allowed)
    return _tool_named(choice, "tool_choice")


def _tool_named(value: dict[str, Any], where: str) -> dict[str, Any]:
    if value.get("type") != "function":
        raise unsupported(f"{where}.type", value.get("type"), "only tools of type 'function' are run here")
    return {"type": "function", "function": {"name": string(value, "name", where)}}


def _text(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("text", value, "an object")
    if value.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", value["verbosity"], "leave it out, or give 'medium'")
    form = value.get("format")
    if form is None:
        return {}
    if not isinstance(form, dict):
        raise wrong("text.format", form, "an object with a type")
    if form.get("type") != "json_schema":
        return {"response_format": form}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def _reasoning(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("reasoning", value, "an object")
    for name in value:
        if name not in ("effort", "summary", "generate_summary") and value[name] is not None:
            raise unsupported(f"reasoning.{name}", value[name], "leave it out")
    for name in ("summary", "generate_summary"):
        if value.get(name) not in (None, "auto"):
            raise unsupported(f"reasoning.{name}", value[name], "reasoning comes whole and unsummarised")
    return {"reasoning_effort": value["effort"]} if value.get("effort") is not None else {}


def _logprobs(body: dict[str, Any]) -> dict[str, Any]:
    include = [] if body.get("include") is None else body["include"]
    if not isinstance(include, list):
        raise wrong("include", include, "a list")
    for index, one in enumerate(include):
        if one != LOGPROBS:
            raise unsupported(f"include[{index}]", one, f"only {LOGPROBS} can be included")
    top = body.get("top_logprobs")
    return ({"logprobs": True} if include else {}) | ({"top_logprobs": top} if top is not None else {})


RESPONSES = Dialect(
    fields=frozenset([*_SAME, *EXTENSIONS, *_FIELDS, *_OFF]),
    chat=chat_of_response,
    renamed=(
        (r"messages|prompt", "input"),
        (r"tools\[(\d+)\]\.function", r"tools[\1]"),
        (r"tool_choice\.allowed_tools\.tools\[(\d+)\]\.function", r"tool_choice.tools[\1]"),
        (r"tool_choice\.allowed_tools|tool_choice\.function", "tool_choice"),
        (r"response_format\.json_schema|response_format", "text.format"),
        (r"max_completion_tokens|max_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
    ),
)
