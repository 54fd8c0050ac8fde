"""Sampling settings: ranges and types, what means nothing together, a model's own defaults."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from octavo.core.generation_config import not_applied, sampling_defaults
from octavo.core.sampling_params import SamplingParams, StructuredOutputs
from octavo.errors import InvalidRequest

WRONG = [
    ("n", [0, 129, 1.0, True, "1", None]), ("temperature", [-0.1, 2.1, math.nan, "1", None, True]),
    ("top_p", [0, 1.1, math.nan]), ("top_k", [-2, 2**31, 0.5]), ("min_p", [-0.1, 1.1, None]),
    ("seed", [2**63, 1.5]), ("max_tokens", [0, -1]), ("min_tokens", [-1, None, 17]),
    ("presence_penalty", [2.1, -2.1, math.inf]), ("frequency_penalty", [2.1, -2.1, "0"]),
    ("repetition_penalty", [0, -1, math.inf, math.nan, 10**400]), ("logprobs", [-1, 1.5, True]),
    ("prompt_logprobs", [-1, True]), ("length_penalty", [math.inf, 2.0]), ("early_stopping", [1, True]),
    ("stop", [["a", ""], [1], 3]), ("stop_token_ids", [[-1], ["a"], [True], 3, [2**31]]),
    ("allowed_token_ids", [[-1], 3]), ("bad_words", [[""], "x", ["x"] * 257]),
    ("bad_words_token_ids", [[[]], [3], [[-1]]]),
    ("logit_bias", [{-1: 1.0}, {"a": 1.0}, {1: math.nan}, {1: math.inf}, [1]]), ("ignore_eos", [1]),
    ("skip_special_tokens", [None]), ("use_beam_search", [1]), ("structured_outputs", [{"regex": "a"}]),
    ("grammar", [3]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG for value in values])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("penalty", [-10.5, 10.5, 1e308, -1e308, math.nan])
def test_a_length_penalty_is_one_that_scores_can_bear(penalty: float) -> None:
    with pytest.raises(InvalidRequest, match=r"length_penalty is .*between -10 and 10"):
        SamplingParams(use_beam_search=True, length_penalty=penalty)


def test_a_large_whole_number_goes_to_the_engine_as_a_number() -> None:
    params = SamplingParams(repetition_penalty=10**30)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_lists_become_tuples_and_biases_are_cut() -> None:
    params = SamplingParams(
        stop="x", stop_token_ids=[1], allowed_token_ids=[2, 3], bad_words=["a"], bad_words_token_ids=[[4, 5]],
        logit_bias={7: 1000, 8: -1e9, 9: 3},
    )  # fmt: skip
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("x",), (1,), (2, 3))
    assert (params.bad_words, params.bad_words_token_ids) == (("a",), ((4, 5),))
    assert params.logit_bias == {7: 100.0, 8: -100.0, 9: 3}


def test_settings_come_through_messages_unchanged() -> None:
    params = SamplingParams(logit_bias={7: 1.5}, bad_words_token_ids=((4, 5),), min_p=0.1, grammar="g")
    for encode, decode in (
        (msgspec.msgpack.encode, msgspec.msgpack.decode),
        (msgspec.json.encode, msgspec.json.decode),
    ):
        assert decode(encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "min_p": 0.5}, "min_p"),
        ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words"),
        ({"use_beam_search": True, "grammar": "g"}, "grammar"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"grammar": "g", "ignore_eos": True}, "ignore_eos"),
        ({"allowed_token_ids": (5, 6), "bad_words_token_ids": ((5,), (6,), (7, 8))}, "allowed_token_ids"),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**settings)
    assert caught.value.param == param


def test_a_beam_search_takes_its_own_settings_and_is_not_greedy() -> None:
    for temperature in (0, 1):
        params = SamplingParams(
            n=4, use_beam_search=True, temperature=temperature, length_penalty=-0.5, early_stopping=True
        )
        assert not params.greedy
    assert SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    "settings",
    [
        {"stop_token_ids": (99,)},
        {"allowed_token_ids": (1, 99)},
        {"logit_bias": {99: 1}},
        {"bad_words_token_ids": ((1, 99),)},
    ],
)
def test_a_token_outside_the_vocabulary_is_named(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    params.check_vocabulary(100)
    with pytest.raises(InvalidRequest, match=f"{min(settings)} holds 99: ids are 0 to 98"):
        params.check_vocabulary(99)


def test_exactly_one_form_is_given() -> None:
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")
    assert StructuredOutputs(json_object=True, regex=None).json_object
    for forms in ({}, {"regex": "a", "choice": ["b"]}, {"json_object": False}, {"choice": []}, {"json": 3}):
        with pytest.raises(InvalidRequest) as caught:
            StructuredOutputs(**forms)
        assert caught.value.param == "structured_outputs"


def test_a_models_own_settings_are_the_defaults() -> None:
    config = {
        "temperature": 0.6, "top_k": 20, "top_p": None, "min_p": 0.05, "repetition_penalty": 1.1,
        "max_new_tokens": 99, "do_sample": True, "typical_p": 0.9, "no_repeat_ngram_size": 0,
    }  # fmt: skip
    assert sampling_defaults(config) == SamplingParams(
        temperature=0.6, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=99
    )
    assert not_applied(config) == ["typical_p 0.9"]
    assert sampling_defaults({}) == SamplingParams()
    assert sampling_defaults({}, max_tokens=None).max_tokens is None
    with pytest.raises(InvalidRequest, match="min_p is 3"):
        sampling_defaults({"min_p": 3})
