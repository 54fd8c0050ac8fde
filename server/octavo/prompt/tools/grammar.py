"""Grammars, in llguidance's form of Lark, that keep a model to calls in its own format.

A marker may be a token of its own or a text that any tokens spell: the grammar takes either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.prompt.tools.definitions import Tool
from octavo.prompt.tools.formats import Layout, ReasoningFormat, ToolFormat
from octavo.prompt.tools.parser import NAME
from octavo.prompt.tools.schema import properties, types_of
from octavo.prompt.tools.xml_parameter import KEY

WHITESPACE = r"[ \n\r\t]{1,40}"  # between the parts of JSON: a small model would go on with it for ever
_TEXTS = ("TEXT: /(?s:.*)/", r"SPACE: /[ \n]{0,8}/")
ANSWER = "answer"  # where ``Unsupported`` is of the form of the answer
_RAW_STRING = (
    "enum",
    "const",
    "type",
    "description",
    "title",
    "default",
    "examples",
    "$ref",
    "anyOf",
    "oneOf",
)


class Unsupported(ValueError):
    """What a format cannot be held to; ``where`` is the place in the schema."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where, self.message = where, message


def tool_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    markers: Mapping[str, int],
    template: str = "",
    reasoning: ReasoningFormat | None = None,
    reasoning_open: bool | None = None,
    answer: bool = False,
) -> str:
    """The grammar of an output that calls ``tools`` (at least once, if ``required``; once only, unless
    ``parallel``) and holds the arguments to their schemas.

    ``markers``: those that are tokens, with their ids. ``reasoning`` may come first, as
    ``ReasoningFormat.opened`` says. Where no call is required, arguments of tools that are not strict may be
    any object. ``answer``: in place of calls comes what the grammar named answer says, not any text. Raises
    ``Unsupported``.
    """
    writer = _Writer(form.layout_for(template), markers, required)
    calls = [writer.call(index, tool) for index, tool in enumerate(tools)]
    return "\n".join(
        [
            *_reasoning(writer, reasoning, reasoning_open),
            *writer.output(calls, required, parallel, answer),
            *writer.rules,
            *_TEXTS,
        ]
    )


def with_answer(lark: str, answer: str) -> str:
    """A grammar that refers to ``@answer``, and ``answer`` in llguidance's own form (a Lark, or grammars as
    JSON), as one.
    """
    inner = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**inner[0], "name": "answer"}, *inner[1:]]})


def reasoning_first(
    grammar: str, form: ReasoningFormat, opened: bool | None, markers: Mapping[str, int]
) -> str:
    """``grammar`` (in llguidance's own form) for the answer after the reasoning."""
    writer = _Writer(Layout(kind="json"), markers, True)
    lark = [*_reasoning(writer, form, opened), "output: @answer", *writer.rules, *_TEXTS]
    return with_answer("\n".join(lark), grammar)


def _reasoning(writer: _Writer, form: ReasoningFormat | None, opened: bool | None) -> list[str]:
    if form is None or opened is False:
        return ["start: output"]
    starts = " | ".join(f"({writer.fixed(text)})" for text in form.opens)
    ends = " | ".join(writer.ending(f"thought_{index}", text) for index, text in enumerate(form.closes))
    optional = "(SPACE thoughts)?" if opened is None else "thoughts"
    begins = f"({starts})" if opened is None else ""
    return [f"start: {optional} output", f"thoughts: {begins} ({ends}) SPACE"]


class _Writer:
    """Writes the rules of one layout."""

    def __init__(self, layout: Layout, markers: Mapping[str, int], required: bool) -> None:
        self.rules: list[str] = []
        self._layout = layout
        self._markers = markers
        self._required = required

    def fixed(self, text: str) -> str:
        """Rule text for ``text``; its markers may be tokens."""
        if not text:
            return ""
        split = (
            re.split("(" + "|".join(map(re.escape, self._markers)) + ")", text) if self._markers else [text]
        )
        parts = []
        for part in filter(None, split):
            quoted = json.dumps(part, ensure_ascii=False)
            parts.append(f"(<[{self._markers[part]}]> | {quoted})" if part in self._markers else quoted)
        return " ".join(parts)

    def ending(self, name: str, marker: str) -> str:
        """Rule text for any text up to and with ``marker``."""
        self.rules.append(f"{name}[lazy]: TEXT {json.dumps(marker, ensure_ascii=False)}")
        return f"TEXT <[{self._markers[marker]}]> | {name}" if marker in self._markers else name

    def output(self, calls: Iterable[str], required: bool, parallel: bool, answer: bool) -> list[str]:
        """The rules of calls, with the text before and behind them where none is required."""
        layout = self._layout
        fixed = {name: self.fixed(getattr(layout, name)) for name in ("before", "end", "separator", "close")}
        many = f"({fixed['separator']} {fixed['before']} call {fixed['end']})*" if parallel else ""
        rules = [f"call: {' | '.join(calls)}"]
        whole = f"{fixed['before']} call {fixed['end']} {many} {fixed['close']}"
        whole = f"{self.fixed(layout.marker + layout.open)} {whole}"
        if answer and layout.bare:
            raise Unsupported(ANSWER, "calls and answers look alike in this model's tool format")
        if answer:
            return [*rules, f"output: {whole} | @answer"]
        if required:
            return [*rules, f"output: {whole}"]
        if layout.bare:  # an answer that begins like a call is one
            first = re.escape((layout.open or "{")[0])
            return [*rules, f"output: {whole} | OTHER", rf"OTHER: /([ \n\r\t]*[^ \n\r\t{first}](?s:.*))?/"]
        # A marker begins a call, whatever stands before it.
        trigger = layout.trigger
        rest = (layout.marker + layout.open + layout.before).removeprefix(trigger)
        head = self.ending("head", trigger)
        rules.append(
            f"called: ({head}) {self.fixed(rest)} call {fixed['end']}"
            + (f" {many} {fixed['close']}" if layout.marker else "")
        )
        return [*rules, "output: called* TEXT" if parallel else "output: called SPACE | TEXT"]

    def call(self, index: int, tool: Tool) -> str:
        """The name of the rule of one call."""
        layout, rule = self._layout, f"call_{index}"
        name = json.dumps(tool.name)
        free = not tool.strict and not self._required
        schema = {"type": "object"} if free and layout.kind in ("json", "named") else tool.schema
        match layout.kind:
            case "json":
                start = json.dumps(f'{{"name": {name}, "{layout.arguments_key}": ')
                body = f'{start} {self._json(schema, tool)} "}}"'
            case "named":
                body = f"{name} {self.fixed(layout.after)} {self._json(schema, tool)}"
            case "xml":
                body = self._xml(rule, tool)
            case _:
                body = self._python(rule, tool)
        self.rules.append(f"{rule}: {body}")
        return rule

    def _json(self, schema: Any, tool: Tool) -> str:
        options = {
            "whitespace_pattern": WHITESPACE,
            "lenient": not tool.strict,
            "coerce_one_of": not tool.strict,
        }
        schema = {**schema, "x-guidance": options} if isinstance(schema, dict) else schema
        return f"%json {json.dumps(schema)}"

    def _part(self, schema: Any, tool: Tool) -> str:
        """A value inside of the arguments."""
        if isinstance(schema, dict):
            shared = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
            schema = {**shared, **schema}
        return self._json(schema, tool)

    def _parameters(self, tool: Tool) -> list[tuple[str, Any, bool]]:
        """Name, schema and whether it may be left out."""
        required = tool.schema.get("required")
        needed = required if isinstance(required, list) else []
        return [(key, one, key not in needed) for key, one in properties(tool.schema).items()]

    def _xml(self, rule: str, tool: Tool) -> str:
        parts = [json.dumps(f"<function={tool.name}>\n")]
        for index, (key, schema, optional) in enumerate(self._parameters(tool)):
            if not KEY.fullmatch(key):
                where = f"{tool.where}.properties.{key}"
                raise Unsupported(where, "the model's tool format has no parameters of such a name")
            begin = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
            name = f"{rule}_{index}"
            types = types_of(schema, tool.schema)
            if values := _texts(schema):
                value = "(" + " | ".join(json.dumps(one, ensure_ascii=False) for one in values) + ")"
                value += ' "\\n</parameter>\\n"'
            elif not types or "string" in types:
                _raw_string(key, schema, tool)
                self.rules.append(f'{name}[lazy]: TEXT "\\n</parameter>\\n"')
                value = name
            else:
                value = f'{self._part(schema, tool)} "\\n</parameter>\\n"'
            self.rules.append(f"{name}_p: {begin} {value}")
            parts.append(f"{name}_p{'?' if optional else ''}")
        return " ".join([*parts, '"</function>"'])

    def _python(self, rule: str, tool: Tool) -> str:
        """``rule_i`` and ``rule_i_n``: the parameters from i on, where none and where some stand before."""
        parameters = self._parameters(tool)
        for index, (key, schema, optional) in enumerate(parameters):
            if not NAME.fullmatch(key):
                where = f"{tool.where}.properties.{key}"
                raise Unsupported(where, "the model's tool format has no parameters of such a name")
            types = types_of(schema, tool.schema)
            value = {"boolean": '("True" | "False")', "null": '"None"'}.get("".join(types))
            self.rules.append(
                f"{rule}_{index}_p: {json.dumps(key + '=')} {value or self._part(schema, tool)}"
            )
            for some, comma in (("", ""), ("_n", '", " ')):
                skipped = f" | {rule}_{index + 1}{some}" if optional else ""
                self.rules.append(
                    f"{rule}_{index}{some}: {comma}{rule}_{index}_p {rule}_{index + 1}_n{skipped}"
                )
        self.rules += [f'{rule}_{len(parameters)}{some}: ""' for some in ("", "_n")]
        return f'{json.dumps(tool.name + "(")} {rule}_0 ")"'


def _texts(schema: Any) -> list[str]:
    """The strings of an enumeration of strings."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    strings = isinstance(values, list) and all(isinstance(one, str) and one for one in values)
    return values if isinstance(values, list) and strings else []


def _raw_string(key: str, schema: Any, tool: Tool) -> None:
    """Strings without quotes are any text; a strict tool that asks for more cannot be held to it."""
    more = [name for name in schema if name not in _RAW_STRING] if isinstance(schema, dict) else []
    if tool.strict and more:
        raise Unsupported(
            f"{tool.where}.properties.{key}.{more[0]}", "the model's tool format cannot hold strings to it"
        )
