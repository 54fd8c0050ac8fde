"""``response`` objects and the typed events of their streams. One machine makes both."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from octavo.api.generation import Delta, Generation
from octavo.api.logprobs import chat_logprobs
from octavo.api.requests import ParsedRequest
from octavo.errors import OctavoError
from octavo.prompt.responses import LOGPROBS
from octavo.prompt.tools.parser import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

Events = Iterator[dict[str, Any]]
_ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
    "safety_identifier", "user",
)  # fmt: skip


class ResponseAnswer:
    """One response. ``response`` is the object as it stands; ``output`` its items so far."""

    def __init__(
        self, parsed: ParsedRequest, body: dict[str, Any], response_id: str, background: bool
    ) -> None:
        self._parsed = parsed
        self._wants_logprobs = LOGPROBS in (body.get("include") or ())
        self._number = 0  # of the next event
        self._item: dict[str, Any] | None = None  # the one that is open
        self._text: list[str] = []  # of the open item
        self._held: list[dict[str, Any]] = []  # log probabilities of tokens that no text was seen of yet
        self._finish_reason: str | None = None
        self.output: list[dict[str, Any]] = []
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued" if background else "in_progress",
            "background": background,
            "error": None,
            "incomplete_details": None,
            "model": parsed.model,
            "output": self.output,
            "usage": None,
            **{name: body.get(name) for name in _ECHOED},
            **_settings(parsed, body),
        }

    # Events

    def first(self) -> Events:
        self.response["status"] = "in_progress"
        yield self._event("created", response=self.response)
        yield self._event("in_progress", response=self.response)

    def events(self, delta: Delta) -> Events:
        """The events of what is new, token by token where log probabilities go with the text."""
        logprobs = self._logprobs(delta)
        if delta.events is None:
            self._held += logprobs
            yield from self._take(Content(delta.text)) if delta.text else ()
        else:
            begin = 0
            for entry, end in zip(logprobs, delta.event_ends, strict=False):
                in_message = self._item["type"] == "message" if self._item is not None else not self.output
                if end > begin or in_message:
                    self._held.append(entry)  # else it is of a marker
                for event in delta.events[begin:end]:
                    yield from self._take(event)
                begin = end
            for event in delta.events[begin:]:
                yield from self._take(event)
        self._finish_reason = delta.finish_reason or self._finish_reason

    def last(self, generation: Generation) -> Events:
        if self._item is None and not self.output:
            yield from self._open(_message())
        cut = self._finish_reason in ("length", "abort")
        yield from self._close("incomplete" if cut else "completed")
        usage = generation.usage()
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        if self._finish_reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif not cut:
            self.response["completed_at"] = int(time.time())
        self.response["status"] = "incomplete" if cut else "completed"
        yield self._event(self.response["status"], response=self.response)

    def failed(self, error: OctavoError) -> dict[str, Any]:
        self._cut()
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._event("failed", response=self.response)

    def cancelled(self) -> None:
        """The client wants no more of it."""
        self._cut()
        self.response["status"] = "cancelled"

    def _cut(self) -> None:
        """What was said stays, the open item as incomplete; no event tells of its end."""
        number = self._number
        for _ in self._close("incomplete"):
            pass
        self._number = number

    def whole(self) -> dict[str, Any]:
        return self.response

    # Items

    def _take(self, event: Event) -> Events:
        match event:
            case Content():
                if self._item is None or self._item["type"] != "message":
                    yield from self._open(_message())
                yield from self._say(event.text, "output_text", {"logprobs": self._take_held()})
            case Reasoning():
                self._held.clear()
                if self._item is None or self._item["type"] != "reasoning":
                    yield from self._open(_reasoning())
                yield from self._say(event.text, "reasoning_text", {})
            case CallStart():
                self._held.clear()
                yield from self._open(_call(event))
            case CallArguments():
                self._held.clear()
                self._text.append(event.text)
                yield self._event("function_call_arguments.delta", **self._place(), delta=event.text)
            case CallEnd():
                yield from self._close("completed", called=True)

    def _open(self, item: dict[str, Any]) -> Events:
        yield from self._close("completed")
        self._item = item
        self._text.clear()
        self.output.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield self._event("output_item.added", output_index=len(self.output) - 1, item=shown)
        if "content" in item:
            yield self._event("content_part.added", **self._place(0), part=dict(item["content"][0]))

    def _say(self, text: str, kind: str, more: dict[str, Any]) -> Events:
        assert self._item is not None
        self._text.append(text)
        if self._wants_logprobs and "logprobs" in more:
            self._item["content"][0]["logprobs"] += more["logprobs"]
        yield self._event(f"{kind}.delta", **self._place(0), delta=text, **more)

    def _close(self, status: str, called: bool = False) -> Events:
        """End the open item, if any. ``called``: a call came to its own end; else it stays incomplete."""
        item = self._item
        if item is None:
            return
        if item["type"] == "message" and self._held:  # of tokens without text, such as the one that ends it
            yield from self._say("", "output_text", {"logprobs": self._take_held()})
        whole, item["status"] = "".join(self._text), status
        if item["type"] == "function_call":
            item["arguments"] = whole
            item["status"] = status if called else "incomplete"
            shown = {**self._place(), "name": item["name"], "arguments": whole}
            yield self._event("function_call_arguments.done", **shown)
        else:
            part = item["content"][0]
            part["text"] = whole
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._event(f"{part['type']}.done", **self._place(0), text=whole, **more)
            yield self._event("content_part.done", **self._place(0), part=part)
        yield self._event("output_item.done", output_index=len(self.output) - 1, item=item)
        self._item = None

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.output) - 1}
        return place if content_index is None else {**place, "content_index": content_index}

    def _event(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    # Log probabilities

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if delta.logprobs is None or not self._wants_logprobs:
            return []
        parsed = self._parsed
        entries = chat_logprobs(parsed.renderer, delta.token_ids, delta.logprobs, parsed.tokens_as_ids)
        return list(entries["content"])

    def _take_held(self) -> list[dict[str, Any]]:
        held, self._held = self._held, []
        return held


def _name(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _message() -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "id": _name("msg"),
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [part],
    }


def _reasoning() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    return {
        "id": _name("rs"),
        "type": "reasoning",
        "summary": [],
        "status": "in_progress",
        "content": [part],
    }


def _call(start: CallStart) -> dict[str, Any]:
    return {
        "id": _name("fc"),
        "type": "function_call",
        "call_id": start.id,
        "name": start.name,
        "arguments": "",
        "status": "in_progress",
    }


def _settings(parsed: ParsedRequest, body: dict[str, Any]) -> dict[str, Any]:
    """What the response was made with, defaults filled in."""
    text = body.get("text") or {}
    reasoning = body.get("reasoning") or {}
    return {
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": body.get("store") is not False,
        "temperature": parsed.sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": parsed.sampling.top_p,
        "truncation": "disabled",
    }
