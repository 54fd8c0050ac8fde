"""Read the value of a parameter in XML, which stands between its tags as it is, with nothing escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from octavo.prompt.tools.reader import Literals, Reader, Steps
from octavo.prompt.tools.schema import written_as_json
from octavo.prompt.tools.values import json_so_far

KEY = re.compile(r"[^<>\n]+")
_NEXT = "\n<parameter="
_ENDS = Literals(("\n</parameter>", "</parameter>", _NEXT))
_FOLLOW = ("<parameter=", "</function>", "</tool_call>")  # what may come after the end of a value


def xml_value(reader: Reader, types: set[str], left: set[str], argue: Callable[[str], None]) -> Steps[bool]:
    """Give the value's JSON to ``argue``: strings go out as they come, others when they are whole. False
    where the text ends first. ``types``: those that the value may have; ``left``: the parameters that may
    come after this one.
    """
    yield from reader.literal("\n")
    others = types - {"string"}
    parts: list[str] = []

    def take(text: str) -> None:
        if others:
            parts.append(text)
        else:
            argue(_within_string(text))

    if not others:
        argue('"')
    end = yield from reader.until(_ENDS, take)
    while end and not (yield from _is_end(reader, end, left)):
        take(end)
        end = yield from reader.until(_ENDS, take)
    text = "".join(parts)
    if not others:
        argue('"' if end else "")
    elif end:
        argue(written_as_json(text, others) or f'"{_within_string(text)}"')
    else:
        argue(json_so_far(text))
    return bool(end)


def _is_end(reader: Reader, end: str, left: set[str]) -> Steps[bool]:
    """Whether ``end`` ends a value and is no part of it: what follows tells. It is read over, but for the
    beginning of the next parameter, where the model forgot to close this one.
    """
    reader.mark()
    yield from reader.literal(end)
    if end == _NEXT:
        ends = (yield from reader.run(KEY)) in left and (yield from reader.literal(">"))
    else:
        yield from reader.space()
        ends = False
        for text in _FOLLOW:
            ends = ends or (yield from reader.literal(text, cut=True))
        ends = ends or (yield from reader.peek()) == ""
    reader.rewind()
    reader.unmark()
    if end != _NEXT or not ends:
        yield from reader.literal(end)
    return ends


def _within_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
