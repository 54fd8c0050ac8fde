"""Counting the tokens of a stream."""

from __future__ import annotations

import pytest
from client.fake_endpoint import usage
from hypothesis import given
from hypothesis import strategies as st

from octavo.client.bench.tally import Tally, gaps, shared_out


def tally(*events: tuple[float, dict]) -> Tally:
    counted = Tally()
    for time, event in events:
        counted.add(time, event)
    return counted


def chat(said: str, **fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": said}}], **fields}


def ids(*tokens: int, said: str = "") -> dict:
    return {"choices": [{"index": 0, "text": said, "token_ids": list(tokens)}]}


def test_token_ids_say_what_a_chunk_holds_even_where_its_text_is_held_back() -> None:
    counted = tally(
        (1.0, ids(5)), (2.0, ids(6, 7, said="two words")), (3.0, {"choices": [], "usage": usage(9, 3)})
    )
    assert counted.counted_by == "token ids"
    assert counted.chunks() == [(1.0, 1), (2.0, 2)]
    assert (counted.output_tokens, counted.prompt_tokens) == (3, 9)


def test_usage_that_counts_on_says_what_a_chunk_holds() -> None:
    counted = tally((1.0, chat("a", usage=usage(4, 1))), (2.0, chat("b c d", usage=usage(4, 4, cached=2))))
    assert counted.counted_by == "usage of chunks"
    assert counted.chunks() == [(1.0, 1), (2.0, 3)]
    assert counted.cached_tokens == 2


def test_usage_of_the_whole_is_shared_out_over_the_chunks() -> None:
    counted = tally(
        (1.0, chat("")), (2.0, chat("abc")), (3.0, chat("def")), (3.0, {"choices": [], "usage": usage(4, 6)})
    )
    assert counted.counted_by == "text"
    assert counted.chunks() == [(2.0, 3), (3.0, 3)]


def test_without_any_word_a_chunk_is_a_token() -> None:
    counted = tally((1.0, chat("")), (2.0, chat("abc")), (3.0, chat("de")))
    assert (counted.counted_by, counted.output_tokens) == ("chunks", 2)


@pytest.mark.parametrize(
    "delta",
    [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{"function": {"arguments": "{}"}}]}],
)
def test_reasoning_and_tool_calls_are_tokens_but_no_part_of_what_is_said(delta: dict) -> None:
    counted = tally((1.0, {"choices": [{"index": 0, "delta": delta}]}))
    assert (counted.output_tokens, counted.text) == (1, "")


def test_tokens_that_come_with_the_first_have_no_gap() -> None:
    assert gaps([(1.0, 3), (1.3, 3), (1.4, 1)]) == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert gaps([(1.0, 5)]) == []


@given(st.integers(0, 500), st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_sharing_out_loses_no_token_and_gives_each_chunk_one_where_there_are_enough(
    total: int, chars: list[int]
) -> None:
    counts = shared_out(total, chars)
    assert sum(counts) == total and min(counts) >= (1 if total >= len(chars) else 0)
