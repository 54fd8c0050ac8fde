"""Requests of Anthropic's ``/v1/messages`` as chats: blocks become text, reasoning, calls, results."""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import InvalidRequest
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

_SAME = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")
_OFF: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "inference_geo": (),
    "service_tier": ("auto", "standard_only"),
}
_FIELDS = [
    "messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config", "metadata",
    "cache_control",
]  # fmt: skip
# Tokens of a thinking budget up to which it counts as little or as some: a target, as Anthropic says, for
# templates that read an effort.
_LOW_BUDGET, _MEDIUM_BUDGET = 4096, 16384


def chat_of_messages(body: dict[str, Any]) -> dict[str, Any]:
    """The body of the chat. Raises ``InvalidRequest`` naming the field of ``body``."""
    refuse_off(body, _OFF)
    chat = {name: body[name] for name in (*_SAME, *EXTENSIONS) if body.get(name) is not None}
    messages: list[dict[str, Any]] = []
    if body.get("system") is not None:
        messages.append({"role": "system", "content": content(parts(body["system"], "system", ("text",)))})
    given = objects(body.get("messages"), "messages")
    if not given:
        raise wrong("messages", given, "at least one message")
    for index, message in enumerate(given):
        _add(messages, message, f"messages[{index}]")
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):  # its beginning is given
        chat["continue_final_message"] = True
    chat["messages"] = messages
    if body.get("stop_sequences") is not None:
        chat["stop"] = body["stop_sequences"]
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(objects(body["tools"], "tools"))]
    return {
        **chat,
        **_tool_choice(body.get("tool_choice")),
        **_output(body.get("output_config")),
        **_thinking(body, chat.get("chat_template_kwargs")),
    }


def _add(messages: list[dict[str, Any]], message: dict[str, Any], where: str) -> None:
    """Append a message; turns of one role in a row are one turn."""
    role, said, here = message.get("role"), message.get("content"), f"{where}.content"
    if role not in ("user", "assistant"):
        raise wrong(f"{where}.role", role, "user or assistant (what is of the system stands in system)")
    if isinstance(said, str):
        said = [{"type": "text", "text": said}]
    if not isinstance(said, list):
        raise wrong(here, said, "a string or a list of blocks")
    turn: dict[str, Any] = {"role": role, "texts": []}
    if messages and messages[-1]["role"] == role:
        turn = messages.pop()
        held = turn.pop("content")
        turn["texts"] = [held] if isinstance(held, str) else [part["text"] for part in held]
    for index, block in enumerate(objects(said, here)):
        if role == "user":
            _user_block(messages, turn, block, f"{here}[{index}]")
        else:
            _assistant_block(turn, block, f"{here}[{index}]")
    texts = turn.pop("texts")
    if texts or role == "assistant":
        messages.append({**turn, "content": content([{"type": "text", "text": text} for text in texts])})
    elif not said:
        raise wrong(here, said, "at least one block")


def _user_block(
    messages: list[dict[str, Any]], turn: dict[str, Any], block: dict[str, Any], where: str
) -> None:
    match block.get("type"):
        case "text":
            turn["texts"].append(string(block, "text", where))
        case "tool_result":
            told = parts(block.get("content") or [], f"{where}.content", ("text",))
            if block.get("is_error") is True:  # chats have no other way to say so
                told = [{"type": "text", "text": "Error:"}, *told]
            call_id = _named(block, "tool_use_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content(told)})
        case kind:
            raise unsupported(f"{where}.type", kind, "this model reads blocks of type text and tool_result")


def _assistant_block(turn: dict[str, Any], block: dict[str, Any], where: str) -> None:
    match block.get("type"):
        case "text":
            turn["texts"].append(string(block, "text", where))
        case "thinking":
            turn["reasoning"] = turn.get("reasoning", "") + string(block, "thinking", where)
        case "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise wrong(f"{where}.input", given, "an object")
            function = {
                "name": _named(block, "name", where),
                "arguments": json.dumps(given, ensure_ascii=False),
            }
            call = {"id": _named(block, "id", where), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        case "redacted_thinking":  # of another server, which alone can read it
            _named(block, "data", where)
        case kind:
            allowed = "an assistant's blocks are of type text, thinking, redacted_thinking and tool_use"
            raise unsupported(f"{where}.type", kind, allowed)


def _named(block: dict[str, Any], name: str, where: str) -> str:
    """The string ``block[name]``, which must not be empty."""
    if not (value := string(block, name, where)):
        raise wrong(f"{where}.{name}", value, "a string that is not empty")
    return value


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in (None, "custom"):
        raise unsupported(f"{where}.type", tool["type"], "only tools of type 'custom' are known here")
    if not isinstance(tool.get("input_schema"), dict):
        raise wrong(f"{where}.input_schema", tool.get("input_schema"), "a JSON schema")
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {"type": "function", "function": {new: tool[old] for old, new in names.items() if old in tool}}


def _tool_choice(choice: Any) -> dict[str, Any]:
    if choice is None:
        return {}
    if not isinstance(choice, dict):
        raise wrong("tool_choice", choice, "an object with a type")
    modes: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    kind = choice.get("type")
    if kind == "tool":
        modes["tool"] = {"type": "function", "function": {"name": string(choice, "name", "tool_choice")}}
    if not isinstance(kind, str) or kind not in modes:
        raise wrong("tool_choice.type", kind, "auto, any, tool or none")
    alone = choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise wrong("tool_choice.disable_parallel_tool_use", alone, "true or false")
    return {"tool_choice": modes[kind], "parallel_tool_calls": not alone}


def _output(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("output_config", value, "an object")
    chat: dict[str, Any] = {}
    if (effort := value.get("effort")) is not None:
        chat["reasoning_effort"] = "xhigh" if effort == "max" else effort
    if (form := value.get("format")) is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise wrong("output_config.format", form, "an object of type json_schema")
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    return chat


def _thinking(body: dict[str, Any], kwargs: Any) -> dict[str, Any]:
    """Templates of models that reason read ``enable_thinking`` or an effort."""
    thinking = body.get("thinking")
    if thinking is None:
        return {}
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise wrong("thinking", thinking, "an object of type enabled, disabled or adaptive")
    for name in thinking:
        if name not in ("type", "budget_tokens") and thinking[name] is not None:
            raise unsupported(f"thinking.{name}", thinking[name], "leave it out")
    if kind == "adaptive":
        return {}
    if not isinstance(kwargs, dict | None):
        raise wrong("chat_template_kwargs", kwargs, "an object")
    asked: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": kind == "enabled", **(kwargs or {})}}
    if kind == "disabled":
        return {**asked, "include_reasoning": False}
    budget, most = thinking.get("budget_tokens"), body.get("max_tokens")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise wrong("thinking.budget_tokens", budget, "a whole number, at least 1")
    if isinstance(most, int) and budget >= most:
        raise InvalidRequest(
            f"thinking.budget_tokens is {budget}: it must be less than max_tokens, {most}",
            param="thinking.budget_tokens",
        )
    if (body.get("output_config") or {}).get("effort") is None:
        level = "low" if budget <= _LOW_BUDGET else "medium" if budget <= _MEDIUM_BUDGET else "high"
        asked["reasoning_effort"] = level
    return asked


MESSAGES = Dialect(
    fields=frozenset([*_SAME, *EXTENSIONS, *_FIELDS, *_OFF]),
    chat=chat_of_messages,
    renamed=(
        ("stop", "stop_sequences"),
        (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
        (r"tools\[(\d+)\]\.function", r"tools[\1]"),
        (r"tool_choice\.function", "tool_choice"),
        (r"response_format\.json_schema|response_format", "output_config.format"),
        ("reasoning_effort", "output_config.effort"),
        ("prompt", "messages"),
    ),
)
