"""The formats that models write tool calls and reasoning in, described once.

A description is the text as the model writes it. The parser reads it with any white space between its parts;
the grammar for structured output writes it exactly.
"""

# ruff: noqa: RUF001  DeepSeek spells its markers with these characters.
from __future__ import annotations

import dataclasses
import secrets
import string
from typing import Literal

Kind = Literal["json", "named", "xml", "python"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One way of writing calls: ``marker open (before call end) (separator before call end)* close``.

    ``kind`` says how one call is spelt:
    - json: an object of ``name`` and ``arguments`` (``arguments_key``, or ``parameters``, in any order);
    - named: the name, ``after``, and the object of arguments; between name and ``after`` may stand an id that
      the model gives, behind ``call_id``;
    - xml: ``<function=NAME> <parameter=KEY> VALUE </parameter> ... </function>``;
    - python: ``NAME(KEY=LITERAL, ...)``.

    ``bare``: there is no marker, so only an answer that begins like this counts, and only with the name of a
    tool. ``hint``: a text in the chat template of models that write this layout.
    """

    kind: Kind
    marker: str = ""
    open: str = ""
    before: str = ""
    after: str = ""
    end: str = ""
    separator: str = ""
    close: str = ""
    arguments_key: str = "arguments"
    call_id: str = ""
    bare: bool = False
    hint: str = ""

    @property
    def trigger(self) -> str:
        """The text by which the parser knows that calls begin; only what is ``bare`` has none."""
        marker = self.marker or self.before
        return marker.split()[0] if marker else "<function="


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """A format by name. ``layouts`` in the order in which they are tried. ``id_length``: of a call's id where
    the chat template takes no other.
    """

    name: str
    layouts: tuple[Layout, ...]
    markers: tuple[str, ...]  # each may be a special token of the tokenizer
    id_length: int | None = None

    def layout_for(self, template: str) -> Layout:
        """The layout that the model of this chat template writes."""
        hinted = [layout for layout in self.layouts if layout.hint and layout.hint in template]
        return (hinted or [layout for layout in self.layouts if not layout.hint])[0]

    def new_id(self) -> str:
        """An id for a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning stands at the start of the output, between one of ``opens`` and one of ``closes``.
    ``implicit``: the model may leave out the opening.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    implicit: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opens + self.closes

    def opened(self, prompt: str) -> bool | None:
        """What the prompt's end says: true, reasoning goes on; false, it is over; None, the output says."""
        end = prompt.rstrip()
        if end.endswith(self.opens):
            return True
        if end.endswith(self.closes):
            return False
        return True if self.implicit else None


_HERMES = Layout(kind="json", before="<tool_call>\n", end="\n</tool_call>", separator="\n")
_XML = Layout(kind="xml", before="<tool_call>\n", end="\n</tool_call>", separator="\n")
_LLAMA = Layout(kind="json", arguments_key="parameters", separator="; ")
_LIST = Layout(kind="json", open="[", separator=", ", close="]", bare=True)
_PYTHON = Layout(kind="python", open="[", separator=", ", close="]", bare=True)
_NAMED = Layout(kind="named", before="[TOOL_CALLS]", after="[ARGS]", call_id="[CALL_ID]", hint="[ARGS]")
_DEEPSEEK = Layout(
    kind="named", marker="<｜tool▁calls▁begin｜>", before="<｜tool▁call▁begin｜>", after="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>", close="<｜tool▁calls▁end｜>",
)  # fmt: skip
_replace = dataclasses.replace

TOOL_FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", (_HERMES,), ("<tool_call>", "</tool_call>")),
        ToolFormat(
            "llama3_json",
            (_replace(_LLAMA, bare=True), _replace(_LLAMA, marker="<|python_tag|>")),
            ("<|python_tag|>",),
        ),
        ToolFormat("qwen3_xml", (_XML, _replace(_XML, before="", end="")), ("<tool_call>", "</tool_call>")),
        ToolFormat(
            "mistral",
            (
                _NAMED,
                _replace(_LIST, marker="[TOOL_CALLS] ", bare=False),
                _replace(_NAMED, after="", call_id="", hint=""),
            ),
            ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            id_length=9,
        ),
        ToolFormat(
            "pythonic",
            (
                _PYTHON,
                _replace(_PYTHON, marker="<|python_start|>", close="]<|python_end|>", bare=False),
            ),
            ("<|python_start|>", "<|python_end|>"),
        ),
        ToolFormat(
            "deepseek_v3",
            (
                _replace(
                    _DEEPSEEK, before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", after="\n```json\n",
                    end="\n```<｜tool▁call▁end｜>", separator="\n", hint="```json",
                ),
                _DEEPSEEK,
            ),
            tuple(f"<｜tool▁{name}｜>" for name in
                  ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
        ),
        ToolFormat(
            "granite",
            (
                _replace(_LIST, marker="<|tool_call|>", bare=False, hint="<|tool_call|>"),
                _replace(_LIST, marker="<tool_call>", bare=False),
                _HERMES,
                _LIST,
            ),
            ("<|tool_call|>", "<tool_call>", "</tool_call>"),
        ),
    )
}  # fmt: skip
TOOL_FORMATS["qwen3_coder"] = dataclasses.replace(TOOL_FORMATS["qwen3_xml"], name="qwen3_coder")

REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("qwen3", ("<think>",), ("</think>",)),
        ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), implicit=True),
        ReasoningFormat(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),
    )
}

# A format and the texts that its models' chat templates hold, the most telling first.
_TOOL_TEMPLATES = (
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<|start_of_role|>", "<tool_call>[")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
)
_REASONING_TEMPLATES = (
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process",)),
    ("granite", ("Here's my thought process",)),
    (
        "qwen3",
        ("<｜Assistant｜>", "</think>", "thinking"),
    ),  # V3.1 says at the prompt's end whether it reasons
    ("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    ("qwen3", ("</think>",)),
)


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """The format ``name``; for ``auto`` the one whose marks the chat template holds, if any."""
    return TOOL_FORMATS.get(_picked(name, template, _TOOL_TEMPLATES))


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """As ``tool_format``."""
    return REASONING_FORMATS.get(_picked(name, template, _REASONING_TEMPLATES))


def _picked(name: str, template: str | None, table: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    if name != "auto":
        return name
    held = template or ""
    return next((one for one, marks in table if all(mark in held for mark in marks)), "none")
