"""What the assistant says in one choice: content, reasoning and tool calls, whole or in deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.prompt.tools.parser import CallArguments, CallStart, Content, Event, Reasoning


def delta_of(events: Sequence[Event], functions: bool = False) -> dict[str, Any]:
    """The ``delta`` of a chunk: all that is new, in OpenAI's form (its first one for calls, with
    ``functions``); empty when nothing is.
    """
    turn = Turn()
    turn.add(events)
    delta: dict[str, Any] = {"content": text} if (text := "".join(turn.content)) else {}
    if text := "".join(turn.reasoning):
        delta |= {"reasoning": text, "reasoning_content": text}
    if turn.calls and functions:
        delta["function_call"] = turn.function_call()
    elif turn.calls:
        delta["tool_calls"] = [{"index": index, **_shown(call)} for index, call in turn.calls.items()]
    return delta


class Turn:
    """Events put together."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, tuple[CallStart | None, list[str]]] = {}  # by index; arguments in pieces

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Content():
                    self.content.append(event.text)
                case Reasoning():
                    self.reasoning.append(event.text)
                case CallStart():
                    self.calls[event.index] = (event, [])
                case CallArguments():
                    self.calls.setdefault(event.index, (None, []))[1].append(event.text)

    def function_call(self) -> dict[str, Any]:
        """The one call, or what is new of it, in OpenAI's first form."""
        function: dict[str, Any] = _shown(next(iter(self.calls.values())))["function"]
        return function

    def message(self, reasons: bool, forced: bool, functions: bool = False) -> dict[str, Any]:
        """The whole message; ``reasons``: reasoning is told from the content. Where none is beside calls,
        content is null, as OpenAI has it; beside ``forced`` calls it is empty, as vLLM has it.
        """
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or forced or not (self.calls or self.reasoning) else None,
            "refusal": None,
        }
        if reasons:
            text = "".join(self.reasoning) or None
            message |= {"reasoning": text, "reasoning_content": text}
        if self.calls and functions:
            message["function_call"] = self.function_call()
        elif self.calls:
            message["tool_calls"] = [_shown(call) for call in self.calls.values()]
        return message


def _shown(call: tuple[CallStart | None, list[str]]) -> dict[str, Any]:
    """A call, or what is new of one that began before."""
    start, arguments = call
    function = {"arguments": "".join(arguments)}
    if start is None:
        return {"function": function}
    return {"id": start.id, "type": "function", "function": {"name": start.name, **function}}
