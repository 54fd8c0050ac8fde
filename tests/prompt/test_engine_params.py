"""What the engine is told in tokens of what a client said in texts."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.sampling_params import SamplingParams, StructuredOutputs
from octavo.prompt.engine_params import engine_params, spellings


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_a_word_is_banned_at_the_start_and_after_a_space(request: Any, model: str) -> None:
    renderer = request.getfixturevalue(model)
    for word in ("London", " London", "New York"):
        found = [renderer.decode(list(ids)) for ids in spellings(renderer, [word])]
        assert found == [word.lstrip(), " " + word.lstrip()]


def test_spellings_that_are_one_are_listed_once(smollm2: Any) -> None:
    words = spellings(smollm2, ["London", " London", "London"])
    assert len(words) == len(set(words)) == 2


def test_the_engine_gets_tokens_and_no_texts(smollm2: Any) -> None:
    asked = SamplingParams(
        n=3, stop="x", bad_words=["a"], bad_words_token_ids=[[7]], min_p=0.1, grammar="g",
        structured_outputs=StructuredOutputs(regex="a"),
    )  # fmt: skip
    told = engine_params(asked, smollm2, seed=5, max_tokens=9)
    words = ((7,), *spellings(smollm2, ["a"]))
    assert told == SamplingParams(
        seed=5, max_tokens=9, bad_words_token_ids=words, grammar="g", min_p=0.1, n=1
    )
