"""Values of JSON and of Python's literals, read piece by piece, written as JSON."""

from __future__ import annotations

import json
import math
import re

_SPACE = re.compile(r"[ \t\r\n]*")
_RUN = {quote: re.compile(rf"[^{quote}\"\\\x00-\x1f]+") for quote in "\"'"}
_ATOM = re.compile(r"[-+.\w]+")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBER_START = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?((?<=[0-9])[eE][-+]?[0-9]*)?)?$")
_PYTHON_NUMBER = re.compile(r"[-+]?([0-9][0-9_]{0,4000}(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSED_BY = {"{": "}", "[": "]", "(": "]"}
_CLOSES = {"}": "}", "]": "]", ")": "]"}
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {"'": "'", "a": "\a", "v": "\v", "\n": ""}
_HEX_ESCAPES = {"u": 4, "x": 2, "U": 8}  # and how many digits follow


class ValueScanner:
    """One value: an object, list, tuple, string, number, true, false, null, or Python's words for these.

    What ``feed`` returns, joined, is that value as JSON; text that is JSON already comes out as it is.
    Control characters and unknown escapes in strings, which models write and JSON has not, are escaped.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._stack: list[str] = []  # closing brackets that are owed
        self._expects = "value"  # value, key, colon, comma; string or escape or atom inside of one
        self._opened = False  # nothing since the last bracket
        self._held: list[str] = []  # a comma and the space after it: Python allows one before a bracket
        self._quote = ""
        self._is_key = False
        self._part: list[str] = []  # of an escape or an atom

    def feed(self, text: str, start: int = 0) -> tuple[str, int]:
        """JSON for ``text`` from ``start`` on, and where it stopped: at the end, behind the value, or at what
        cannot follow.
        """
        out: list[str] = []
        place = start
        while place < len(text) and not self.done and not self.failed:
            match self._expects:
                case "string":
                    place = self._string(text, place, out)
                case "escape":
                    place = self._escape(text, place, out)
                case "atom":
                    place = self._atom(text, place, out)
                case _:
                    place = self._structure(text, place, out)
        return "".join(out), place

    def end(self) -> str:
        """No more text comes: a number or word that stands alone is whole now."""
        out: list[str] = []
        if self._expects == "atom" and not self._stack:
            self._end_atom(out)
        self.failed = not self.done
        return "".join(out)

    @property
    def unread(self) -> str:
        """What was read and is not written yet."""
        escape = "\\" if self._expects == "escape" else ""
        return "".join([*self._held, escape, *self._part])

    @property
    def unread_is_json(self) -> bool:
        """Whether ``unread`` may begin what is written next."""
        return self._expects != "atom" or begins_json("".join(self._part))

    def _structure(self, text: str, place: int, out: list[str]) -> int:
        after = _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it may be empty
        if after > place:
            if self._stack:
                (self._held if self._held else out).append(text[place:after])
            return after
        char = text[place]
        if char in _CLOSES and (self._opened or self._expects == "comma" or self._held):
            if not self._stack or self._stack[-1] != _CLOSES[char] or self._expects == "colon":
                self.failed = True
                return place
            self._held.clear()
            self._opened = False
            out.append(self._stack.pop())
            self._end_value()
            return place + 1
        if self._expects == "comma" and char == ",":
            self._held.append(",")
            self._expects = "key" if self._stack[-1] == "}" else "value"
            return place + 1
        if self._expects == "colon" and char == ":":
            out.append(":")
            self._expects = "value"
            return place + 1
        if self._expects in ("comma", "colon"):
            self.failed = True
            return place
        return self._begin(char, place, out)

    def _begin(self, char: str, place: int, out: list[str]) -> int:
        """A value or a key."""
        is_key = self._expects == "key"
        if char in "\"'":
            self._quote, self._is_key, self._expects = char, is_key, "string"
            char = '"'
        elif char in _CLOSED_BY and not is_key:
            self._stack.append(_CLOSED_BY[char])
            self._expects = "key" if char == "{" else "value"
            char = "{" if char == "{" else "["
        elif _ATOM.match(char) and not is_key:
            self._expects = "atom"
        else:
            self.failed = True
            return place
        out += self._held
        self._held.clear()
        self._opened = char in "{[" and self._expects != "atom"
        if self._expects == "atom":
            return place
        out.append(char)
        return place + 1

    def _string(self, text: str, place: int, out: list[str]) -> int:
        if run := _RUN[self._quote].match(text, place):
            out.append(run.group())
            return run.end()
        char = text[place]
        if char == self._quote:
            out.append('"')
            if self._is_key:
                self._expects = "colon"
            else:
                self._end_value()
        elif char == "\\":
            self._expects = "escape"
        else:  # a double quote within single ones, or a control character
            out.append(json.dumps(char)[1:-1])
        return place + 1

    def _escape(self, text: str, place: int, out: list[str]) -> int:
        char = text[place]
        if not self._part:
            if char in _HEX_ESCAPES:
                self._part.append(char)
                return place + 1
            if char in _JSON_ESCAPES:
                out.append("\\" + char)
            elif char in _PYTHON_ESCAPES:
                out.append(json.dumps(_PYTHON_ESCAPES[char])[1:-1])
            else:
                out.append(json.dumps("\\" + char, ensure_ascii=False)[1:-1])
            self._expects = "string"
            return place + 1
        if char not in "0123456789abcdefABCDEF":
            self.failed = True
            return place
        self._part.append(char)
        kind, *digits = self._part
        if len(digits) == _HEX_ESCAPES[kind]:
            code = int("".join(digits), 16)
            if code > 0x10FFFF:
                self.failed = True
                return place
            out.append("\\u" + "".join(digits) if kind == "u" else json.dumps(chr(code))[1:-1])
            self._part.clear()
            self._expects = "string"
        return place + 1

    def _atom(self, text: str, place: int, out: list[str]) -> int:
        if run := _ATOM.match(text, place):
            self._part.append(run.group())
            return run.end()
        self._end_atom(out)
        return place

    def _end_atom(self, out: list[str]) -> None:
        atom = "".join(self._part)
        if written := _WORDS.get(atom) or _number(atom):
            out.append(written)
            self._part.clear()
            self._end_value()
        else:
            self.failed = True

    def _end_value(self) -> None:
        self._expects = "comma"
        self.done = not self._stack


def as_json(text: str) -> str | None:
    """``text`` as JSON when it is one value and nothing else."""
    scanner = ValueScanner()
    written, place = scanner.feed(text.strip())
    written += scanner.end() if not scanner.done else ""
    return written if scanner.done and place == len(text.strip()) else None


def json_so_far(text: str) -> str:
    """JSON of the beginning of a value; of what cannot be one, a string's beginning."""
    scanner = ValueScanner()
    written, _ = scanner.feed(text.strip())
    if scanner.failed:
        return json.dumps(text, ensure_ascii=False)[:-1]
    return written + scanner.unread if scanner.unread_is_json else written


def begins_json(atom: str) -> bool:
    """Whether a number or word of JSON may begin like this."""
    return any(one.startswith(atom) for one in ("true", "false", "null")) or bool(_NUMBER_START.match(atom))


def _number(atom: str) -> str | None:
    if _JSON_NUMBER.fullmatch(atom):
        return atom
    if not _PYTHON_NUMBER.fullmatch(atom):
        return None
    try:
        value: float = int(atom)
    except ValueError:
        value = float(atom)
    return json.dumps(value) if math.isfinite(value) else None
