"""Read a model's output, piece by piece, into content, reasoning and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.prompt.tools.formats import Layout, ReasoningFormat, ToolFormat
from octavo.prompt.tools.reader import Literals, Reader, Steps
from octavo.prompt.tools.schema import properties, types_of
from octavo.prompt.tools.values import ValueScanner, as_json
from octavo.prompt.tools.xml_parameter import KEY, xml_value

NAME = re.compile(r"[\w.:/-]+")  # of a tool, and of a parameter in Python
_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")


class Content(msgspec.Struct, frozen=True):
    """Text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thoughts."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """Call number ``index`` begins."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments; the pieces joined are JSON once the call ends."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """A call is complete."""

    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


class OutputParser:
    """Events of one output. Joined, they are the same however the text is cut.

    Every character comes out in one event, but for the fixed text of calls and reasoning and the white space
    beside it. Calls that are no calls come out as content; where that shows only after a call has begun, the
    call stays incomplete (no ``CallEnd``) and the rest is content.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        reasoning_open: bool | None = None,
    ) -> None:
        """``schemas``: of the parameters of each tool. ``reasoning_open``: what ``ReasoningFormat.opened``
        says of the prompt.
        """
        self._tools, self._reasoning = tools, reasoning
        self._schemas = schemas or {}
        self._open = reasoning_open
        layouts = tools.layouts if tools is not None else ()
        self._bare = [layout for layout in layouts if layout.bare]
        self._marked = [layout for layout in layouts if not layout.bare]
        self._reader = Reader()
        self._events: list[Event] = []
        self._spaces: list[str] = []  # white space that belongs to a marker, if one follows
        self._calls = 0
        self._begun = False  # the call that is read
        self.completed = 0  # calls
        self.in_reasoning = False
        self._steps: Steps[None] | None = self._output()
        self._advance()

    def push(self, text: str) -> list[Event]:
        """What ``text`` adds."""
        self._reader.push(text)
        self._advance()
        return self._take()

    def finish(self) -> list[Event]:
        """What was held back, now that no more text comes."""
        self._reader.ended = True
        self._advance()
        return self._take()

    def _advance(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None

    def _take(self) -> list[Event]:
        """The events, pieces of the same text joined."""
        merged: list[Event] = []
        texts: list[str] = []
        for event in [*self._events, None]:
            last = merged[-1] if merged else None
            if isinstance(event, (Content, Reasoning, CallArguments)) and type(event) is type(last):
                texts.append(event.text)  # arguments of two calls are never neighbours: a start is between
                continue
            if last is not None and len(texts) > 1:
                merged[-1] = msgspec.structs.replace(last, text="".join(texts))
            if event is not None:
                merged.append(event)
                texts = [event.text] if isinstance(event, (Content, Reasoning, CallArguments)) else []
        self._events.clear()
        return merged

    # Text

    def _say(self, text: str, kind: type[Content] | type[Reasoning] = Content) -> None:
        """Text whose last white space waits for what follows it."""
        end = len(text.rstrip())
        if end:
            self._events.append(kind("".join([*self._spaces, text[:end]])))
            self._spaces.clear()
        if end < len(text):
            self._spaces.append(text[end:])

    def _think(self, text: str) -> None:
        self._say(text, Reasoning)

    def _output(self) -> Steps[None]:
        reader = self._reader
        if self._reasoning is not None and self._open is not False:
            yield from self._thoughts(self._reasoning)
        if not self._marked and not self._bare:
            while (yield from reader.more()):
                reader.feed(self._pass_on)
        else:
            yield from self._answer()
        if self._spaces:
            self._events.append(Content("".join(self._spaces)))

    def _pass_on(self, text: str, start: int) -> int:
        self._events.append(Content("".join([*self._spaces, text[start:]])))
        self._spaces.clear()
        return len(text)

    def _thoughts(self, form: ReasoningFormat) -> Steps[None]:
        reader = self._reader
        self.in_reasoning = opened = bool(self._open)
        reader.mark()
        yield from reader.space()
        for text in form.opens:
            opened = (yield from reader.literal(text)) or opened
        if not opened:
            self._say(reader.taken())
            reader.unmark()
            return
        reader.unmark()
        self.in_reasoning = True
        yield from reader.space()
        close = yield from reader.until(Literals(form.closes), self._think)
        self.in_reasoning = False
        if not close:
            if self._spaces:
                self._events.append(Reasoning("".join(self._spaces)))
            self._spaces.clear()
            return
        self._spaces.clear()
        yield from reader.literal(close)
        yield from reader.space()

    def _answer(self) -> Steps[None]:
        reader = self._reader
        if self._bare:
            reader.mark()
            yield from reader.space()
            self._say(reader.taken())
            yield from self._block(self._bare)
        if not self._marked:
            while (yield from reader.more()):
                reader.feed(self._pass_on)
            return
        triggers = Literals(tuple({layout.trigger for layout in self._marked}))
        while trigger := (yield from reader.until(triggers, self._say)):
            yield from self._block([layout for layout in self._marked if layout.trigger == trigger])

    # Calls

    def _block(self, layouts: list[Layout]) -> Steps[None]:
        """Calls in the first of ``layouts`` that fits, else content."""
        before = self._calls
        self._reader.mark()
        for layout in layouts:
            self._reader.rewind()
            yield from self._layout(layout)
            if self._calls > before:
                return
        self._say(self._reader.taken())
        self._reader.unmark()

    def _layout(self, layout: Layout) -> Steps[None]:
        reader = self._reader
        before = self._calls
        separator = layout.separator.strip()
        more = (yield from reader.fixed(layout.marker)) and (yield from reader.fixed(layout.open))
        while more and (yield from reader.fixed(layout.before)):
            self._begun = False
            if not (yield from self._call(layout)):
                if self._calls > before:
                    truncated = self._begun and (yield from reader.peek()) == ""
                    self._say("" if truncated else reader.taken().lstrip())
                    reader.unmark()
                return
            yield from reader.fixed(layout.end, cut=True)
            reader.mark()  # what comes is another call, or content
            yield from reader.space()
            more = (yield from reader.literal(separator)) if separator else bool(layout.marker)
            if separator and not more and layout.kind == "json":  # models leave it out before an object
                more = (yield from reader.peek()) == "{"
        if self._calls > before:
            reader.unmark()
            yield from reader.fixed(layout.close, cut=True)
            yield from reader.space()

    def _call(self, layout: Layout) -> Steps[bool]:
        """One call. False where it is none, or none any more; ``_begun`` tells."""
        match layout.kind:
            case "json":
                return (yield from self._json(layout))
            case "named":
                return (yield from self._named(layout))
            case "xml":
                return (yield from self._xml())
            case _:
                return (yield from self._python(layout))

    def _begin(self, name: str, layout: Layout | None = None, given_id: str = "") -> bool:
        if layout is not None and layout.bare and name not in self._schemas:
            return False
        assert self._tools is not None
        self._spaces.clear()
        self._reader.unmark()
        self._events.append(CallStart(self._calls, given_id or self._tools.new_id(), name))
        self._calls += 1
        self._begun = True
        return True

    def _end(self) -> None:
        self._events.append(CallEnd(self._calls - 1))
        self.completed += 1

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._calls - 1, text))

    def _value(self, out: list[str] | None = None) -> Steps[bool]:
        """Read a value; its JSON goes to ``out``, else to the call's arguments."""
        scanner = ValueScanner()

        def take(text: str, start: int) -> int:
            written, place = scanner.feed(text, start)
            self._argue(written) if out is None else out.append(written)
            return place

        while not scanner.done and not scanner.failed and (yield from self._reader.more()):
            self._reader.feed(take)
        if scanner.failed:  # what was held back for what might follow is content then
            self._say(scanner.unread if out is None else "")
        elif not scanner.done and out is None and scanner.unread_is_json:
            self._argue(scanner.unread)
        return scanner.done

    def _json(self, layout: Layout) -> Steps[bool]:
        reader = self._reader
        name, early, argued, key = "", "", False, ""
        if not (yield from reader.fixed("{")):
            return False
        while True:
            yield from reader.space()
            if (yield from reader.peek()) == "}" and not key:
                break
            if (yield from reader.peek()) not in ("'", '"'):
                return False
            out: list[str] = []
            if not (yield from self._value(out)):
                return False
            key = json.loads("".join(out))
            if (layout.bare and key not in _CALL_KEYS) or not (yield from reader.fixed(":")):
                return False
            yield from reader.space()
            if key in ("arguments", "parameters"):
                if argued or early:
                    return False
                if name and (yield from reader.peek()) == "{":
                    argued = True
                    if not self._begin(name, layout) or not (yield from self._value()):
                        return False
                    self._end()
                    reader.mark()
                elif not (early := (yield from self._held_object())):
                    return False
            else:
                out = []
                if not (yield from self._value(out)):
                    return False
                if key == "name":
                    named = json.loads("".join(out))
                    if name or not isinstance(named, str) or not NAME.fullmatch(named):
                        return False
                    name = named
                    if layout.bare and name not in self._schemas:
                        return False
            yield from reader.space()
            if not (yield from reader.literal(",")):
                break
        if not (yield from reader.literal("}")) or not name or (layout.bare and not argued and not early):
            return False
        if not argued:
            self._begin(name, layout)
            self._argue(early or "{}")
            self._end()
        return True

    def _held_object(self) -> Steps[str]:
        """The JSON of an object of arguments, or of one written as a string, as Granite 4 does; empty where
        anything else stands.
        """
        first = yield from self._reader.peek()
        out: list[str] = []
        if first not in ("{", '"') or not (yield from self._value(out)):
            return ""
        if first == "{":
            return "".join(out)
        held = as_json(json.loads("".join(out))) or ""
        return held if held.startswith("{") else ""

    def _named(self, layout: Layout) -> Steps[bool]:
        reader = self._reader
        yield from reader.space()
        name = yield from reader.run(NAME)
        given_id = ""
        if layout.call_id and (yield from reader.fixed(layout.call_id)):
            given_id = yield from reader.run(NAME)
        if not name or not (yield from reader.fixed(layout.after)):
            return False
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return False
        self._begin(name, layout, given_id)
        if not (yield from self._value()):
            return False
        self._end()
        return True

    def _xml(self) -> Steps[bool]:
        reader = self._reader
        if not (yield from reader.fixed("<function=")):
            return False
        name = yield from reader.run(NAME)
        if not name or not (yield from reader.literal(">")):
            return False
        self._begin(name)
        root = self._schemas.get(name, {})
        known = properties(root)
        left = set(known)
        written = "{"
        reader.mark()
        while not (yield from reader.fixed("</function>")):
            self._argue(written)
            yield from reader.space()
            if not (yield from reader.literal("<parameter=")):
                return False
            key = yield from reader.run(KEY)
            if not key or not (yield from reader.literal(">")):
                return False
            self._argue(f"{', ' if written == '' else ''}{json.dumps(key, ensure_ascii=False)}: ")
            left.discard(key)
            reader.unmark()
            if not (yield from xml_value(reader, types_of(known.get(key), root), left, self._argue)):
                return False
            written = ""
            reader.mark()
        self._argue(written + "}")
        self._end()
        return True

    def _python(self, layout: Layout) -> Steps[bool]:
        reader = self._reader
        yield from reader.space()
        name = yield from reader.run(NAME)
        if not name or not (yield from reader.literal("(")) or not self._begin(name, layout):
            return False
        self._argue("{")
        first = True
        while True:
            reader.mark()
            yield from reader.space()
            if (yield from reader.literal(")")):
                self._argue("}")
                self._end()
                return True
            key = yield from reader.run(NAME)
            if not key or not (yield from reader.fixed("=")):
                return False
            yield from reader.space()
            self._argue(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            first = False
            reader.unmark()
            if not (yield from self._value()):
                return False
            yield from reader.space()
            if not (yield from reader.literal(",")) and (yield from reader.peek()) != ")":
                return False
