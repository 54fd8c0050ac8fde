"""Laws of reading tool calls and reasoning: however an output is cut, nothing is lost, doubled or made up."""

# ruff: noqa: RUF001  DeepSeek spells its markers with these characters.
from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_outputs import BARE_WRITERS, SCHEMAS, WRITERS, Call

from octavo.config import REASONING_PARSERS, TOOL_PARSERS
from octavo.prompt.tools.formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from octavo.prompt.tools.parser import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    OutputParser,
    Reasoning,
)


class Read:
    """An output as a client sees it in the end."""

    def __init__(self, events: list[Event], parser: OutputParser) -> None:
        self.content = "".join(event.text for event in events if isinstance(event, Content))
        self.reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        self.names = [event.name for event in events if isinstance(event, CallStart)]
        self.ids = [event.id for event in events if isinstance(event, CallStart)]
        self.arguments = [""] * len(self.names)
        for event in events:
            if isinstance(event, CallArguments):
                self.arguments[event.index] += event.text
        self.complete = [event.index for event in events if isinstance(event, CallEnd)]
        assert parser.completed == len(self.complete)

    @property
    def calls(self) -> list[Call]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]

    def shown(self) -> tuple[Any, ...]:
        return self.content, self.reasoning, self.names, self.arguments, self.complete


def read(
    form: str | None, pieces: list[str], reasoning: str | None = None, opened: bool | None = None
) -> Read:
    parser = OutputParser(
        TOOL_FORMATS[form] if form else None,
        REASONING_FORMATS[reasoning] if reasoning else None,
        schemas=SCHEMAS,
        reasoning_open=opened,
    )
    events = [event for piece in pieces for event in parser.push(piece)]
    return Read(events + parser.finish(), parser)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def cut(text: str, places: list[int]) -> list[str]:
    return [
        text[a:b] for a, b in pairwise(sorted({0, len(text), *(place % (len(text) + 1) for place in places)}))
    ]


WORDS = st.text(st.sampled_from("abz .,:\n\t\"'é😀\\/1{"), max_size=20)
PLACES = st.lists(st.integers(0, 10_000), max_size=30)
LEAVES = st.none() | st.booleans() | st.integers(-(10**6), 10**20) | st.floats(-1e9, 1e9) | WORDS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    name = draw(st.sampled_from(sorted(SCHEMAS)))
    if name != "get_weather":
        return name, {}
    fields: dict[str, st.SearchStrategy[Any]] = {
        "city": WORDS,
        "days": st.integers(-(10**9), 10**9),
        "exact": st.booleans(),
        "where": st.dictionaries(WORDS, VALUES, max_size=3),
        "tags": st.none() | st.lists(VALUES, max_size=3),
        "share": st.floats(-1e6, 1e6) | st.sampled_from(["half", "a lot"]),
    }
    keys = draw(st.lists(st.sampled_from(sorted(fields)), unique=True))
    return name, {key: draw(fields[key]) for key in keys}


FORMS = st.sampled_from([(form, writer) for form in WRITERS for writer in WRITERS[form]])
PROSE = st.text(st.sampled_from("abc .,\n(é😀"), max_size=30)


@settings(max_examples=300)
@given(form=FORMS, wanted=st.lists(calls(), min_size=1, max_size=3), before=PROSE, after=PROSE, places=PLACES)
def test_calls_come_out_as_the_model_meant_them_however_the_text_is_cut(
    form: Any, wanted: list[Call], before: str, after: str, places: list[int]
) -> None:
    name, writer = form
    text = before + writer(wanted) + after
    whole = read(name, [text])
    assert whole.calls == wanted
    assert whole.complete == list(range(len(wanted)))
    assert whole.content == before.rstrip() + after.lstrip()
    assert read(name, cut(text, places)).shown() == whole.shown()


@pytest.mark.parametrize("name", WRITERS)
def test_calls_survive_a_cut_at_any_place(name: str) -> None:
    wanted: list[Call] = [
        ("get_weather", {"city": '"x" é', "days": -12, "where": {"a": [True]}}),
        ("ping", {}),
    ]
    for writer in WRITERS[name]:
        text = f"so {writer(wanted)} then"
        for place in range(len(text)):
            seen = read(name, [text[:place], text[place:]])
            assert (seen.calls, seen.complete, seen.content) == (wanted, [0, 1], "sothen")


@settings(max_examples=100)
@given(
    form=st.sampled_from(sorted(BARE_WRITERS)), wanted=st.lists(calls(), min_size=1, max_size=3),
    before=st.text(" \n", max_size=3), after=PROSE, places=PLACES,
)  # fmt: skip
def test_an_answer_that_is_calls_without_a_marker_is_calls(
    form: str, wanted: list[Call], before: str, after: str, places: list[int]
) -> None:
    text = before + BARE_WRITERS[form](wanted) + after
    whole = read(form, [text])
    assert whole.calls == wanted
    assert whole.content == after.lstrip()
    assert read(form, cut(text, places)).shown() == whole.shown()


MARKERS = """
    <tool_call> </tool_call> <|tool_call|> <|python_tag|> <|python_start|> <|python_end|> [TOOL_CALLS] [ARGS]
    [CALL_ID] <function= </function> <parameter= </parameter> <function=f> <parameter=city> <parameter=days>
    <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>
    ```json ``` function f ping( f(a= ) [ ] { } , ; : = " ' 1 tru True "name" "arguments" "parameters" "f" {}
    x \\ \\u00e9 {"name":"f","arguments":{"a": {"name":"ping"} <think> </think> [THINK] [/THINK] \\x4
"""
OTHERS = [" ", "\n", "Here is my thought process:", "Here's my response:"]
FRAGMENTS = st.lists(st.sampled_from([*MARKERS.split(), *OTHERS]), max_size=25).map("".join)


@settings(max_examples=500)
@given(
    form=st.sampled_from([*sorted(TOOL_FORMATS), None]),
    thoughts=st.sampled_from([*sorted(REASONING_FORMATS), None]),
    opened=st.sampled_from([True, False, None]), text=FRAGMENTS, places=PLACES,
)  # fmt: skip
def test_any_text_is_read_the_same_however_it_is_cut(
    form: str | None, thoughts: str | None, opened: bool | None, text: str, places: list[int]
) -> None:
    whole = read(form, [text], thoughts, opened)
    assert read(form, cut(text, places), thoughts, opened).shown() == whole.shown()
    assert read(form, list(text), thoughts, opened).shown() == whole.shown()
    if not whole.names and not whole.reasoning and (thoughts is None or opened is False):
        assert whole.content == text
    for index, arguments in enumerate(whole.arguments):
        if index in whole.complete:
            assert isinstance(json.loads(arguments), dict)


@settings(max_examples=200)
@given(form=FORMS, wanted=st.lists(calls(), min_size=1, max_size=2), before=PROSE, end=st.integers(0, 10_000))
def test_a_truncated_output_ends_with_what_was_there(
    form: Any, wanted: list[Call], before: str, end: int
) -> None:
    name, writer = form
    text = before + writer(wanted)
    whole, part = read(name, [text]), read(name, [text[: end % (len(text) + 1)]])
    assert part.names == whole.names[: len(part.names)]
    assert part.complete == whole.complete[: len(part.complete)]
    for index, arguments in enumerate(part.arguments):
        if index in part.complete:
            assert arguments == whole.arguments[index]
        else:
            assert not is_json(arguments)
            if name not in ("qwen3_xml", "qwen3_coder"):  # whose types show at the end of a value
                assert whole.arguments[index].startswith(arguments)


@pytest.mark.parametrize("name", WRITERS)
def test_a_closing_marker_that_was_cut_off_is_no_text(name: str) -> None:
    for writer in WRITERS[name]:
        text = writer([("get_weather", {"city": "Rome"})])
        ends = [seen for seen in (read(name, [text[:end]]) for end in range(len(text))) if seen.complete]
        assert [seen.content for seen in ends] == [""] * len(ends)
        assert ends or text.endswith(("}", ")", "</function>"))  # of the call itself


@pytest.mark.parametrize("value", ["42", "true", "null", "[1]", '{"a":{}}', '"x"', "{}"])
def test_the_last_brace_of_a_hermes_call_survives_every_pair_of_cuts(value: str) -> None:
    arguments = f'{{"id":{value}}}'
    text = f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>'
    for first in range(len(text)):
        for second in range(first, len(text)):
            seen = read("hermes", [text[:first], text[first:second], text[second:]])
            assert seen.shown() == ("", "", ["f"], [arguments], [0])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name":"ping","arguments":{}}</tool_call>'),
        ("hermes", '<tool_call>{"name":"ping"}</tool_call>'),
        ("qwen3_xml", "<tool_call>\n<function=ping>\n</function>\n</tool_call>"),
        ("pythonic", "[ping()]"),
        ("mistral", "[TOOL_CALLS]ping[ARGS]{}"),
    ],
)
def test_a_call_without_parameters_has_the_arguments_of_an_empty_object(form: str, text: str) -> None:
    assert read(form, list(text)).shown() == ("", "", ["ping"], ["{}"], [0])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>none</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{} or so"}</tool_call>'),
        ("llama3_json", '{"answer": 42, "name": "f"}'),
        ("llama3_json", '{"name": "nobody", "parameters": {}}'),
        ("llama3_json", '{"name": "f"}'),
        ("mistral", "[TOOL_CALLS] [1]"),
        ("pythonic", "[1] is the first source"),
        ("pythonic", "[nobody()]"),
        ("granite", '["a", "b"]'),
        ("qwen3_xml", "<function f></function>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>"),
    ],
)
def test_what_is_no_call_is_content(form: str, text: str) -> None:
    assert read(form, list(text)).shown() == (text, "", [], [], [])


def test_a_call_that_breaks_after_it_began_stays_incomplete_and_the_rest_is_content() -> None:
    seen = read("hermes", ['So <tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'])
    assert seen.shown() == ("Sooops}}</tool_call>", "", ["f"], ['{"a": '], [])


def test_parameters_in_xml_have_the_types_of_the_schema() -> None:
    written = {
        "city": "1",
        "days": "2",
        "exact": "True",
        "where": "{'a': None}",
        "tags": "null",
        "share": "1e2",
    }
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    seen = read("qwen3_coder", [f"<function=get_weather>{body}<parameter=new>5</parameter></function>"])
    arguments = seen.calls[0][1]
    assert arguments == {
        "city": "1", "days": 2, "exact": True, "where": {"a": None}, "tags": None, "share": 100, "new": "5",
    }  # fmt: skip


def test_types_by_pythons_names_are_the_ones_of_json() -> None:
    kinds = {"n": "float", "i": "int", "b": "bool", "d": "dict", "l": ["list", "null"], "s": "str"}
    values = {"n": "1.5", "i": "2", "b": "true", "d": "{}", "l": "[]", "s": "3"}
    schema = {"properties": {key: {"type": kind} for key, kind in kinds.items()}}
    parser = OutputParser(TOOL_FORMATS["qwen3_xml"], schemas={"f": schema})
    body = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    seen = Read(parser.push(f"<function=f>{body}</function>") + parser.finish(), parser)
    assert seen.calls == [("f", {"n": 1.5, "i": 2, "b": True, "d": {}, "l": [], "s": "3"})]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<parameter=city>\na\n<parameter=days>\n2\n</parameter>", {"city": "a", "days": 2}),
        ("<parameter=days>\n2\n<parameter=city>\na\n</parameter>", {"city": "a", "days": 2}),
        ("<parameter=city>\na\n<parameter=new>\n2\n</parameter>", {"city": "a\n<parameter=new>\n2"}),
        ("<parameter=city>\na\n<parameter=city>\nb\n</parameter>", {"city": "a\n<parameter=city>\nb"}),
        ("<parameter=city>a</parameter> b</parameter>", {"city": "a</parameter> b"}),
        ("<parameter=city>a\n</parameter> b</parameter>", {"city": "a\n</parameter> b"}),
        ("<parameter=city>\n</parameter>\n\n</parameter>", {"city": "</parameter>\n"}),
    ],
)  # fmt: skip
def test_a_parameter_ends_where_another_or_the_end_of_the_call_follows(text: str, arguments: Any) -> None:
    whole = f"<tool_call>\n<function=get_weather>\n{text}\n</function>\n</tool_call>"
    for place in range(len(whole)):
        assert read("qwen3_xml", [whole[:place], whole[place:]]).calls == [("get_weather", arguments)]


@pytest.mark.parametrize("form", ["hermes", "granite"])
def test_arguments_may_be_an_object_written_as_a_string(form: str) -> None:
    arguments = {"city": 'a "b"', "days": 2}
    held = json.dumps(json.dumps(arguments))
    for call in (f'{{"name": "get_weather", "arguments": {held}}}', f'{{"arguments": {held}, "name": "f"}}'):
        seen = read(form, list(f"<tool_call> {call} </tool_call>"))
        assert seen.calls in ([("get_weather", arguments)], [("f", arguments)])
        assert seen.complete == [0]


@pytest.mark.parametrize("between", [";", "; ", "\n", ""])
def test_calls_in_llamas_format_need_no_separator(between: str) -> None:
    calls = between.join(['{"name": "f", "parameters": {}}', '{"name": "ping", "parameters": {}}'])
    assert read("llama3_json", list(calls)).calls == [("f", {}), ("ping", {})]
    seen = read("llama3_json", list(calls + between + '{"x": 1}'))
    assert seen.calls == [("f", {}), ("ping", {})]
    assert seen.content.endswith('{"x": 1}')


def test_an_id_that_the_model_gives_is_kept_and_mistrals_are_nine_letters_long() -> None:
    seen = read("mistral", ["[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]f[ARGS]{}"])
    assert seen.ids[0] == "abcdefghi"
    assert len(seen.ids[1]) == 9 and seen.ids[1].isalnum()
    assert len(set(read("hermes", ['<tool_call>{"name":"f"}</tool_call>' * 2]).ids)) == 2


@pytest.mark.parametrize(
    ("form", "opened", "text", "reasoning", "content"),
    [
        ("qwen3", None, "<think>\nwhy\n\nso\n</think>\n\nyes", "why\n\nso", "yes"),
        ("qwen3", None, "\n<think>why</think>yes\n", "why", "yes\n"),
        ("qwen3", None, " yes <think>no</think>", "", " yes <think>no</think>"),
        ("qwen3", True, "why</think>yes", "why", "yes"),
        ("qwen3", False, "<think>yes", "", "<think>yes"),
        ("qwen3", None, "<think>why ", "why ", ""),
        ("deepseek_r1", True, "why</think>yes", "why", "yes"),
        ("deepseek_r1", True, "<think>\nwhy</think>yes", "why", "yes"),
        ("mistral", None, "[THINK]why[/THINK]yes", "why", "yes"),
        ("granite", None, "Here's my thought process: why\nHere is my response: yes", "why", "yes"),
        ("granite", None, "Here is my answer", "", "Here is my answer"),
    ],
)
def test_reasoning_is_told_from_the_answer(
    form: str, opened: bool | None, text: str, reasoning: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        assert read(None, pieces, form, opened).shown()[:2] == (content, reasoning)


def test_calls_come_after_reasoning_and_none_out_of_it() -> None:
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    seen = read("hermes", [f"<think>I could {call}</think>\n\n{call}"], "qwen3")
    assert seen.shown() == ("", f"I could {call}", ["f"], ["{}"], [0])


@pytest.mark.parametrize(
    ("form", "prompt", "opened"),
    [
        ("qwen3", "<|im_start|>assistant\n", None),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
    ],
)
def test_the_end_of_the_prompt_says_whether_reasoning_is_open(
    form: str, prompt: str, opened: bool | None
) -> None:
    assert REASONING_FORMATS[form].opened(prompt) is opened


def test_whether_the_model_reasons_is_known_token_by_token() -> None:
    parser = OutputParser(None, REASONING_FORMATS["qwen3"])
    pieces = ["<think>", "\n", "a", "b", "</think>", "c"]
    assert [(parser.push(piece), parser.in_reasoning)[1] for piece in pieces] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    "unit", ["a", " ", "<", "<tool_call>", '<tool_call>{"a":"', '{"a":', "[", "\\", "1", "<fun"]
)
@pytest.mark.parametrize("start", ["", '<tool_call>{"name":"f","arguments":{"x":', '<tool_call>{"x":"', "["])
def test_work_is_linear_in_the_length_of_the_output(
    unit: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that pass through the reader's buffer, counted at one delta for each unit."""
    from octavo.prompt.tools.reader import Reader

    moved = 0
    push = Reader.push

    def counted(self: Reader, text: str) -> None:
        nonlocal moved
        push(self, text)
        moved += len(self._text)

    monkeypatch.setattr(Reader, "push", counted)
    for form in TOOL_FORMATS:
        moved = 0
        seen = read(form, [start, *[unit] * 2000], "qwen3")
        assert moved < 40 * len(unit) * 2000
        assert sum(map(len, [seen.content, *seen.arguments])) < 20 * len(unit) * 2000 + len(start)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_no_trigger_begins_another(form: str) -> None:
    """Else it would depend on the cut which one is found."""
    triggers = {layout.trigger for layout in TOOL_FORMATS[form].layouts if not layout.bare}
    assert not [(one, other) for one in triggers for other in triggers - {one} if other.startswith(one)]


TEMPLATES = [
    ("hermes", "qwen3", "<tool_call>\n{...}</tool_call> {{ content.split('</think>') }}"),
    ("qwen3_xml", None, "<tool_call>\n<function=example>\n<parameter=x>"),
    ("mistral", "mistral", "[TOOL_CALLS] [THINK]"),
    ("deepseek_v3", "deepseek_r1", "<｜Assistant｜><｜tool▁calls▁begin｜> content.split('</think>')"),
    ("llama3_json", None, 'respond with {"name": function name, "parameters": dictionary}'),
    ("pythonic", None, "[func_name1(params_name1=params_value1)]"),
    ("granite", "granite", "<|tool_call|> Here is my thought process:"),
    (
        "deepseek_v3",
        "qwen3",
        "<｜Assistant｜><｜tool▁calls▁begin｜> {% if not thinking %}</think>{% endif %}",
    ),
]


@pytest.mark.parametrize(("tools", "thoughts", "template"), TEMPLATES)
def test_auto_picks_the_formats_by_the_chat_template(tools: str, thoughts: str | None, template: str) -> None:
    assert tool_format("auto", template) is TOOL_FORMATS[tools]
    assert reasoning_format("auto", template) is (REASONING_FORMATS[thoughts] if thoughts else None)
    assert tool_format("auto", "{{ messages }}") is None
    assert tool_format("none", template) is None
    assert reasoning_format("auto", None) is None


def test_the_settings_know_every_format_by_name() -> None:
    assert set(TOOL_PARSERS) == set(TOOL_FORMATS)
    assert set(REASONING_PARSERS) == set(REASONING_FORMATS)
