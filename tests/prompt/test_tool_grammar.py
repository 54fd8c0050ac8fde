"""A model held to a grammar calls tools in its own format, with arguments that fit their schemas."""

# ruff: noqa: RUF001  DeepSeek spells its markers with these characters.
from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo.core.sampling_params import StructuredOutputs
from octavo.errors import InvalidRequest
from octavo.prompt.tools.definitions import Tool, parse_tool_choice, parse_tools
from octavo.prompt.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from octavo.prompt.tools.grammar import Unsupported, reasoning_first, tool_grammar, with_answer
from octavo.prompt.tools.parser import CallArguments, CallStart, Content, OutputParser
from octavo.sampling.grammar_compiler import GrammarCompiler

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"enum": ["celsius", "kelvin"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "exact"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"],
                        "additionalProperties": False}},
}  # fmt: skip
DEFINITIONS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "ping"}},
]
TOOLS = parse_tools(DEFINITIONS)
TOKENS = ["[TOOL_CALLS]", "<tool_call>", "</think>", "<｜tool▁calls▁begin｜>"]  # the other markers are texts
TEMPLATES = ["", "[ARGS] ```json <|tool_call|>"]
EOS = 0


def _tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(['{"name": "get_weather", "arguments": true}', "Paris"] * 3, trainer)
    tokenizer.add_special_tokens(TOKENS)
    return tokenizer


TOKENIZER = _tokenizer()
MARKERS = {marker: TOKENIZER.token_to_id(marker) for marker in TOKENS}
LLG = LLTokenizer(TOKENIZER.to_str(), n_vocab=TOKENIZER.get_vocab_size(), eos_token=[EOS])


def matcher(grammar: str) -> LLMatcher:
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, LLG)
    assert not failed and not messages, messages
    made = LLMatcher(LLG, grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def grammar_of(form: str, tools: tuple[Tool, ...] = TOOLS, **options: Any) -> str:
    wanted = {"required": True, "parallel": True, "markers": MARKERS, **options}
    return LLMatcher.grammar_from_lark(tool_grammar(TOOL_FORMATS[form], tools, **wanted))


def written_by_chance(grammar: str, seed: int) -> str | None:
    """A text of the grammar, drawn with a liking for what ends things; None where it does not end soon."""
    walk, chance, ids = matcher(grammar), random.Random(seed), []
    ends = [TOKENIZER.token_to_id(one) for one in '"}])</>' if TOKENIZER.token_to_id(one) is not None]
    ends += [TOKENIZER.token_to_id("Ċ"), MARKERS["</think>"]]
    for _ in range(600):
        mask = np.frombuffer(walk.compute_bitmask(), dtype=np.uint8)
        allowed = set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
        if allowed <= {EOS} or (EOS in allowed and chance.random() < 0.5):
            return str(TOKENIZER.decode(ids, skip_special_tokens=False))
        others = sorted(allowed - {EOS})
        plain = [one for one in others if LLG.decode_bytes([one]).isascii()] or others
        liked = [one for one in plain if one in ends]
        ids.append(chance.choice(liked if liked and chance.random() < 0.5 else plain))
        assert walk.consume_token(ids[-1])
    return None


def accepts(grammar: str, text: str) -> bool:
    walk, ids = matcher(grammar), TOKENIZER.encode(text).ids
    return bool(walk.try_consume_tokens(ids) == len(ids) and walk.is_accepting())


def calls_in(form: str, text: str, reasoning: str | None = None) -> list[tuple[str, Any]]:
    parser = OutputParser(
        TOOL_FORMATS[form],
        REASONING_FORMATS.get(reasoning or ""),
        schemas={one.name: one.schema for one in TOOLS},
    )
    events = parser.push(text) + parser.finish()
    assert not [event for event in events if isinstance(event, Content)]
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    assert parser.completed == len(names)
    return list(zip(names, map(json.loads, arguments), strict=True))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_required_call_is_made_whatever_the_model_would_rather_write(
    form: str, parallel: bool, template: str
) -> None:
    reasoning = REASONING_FORMATS["qwen3"]
    grammar = grammar_of(form, parallel=parallel, template=template, reasoning=reasoning)
    ended = [text for text in (written_by_chance(grammar, seed) for seed in range(8)) if text is not None]
    assert ended
    for text in ended:
        calls = calls_in(form, text, "qwen3")
        assert calls if parallel else len(calls) == 1
        for name, arguments in calls:
            jsonschema.validate(arguments, WEATHER if name == "get_weather" else {"type": "object"})


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_named_call_is_of_that_tool(form: str) -> None:
    grammar = grammar_of(form, TOOLS[1:], parallel=False)
    text = next(text for text in (written_by_chance(grammar, seed) for seed in range(20)) if text)
    assert [name for name, _ in calls_in(form, text)] == ["ping"]


OPTIONAL = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'),
    ("llama3_json", '{"name": "get_weather", "parameters": %s}'),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": %s}]'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather"
     "<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("granite", '<tool_call>[{"name": "get_weather", "arguments": %s}]'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "call"), OPTIONAL)
def test_where_calls_are_free_text_is_free_and_the_arguments_of_strict_tools_are_not(
    form: str, call: str
) -> None:
    grammar = grammar_of(form, required=False)
    good, bad = call % '{"city": "Paris", "exact": true}', call % '{"city": "Paris", "exact": 1}'
    before = "" if form == "llama3_json" else "Let me see: "
    assert accepts(grammar, "There is no need. [x] {")
    assert accepts(grammar, before + good)
    assert not accepts(grammar, before + bad)
    assert not accepts(grammar, before + good[:-3])
    if form in ("hermes", "mistral"):
        assert accepts(grammar, f"{before}{good} and {good} so")
        assert not accepts(grammar_of(form, required=False, parallel=False), f"{before}{good} and {good} so")
    loose = (Tool("get_weather", WEATHER),)
    assert accepts(grammar_of(form, loose, required=False), before + bad)


@pytest.mark.parametrize(("opened", "text"), [
    (None, '<think>so</think>\n\n{"a":1}'),
    (None, '{"a":1}'), (True, 'so </think>{"a":1}'), (False, '{"a":1}'),
])  # fmt: skip
def test_a_form_of_the_answer_holds_after_the_reasoning(opened: bool | None, text: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    alone = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    grammar = reasoning_first(alone, REASONING_FORMATS["qwen3"], opened, MARKERS)
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace("1", "x"))


@pytest.mark.parametrize(("form", "good", "bad"), [
    ({"regex": "[a-c]{2}(foo|bar)*"}, "abfoo", "a"), ({"choice": ["yes", "no"]}, "yes", "maybe"),
    ({"grammar": 'root ::= "a" ("," b)*\nb ::= "b"'}, "a,b", "b"), ({"json_object": True}, "{}", "[]"),
    ({"json": {"type": "boolean"}}, "true", "1"),
])  # fmt: skip
def test_every_form_holds_after_reasoning_and_in_place_of_calls(
    form: dict[str, Any], good: str, bad: str
) -> None:
    compiler = GrammarCompiler()
    try:
        answer = compiler.compile(StructuredOutputs(**form))
    finally:
        compiler.close()
    after = reasoning_first(answer, REASONING_FORMATS["qwen3"], True, MARKERS)
    assert accepts(after, f"so </think>{good}") and not accepts(after, f"so </think>{bad}")
    options = {"required": False, "parallel": True, "markers": MARKERS, "answer": True}
    instead = with_answer(tool_grammar(TOOL_FORMATS["hermes"], TOOLS, **options), answer)
    assert accepts(instead, good) and not accepts(instead, bad)


def test_an_answer_of_a_given_form_may_come_in_place_of_calls() -> None:
    answer = LLMatcher.grammar_from_json_schema('{"type": "object", "required": ["a"]}')
    options = {"required": False, "parallel": True, "markers": MARKERS, "answer": True}
    grammar = with_answer(tool_grammar(TOOL_FORMATS["hermes"], TOOLS, **options), answer)
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>')
    assert not accepts(grammar, "free text")
    assert not accepts(grammar, '{"b": 1}')
    with pytest.raises(Unsupported, match="look alike"):
        tool_grammar(TOOL_FORMATS["llama3_json"], TOOLS, **options)


def test_what_strings_without_quotes_cannot_be_held_to_is_refused_for_strict_tools_only() -> None:
    schema = {"properties": {"day": {"type": "string", "pattern": "^[0-9]+$"}}}
    strict = parse_tools([{"function": {"name": "f", "parameters": schema, "strict": True}}])
    with pytest.raises(Unsupported) as caught:
        grammar_of("qwen3_xml", strict)
    assert caught.value.where == "tools[0].function.parameters.properties.day.pattern"
    assert grammar_of("qwen3_xml", parse_tools([{"function": {"name": "f", "parameters": schema}}]))
    assert grammar_of("hermes", strict)


def test_a_parameter_whose_name_the_format_cannot_spell_is_refused() -> None:
    tools = parse_tools(
        [{"function": {"name": "f", "parameters": {"properties": {"user id": {}, "a-b": {}}}}}]
    )
    with pytest.raises(Unsupported) as caught:
        grammar_of("pythonic", tools)
    assert caught.value.where == "tools[0].function.parameters.properties.user id"
    assert grammar_of("qwen3_xml", tools)


def test_a_schema_may_be_a_reference_to_one_of_its_own() -> None:
    schema = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    grammar = grammar_of("pythonic", parse_tools(function(name="f", parameters=schema)))
    assert accepts(grammar, "[f(x=1)]")
    assert not accepts(grammar, "[f(x=y)]")


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ("f", "tools"),
        ([1], "tools[0]"),
        ([{"type": "custom"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        (function(name="a b"), "tools[0].function.name"),
        (function(name=None), "tools[0].function.name"),
        (function() * 2, "tools[1].function.name"),
        (function(description=1), "tools[0].function.description"),
        (function(strict="yes"), "tools[0].function.strict"),
        (function(parameters=[]), "tools[0].function.parameters"),
        (function(parameters={"type": "string"}), "tools[0].function.parameters.type"),
        (function(parameters={"properties": []}), "tools[0].function.parameters.properties"),
    ],
)
def test_a_wrong_definition_is_named(tools: Any, named: str) -> None:
    if named.endswith("properties"):
        tools[0]["function"]["parameters"]["properties"] = [1]
    with pytest.raises(InvalidRequest) as caught:
        parse_tools(tools)
    assert caught.value.param == named


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


PING = {"type": "function", "function": {"name": "ping"}}


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", None),
        ("none", "none", None),
        ("required", "required", None),
        (PING, "required", ("ping",)),
        (allowed("auto", PING), "auto", ("ping",)),
        (allowed("required", PING), "required", ("ping",)),
    ],
)
def test_the_choice_of_tools_is_read(choice: Any, mode: str, names: tuple[str, ...] | None) -> None:
    read = parse_tool_choice(choice, TOOLS)
    assert (read.mode, read.names) == (mode, names)
    assert parse_tool_choice(None, ()).mode == "none"


@pytest.mark.parametrize(
    "choice",
    [
        "some", 1, {"type": "function"}, {"type": "function", "function": {"name": "x"}},
        {"type": "allowed_tools"}, allowed("none", PING), allowed("auto"), allowed("auto", "ping"),
        allowed("auto", {"type": "function", "function": {"name": "x"}}),
    ],
)  # fmt: skip
def test_a_wrong_choice_is_named(choice: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        parse_tool_choice(choice, TOOLS)


def test_a_call_cannot_be_required_without_tools() -> None:
    with pytest.raises(InvalidRequest, match="there are no tools"):
        parse_tool_choice("required", ())
