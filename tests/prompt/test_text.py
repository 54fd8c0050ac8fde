"""Detokenising and stop strings: the same text however the tokens are cut, and never half a character."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.sampling_params import SamplingParams
from octavo.prompt.detokenizer import Detokenizer
from octavo.prompt.gguf_tokenizer import bytes_to_characters
from octavo.prompt.stop import StopMatcher
from octavo.prompt.text_stream import TextStream


def cuts(items: Any, seed: int) -> list[Any]:
    chooser, parts, at = random.Random(seed), [], 0
    while at < len(items):
        size = chooser.choice([1, 1, 2, 3, 7])
        parts.append(items[at : at + size])
        at += size
    return parts


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_pushed_text_equals_decoding_at_once_for_any_tokens(
    model: str, request: pytest.FixtureRequest
) -> None:
    renderer = request.getfixturevalue(model)
    size = renderer.assets.vocab_size
    byte_tokens = [token for token in range(size) if renderer.pieces.piece(token)[1]] or list(range(17, 273))

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        one = st.one_of(st.integers(0, size - 1), st.sampled_from(byte_tokens), st.integers(0, 300))
        ids = data.draw(st.lists(one, max_size=30))
        skip = data.draw(st.booleans())
        detokenizer = Detokenizer(renderer, renderer.encode("start "), skip)
        pushed = [detokenizer.push(part) for part in cuts(ids, data.draw(st.integers(0, 99)))]
        assert "".join(pushed) + detokenizer.flush() == renderer.decode(ids, skip)

    check()


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_text_beyond_ascii_comes_whole(model: str, request: pytest.FixtureRequest) -> None:
    renderer = request.getfixturevalue(model)
    for text in ("日本語 😀👩‍👩‍👧‍👦 Привет \U0002070e end", "naïve 🇩🇪", "नमस्ते ꦲꦏ꧀ꦱꦫ 𓀀𓂀"):
        detokenizer = Detokenizer(renderer, [])
        parts = [detokenizer.push([token]) for token in renderer.encode(text, add_special_tokens=False)]
        assert "\ufffd" not in "".join(parts)
        assert "".join(parts) + detokenizer.flush() == text


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_a_prompt_that_ends_inside_a_character_is_completed_not_repeated(
    model: str, request: pytest.FixtureRequest
) -> None:
    renderer = request.getfixturevalue(model)
    spelling = (
        bytes_to_characters() if renderer.pieces.byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    )
    character = [renderer.tokenizer.token_to_id(spelling[byte]) for byte in "𓂀".encode()]
    ids = renderer.encode("ab 日", add_special_tokens=False) + character
    for cut in range(1, 4):
        detokenizer = Detokenizer(renderer, ids[:-cut])
        assert detokenizer.push(ids[-cut:]) + detokenizer.flush() == "𓂀"


def test_the_beginning_of_a_stop_string_is_held_back_and_sent_once() -> None:
    matcher = StopMatcher(["W::"])
    assert [matcher.push(part) for part in ("aW", ":", "b", "W:", ":", "more")] == [
        "a",
        "",
        "W:b",
        "",
        "",
        "",
    ]
    assert matcher.matched == "W::"
    assert matcher.flush() == ""


def test_held_text_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("text <en") == "text "
    assert matcher.flush() == "<en"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=25),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
    seed=st.integers(0, 999),
)
def test_stop_strings_match_the_same_however_the_text_is_cut(
    text: str, stops: list[str], include: bool, seed: int
) -> None:
    whole, parts = StopMatcher(stops, include), StopMatcher(stops, include)
    expected = whole.push(text) + whole.flush()
    assert "".join(parts.push(part) for part in cuts(text, seed)) + parts.flush() == expected
    assert parts.matched == whole.matched
    if whole.matched is None:
        assert expected == text
        assert not any(stop in text for stop in stops)
    else:
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert expected == text[: min(ends) if include else min(ends) - len(whole.matched)]


def stream(renderer: Any, **sampling: Any) -> TextStream:
    return TextStream(renderer, renderer.encode("go"), SamplingParams(**sampling))


def test_no_stop_string_ends_the_text_of_the_first_min_tokens(smollm2: Any) -> None:
    ids = smollm2.encode(" one two one two one", add_special_tokens=False)
    delta = stream(smollm2, stop=["one"], min_tokens=2).push(ids)
    assert (delta.text, delta.num_tokens, delta.stop_reason) == (" one two ", 3, "one")
    delta = stream(smollm2, stop=["one"], min_tokens=5).push(ids, "length")
    assert (delta.text, delta.num_tokens, delta.finish_reason) == (" one two one two one", 5, "length")


def test_tokens_after_a_stop_string_do_not_count(smollm2: Any) -> None:
    ids = smollm2.encode("one two three four")
    delta = stream(smollm2, stop=(" two",)).push(ids)
    assert (delta.text, delta.num_tokens, delta.finish_reason, delta.stop_reason) == (
        "one",
        2,
        "stop",
        " two",
    )
    shown = stream(smollm2, stop=(" two",), include_stop_str_in_output=True).push(ids)
    assert shown.text == "one two"


def test_the_token_that_ended_the_sequence_is_no_text(smollm2: Any) -> None:
    ids = smollm2.encode("one two")
    assert stream(smollm2).push(ids, "stop", ids[-1]).text == "one"
    assert stream(smollm2).push(ids, "length").text == "one two"
    assert stream(smollm2, include_stop_str_in_output=True).push(ids, "stop", ids[-1]).text == "one two"
    end = [*ids, *smollm2.encode("<|im_end|>")]
    assert stream(smollm2, skip_special_tokens=False).push(end, "stop").text == "one two"
    assert stream(smollm2, skip_special_tokens=False).push(end, "length").text == "one two<|im_end|>"
