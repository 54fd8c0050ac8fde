"""From a form to a grammar: what is refused is named, and nothing takes long, much memory, or the process."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.core.sampling_params import StructuredOutputs
from octavo.errors import InvalidRequest
from octavo.sampling import grammar_compiler
from octavo.sampling.grammar_compiler import GivenUp, GrammarCompiler


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler()
    yield made
    made.close()


def refusal(compiler: GrammarCompiler, where: str = "structured_outputs", **form: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(StructuredOutputs(**form), where)
    assert caught.value.param == where.partition(".")[0]
    return caught.value.message


def test_every_form_compiles(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}}
    for form in (
        {"json": schema}, {"json": json.dumps(schema)}, {"json_object": True}, {"regex": r"\d+ (cats|dogs)"},
        {"choice": ["a", 'b"\n', "日本"]}, {"grammar": 'root ::= "a" | root "b"'}, {"grammar": 'start: "a"+'},
    ):  # fmt: skip
        assert compiler.compile(StructuredOutputs(**form))


@pytest.mark.parametrize(
    ("place", "schema"),
    [
        (".properties.a.pattern", {"properties": {"a": {"pattern": "^(?<=a)b$"}}}),
        (".items.anyOf[1].not", {"items": {"anyOf": [{"type": "string"}, {"not": {"type": "null"}}]}}),
        (".$defs.x.format", {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "format": "sand"}}}),
        (".uniqueItems", {"type": "array", "uniqueItems": True}),
        (".oneOf", {"oneOf": [{"type": "integer"}, {"minimum": 3}]}),
    ],
)
def test_what_cannot_be_held_to_is_named_by_its_place(
    compiler: GrammarCompiler, place: str, schema: dict[str, Any]
) -> None:
    """Case 22."""
    where = "response_format.json_schema.schema"
    assert refusal(compiler, where, json=schema).startswith(f"{where}{place}: ")
    assert refusal(compiler, json=schema).startswith(f"structured_outputs.json{place}: ")


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}}, {"if": {}, "then": False}, {"dependentRequired": {"a": ["b"]}}, {"contains": {}},
        {"dependencies": {"a": ["b"]}}, {"unevaluatedProperties": False}, {"propertyNames": {"maxLength": 1}},
        {"minContains": 1}, {"$dynamicRef": "#x"}, {"$ref": "http://example.com/schema"}, {"type": "sand"},
        {"enum": []}, {"properties": 3}, {"minimum": 3, "maximum": 2, "type": "integer"},
        {"x-guidance": {"lenient": True}, "not": {}},
        {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "integer"}, {"minimum": 3}]},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_no_keyword_of_a_schema_is_passed_over(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    assert refusal(compiler, json=schema)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "a("}, {"regex": r"(a)\1"}, {"regex": r"\bword"}, {"regex": "(?=a)b"}, {"regex": "\ud800"},
        {"json": "{"}, {"json": "3"}, {"grammar": "words"}, {"grammar": 'root ::= "a" other'},
        {"grammar": 'start: "a" other'}, {"grammar": 'start: %json {"not": {}}'}, {"grammar": "(" * 5000},
        {"grammar": "root ::= " + "(" * 5000}, {"json": "[" * 9999},
    ],
    ids=lambda form: str(form)[:40],
)  # fmt: skip
def test_a_form_that_is_not_one_is_refused(compiler: GrammarCompiler, form: dict[str, Any]) -> None:
    assert refusal(compiler, **form).startswith(f"structured_outputs.{min(form)}")


def test_an_error_in_a_grammar_of_ours_does_not_show_it(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile_lark('start: "x" %json {"type": "sand"}', "tools")
    assert caught.value.message == "tools: failed to compile JSON schema: Invalid type: sand"


def nested(depth: int, branches: int) -> dict[str, Any]:
    if not depth:
        return {"type": "string"}
    names = [f"k{depth}{branch}" for branch in range(branches)]
    return {
        "oneOf": [{"properties": {name: nested(depth - 1, branches)}, "required": [name]} for name in names]
    }


def test_nested_choices_are_refused_soon(compiler: GrammarCompiler) -> None:
    """Case 23: ten deep, three branches each; written out, and by reference."""
    shared: dict[str, Any] = {"d0": {"type": "string"}}
    for depth in range(1, 11):
        branches = [{"properties": {f"k{i}": {"$ref": f"#/$defs/d{depth - 1}"}}} for i in range(3)]
        shared[f"d{depth}"] = {"oneOf": branches}
    assert "oneOf" in refusal(compiler, json={"$ref": "#/$defs/d10", "$defs": shared})
    assert "oneOf" in refusal(compiler, json=nested(5, 3))
    assert "characters long" in refusal(compiler, json=nested(9, 3))


def exploding(depth: int) -> dict[str, Any]:
    """Each level multiplies the last one by three."""
    defs: dict[str, Any] = {"d0": {"properties": {"x": {"type": "string"}}}}
    for level in range(1, depth + 1):
        choice = {"anyOf": [{"properties": {f"a{level}{i}": {"type": "string"}}} for i in range(3)]}
        defs[f"d{level}"] = {"allOf": [{"$ref": f"#/$defs/d{level - 1}"}, choice]}
    return {"$ref": f"#/$defs/d{depth}", "$defs": defs}


def test_one_that_takes_too_long_is_ended_and_the_next_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import octavo.sampling.grammar_compiler as c; c.CPU_S = 0.05; c.main()"
    monkeypatch.setattr(grammar_compiler, "COMMAND", ("-c", source))
    compiler = GrammarCompiler()
    assert "of computing to compile" in refusal(compiler, json=exploding(6))
    assert compiler.compile(StructuredOutputs(regex="ab"))
    compiler.close()


def test_one_that_takes_too_much_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = "int(open('/proc/self/statm').read().split()[0])"
    source = "import llguidance, resource, octavo.sampling.grammar_compiler as c; "
    source += f"c.MEMORY = {pages} * resource.getpagesize() + (16 << 20); c.main()"
    monkeypatch.setattr(grammar_compiler, "COMMAND", ("-c", source))
    compiler = GrammarCompiler()
    assert "of memory to compile" in refusal(compiler, json=exploding(6))
    compiler.close()


def test_one_that_is_given_up_is_compiled_no_further_and_the_next_is_answered() -> None:
    compiler, form = GrammarCompiler(), StructuredOutputs(regex="ab")
    left = threading.Event()
    compiler.give_up(left)  # before it began
    with pytest.raises(GivenUp):
        compiler.compile(form, left=left)
    first = compiler.compile(form, left=threading.Event())
    compiler.give_up(left)  # of one that is over: it disturbs nobody
    assert compiler.compile(StructuredOutputs(regex="a|b"))
    assert compiler.compile(form) == first
    compiler.close()


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    form = StructuredOutputs(regex="once|twice")
    first = compiler.compile(form)
    compiler.close()  # the process is gone; what it said is known
    assert compiler.compile(form) is first
    assert re.search("once", first)
