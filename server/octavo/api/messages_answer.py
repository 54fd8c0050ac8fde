"""Anthropic's ``message`` objects and the events of their streams. One machine makes both."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from octavo.api.generation import Delta, Generation
from octavo.api.requests import ParsedRequest
from octavo.errors import OctavoError, error_body
from octavo.prompt.tools.parser import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

Events = Iterator[dict[str, Any]]
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn", "stop": "end_turn"}


class MessageAnswer:
    """One message. ``message`` is the object as it stands."""

    def __init__(self, parsed: ParsedRequest, path: str) -> None:
        """``path``: of the request, whose errors have a form of their own."""
        self._parsed, self._path = parsed, path
        self._open: dict[str, Any] | None = None  # the block that is written
        self._text: list[str] = []
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": parsed.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # How much of it the cache holds shows only when the engine has begun.
            "usage": {"input_tokens": sum(map(len, parsed.prompts)), "output_tokens": 0},
        }

    def first(self) -> Events:
        yield {"type": "message_start", "message": self.message}
        yield {"type": "ping"}

    def events(self, delta: Delta) -> Events:
        for event in [Content(delta.text)] if delta.events is None else delta.events:
            yield from self._take(event)
        if delta.finish_reason is not None:
            self.message["stop_reason"] = _REASONS[delta.finish_reason]
            if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
                self.message |= {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}

    def last(self, generation: Generation) -> Events:
        yield from self._close()
        usage = generation.usage()
        cached = generation.cached_tokens
        self.message["usage"] = {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,  # what is cached costs nothing more
            "output_tokens": usage["completion_tokens"],
        }
        end = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": end, "usage": self.message["usage"]}
        yield {"type": "message_stop"}

    def failed(self, error: OctavoError) -> dict[str, Any]:
        return error_body(error, self._path)

    def whole(self) -> dict[str, Any]:
        return self.message

    def _take(self, event: Event) -> Events:
        match event:
            case Content():
                if event.text:
                    yield from self._begin({"type": "text", "text": ""})
                    yield self._more("text_delta", "text", event.text)
            case Reasoning():
                if self._parsed.include_reasoning:
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                    yield self._more("thinking_delta", "thinking", event.text)
            case CallStart():
                yield from self._close()
                yield from self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            case CallArguments():
                yield self._more("input_json_delta", "partial_json", event.text)
            case CallEnd():
                yield from self._close()

    def _begin(self, block: dict[str, Any]) -> Events:
        """Open a block, unless one of its type is open."""
        if self._open is not None and self._open["type"] == block["type"]:
            return
        yield from self._close()
        self._open = block
        self._text.clear()
        self.message["content"].append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _more(self, kind: str, name: str, text: str) -> dict[str, Any]:
        self._text.append(text)
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}

    def _close(self) -> Events:
        if self._open is None:
            return
        kind, text = self._open["type"], "".join(self._text)
        if kind == "tool_use":
            self._open["input"] = _so_far(text)
        else:
            self._open[kind] = text
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1


def _so_far(arguments: str) -> dict[str, Any]:
    """The arguments of a call; none of one that was cut."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
