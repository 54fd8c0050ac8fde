"""Rules on logits: equal to transformers' processors, counted over the right tokens, alone as in company."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from octavo.core.logit_rules import logit_rules
from octavo.core.outputs import EngineRequest
from octavo.core.plan import LogitRules, SampleSpec
from octavo.core.sampling_params import SamplingParams
from octavo.sampling.rules import Past, RuleBook
from octavo.sampling.sampler import Sampler
from octavo_kernels import load

VOCAB = 50
PROMPT = [3, 4, 4, 9]
OUTPUT = [7, 9, 7, 12]


@pytest.fixture
def row() -> np.ndarray:
    return np.random.default_rng(5).normal(0, 4, VOCAB).astype(np.float32)


def rules(**what) -> LogitRules:
    return LogitRules(num_prompt_tokens=len(PROMPT), **what)


def changed(row: np.ndarray, asked: LogitRules, drafts: list[int] | None = None) -> np.ndarray:
    past = Past("a", PROMPT + OUTPUT, drafts or [])
    return RuleBook(1).changed(row, asked, past, len(PROMPT + OUTPUT) + len(drafts or []))


def processed(row: np.ndarray, processor) -> np.ndarray:
    return processor(torch.tensor([PROMPT + OUTPUT]), torch.from_numpy(row.copy())[None])[0].numpy()


@pytest.mark.parametrize("penalty", [0.3, 1.7])
def test_the_repetition_penalty_is_transformers_over_prompt_and_output(row, penalty) -> None:
    expected = processed(row, theirs.RepetitionPenaltyLogitsProcessor(penalty))
    assert changed(row, rules(repetition_penalty=penalty)).tolist() == expected.tolist()


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e40, 1.7e308])
def test_no_repetition_penalty_makes_a_logit_infinite(row, penalty) -> None:
    row[PROMPT[0]] = 0.0
    assert np.isfinite(changed(row, rules(repetition_penalty=penalty))).all()


def test_bad_words_are_transformers_of_one_token_and_of_several(row) -> None:
    words = [[5], [7, 12, 20], [12, 21], [9, 12, 22], [12], [4, 9, 7, 9, 7, 12, 23]]
    expected = processed(row, theirs.NoBadWordsLogitsProcessor(words))
    assert np.flatnonzero(np.isneginf(expected)).tolist() == [5, 12, 20, 21, 23]
    assert changed(row, rules(bad_words=tuple(map(tuple, words)))).tolist() == expected.tolist()


def test_min_tokens_are_transformers(row) -> None:
    for least in (4, 5):
        processor = theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), least, [1, 2])
        expected = processed(row, processor)
        assert changed(row, rules(min_tokens=least, banned_until=(1, 2))).tolist() == expected.tolist()


def test_the_bias_is_transformers(row) -> None:
    expected = processed(row, theirs.SequenceBiasLogitsProcessor([[[3], 2.5], [[8], -100.0]]))
    assert changed(row, rules(logit_bias={3: 2.5, 8: -100.0})).tolist() == expected.tolist()


def test_presence_and_frequency_count_the_output_only(row) -> None:
    expected = row.copy()
    expected[[7, 9, 12]] -= np.float32(0.5) * np.array([2, 1, 1], dtype=np.float32)
    expected[[7, 9, 12]] -= np.float32(1.25)
    assert changed(row, rules(frequency_penalty=0.5, presence_penalty=1.25)).tolist() == expected.tolist()


def test_only_allowed_tokens_are_left(row) -> None:
    left = changed(row, rules(allowed_token_ids=(3, 40, 3)))
    assert np.flatnonzero(np.isfinite(left)).tolist() == [3, 40]
    assert left[[3, 40]].tolist() == row[[3, 40]].tolist()


def test_stop_tokens_stay_banned_only_while_something_else_is_left(row) -> None:
    left = changed(row, rules(allowed_token_ids=(1, 2), min_tokens=9, banned_until=(1,)))
    assert np.flatnonzero(np.isfinite(left)).tolist() == [2]
    left = changed(row, rules(allowed_token_ids=(1,), min_tokens=9, banned_until=(1,)))
    assert np.flatnonzero(np.isfinite(left)).tolist() == [1]


everything = st.builds(
    rules,
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.sampled_from([(), tuple(range(5, 30))]),
    bad_words=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), max_size=3
    ).map(tuple),
    min_tokens=st.integers(0, 9),
    banned_until=st.just((1, 2)),
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
specs = st.builds(
    SampleSpec,
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 9),
    sample_index=st.integers(0, 2),
    position=st.just(0),
    logprobs=st.sampled_from([None, 2]),
    min_p=st.sampled_from([0.0, 0.2]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(specs, st.none() | everything, tokens), min_size=1, max_size=6), st.data())
def test_a_row_is_the_same_alone_and_beside_any_others(wanted, data) -> None:
    """Case 5: no neighbour's penalty, padding or order changes a row."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(len(wanted), VOCAB, generator=generator) * 3
    before = logits.clone()
    drawn, pasts = [], []
    for i, (spec, asked, output) in enumerate(wanted):
        past = Past(str(i), PROMPT + output)
        drawn.append(SampleSpec(*list_of(spec)[:5], len(past.tokens), spec.logprobs, spec.min_p, asked))
        pasts.append(past)
    together = Sampler(load(), RuleBook(3)).sample(logits, drawn, pasts)
    assert torch.equal(logits, before)
    for i, draw in enumerate(together):
        assert Sampler(load(), RuleBook(1)).sample(logits[i : i + 1], [drawn[i]], [pasts[i]]) == [draw]


def list_of(spec: SampleSpec) -> list:
    return [getattr(spec, name) for name in spec.__struct_fields__]


@settings(deadline=None)
@given(everything, st.lists(st.tuples(tokens, tokens, st.booleans()), max_size=5), st.integers(0, 2))
def test_what_is_kept_from_step_to_step_equals_a_fresh_count(asked, steps, others) -> None:
    """Whatever the steps: drafts taken or thrown away, lists kept alive or copied, states dropped between."""
    row = np.random.default_rng(1).normal(0, 4, VOCAB).astype(np.float32)
    book, live = RuleBook(2), list(PROMPT)
    for taken, drafts, copied in steps:
        live += taken
        tokens = list(live) if copied else live
        for count in range(len(drafts) + 1):
            position = len(tokens) + count
            kept = book.changed(row, asked, Past("a", tokens, drafts), position)
            fresh = RuleBook(1).changed(row, asked, Past("b", tokens + drafts[:count]), position)
            assert kept.tolist() == fresh.tolist()
        for other in range(others):
            book.changed(row, asked, Past(f"other {other}", list(PROMPT)), len(PROMPT))


def test_another_sequence_under_the_same_name_starts_afresh(row) -> None:
    book, asked = RuleBook(2), rules(frequency_penalty=1.0)
    book.changed(row, asked, Past("a", [*PROMPT, 7, 7]), 6)
    fresh = RuleBook(2).changed(row, asked, Past("a", [*PROMPT, 8, 8]), 6)
    assert book.changed(row, asked, Past("a", [*PROMPT, 8, 8]), 6).tolist() == fresh.tolist()


def test_a_row_whose_rules_leave_nothing_fails_alone() -> None:
    logits = torch.zeros(2, VOCAB)
    none_left = rules(allowed_token_ids=(5,), bad_words=((5,),))
    position = len(PROMPT)
    plain = SampleSpec(0.0, 0, 1.0, 0, 0, position)
    ruled = SampleSpec(0.0, 0, 1.0, 0, 0, position, rules=none_left)
    draws = Sampler(load(), RuleBook(1)).sample(logits, [ruled, plain], [Past("a", PROMPT), None])
    assert draws[0].error is not None and "leave no token" in draws[0].error
    assert draws[0].refused
    assert draws[1].error is None


def test_logprobs_stay_those_of_the_model(row) -> None:
    asked = rules(logit_bias={9: 100.0}, allowed_token_ids=(9, 10))
    spec = SampleSpec(0.0, 0, 1.0, 0, 0, 8, 0, rules=asked)
    (draw,) = Sampler(load(), RuleBook(1)).sample(
        torch.from_numpy(row)[None], [spec], [Past("a", PROMPT + OUTPUT)]
    )
    assert draw.token == 9 and draw.logprobs is not None
    truth = torch.log_softmax(torch.from_numpy(row).double(), 0)[9]
    assert draw.logprobs.logprob == pytest.approx(float(truth), abs=1e-5)


def request(**sampling) -> EngineRequest:
    params = SamplingParams(seed=1, **sampling)
    return EngineRequest(
        request_id="a", prompt_token_ids=[1, 2, 3], num_prior_output_tokens=1, sampling=params
    )


def test_a_request_that_changes_nothing_has_no_rules() -> None:
    assert logit_rules(request(temperature=0.7, top_p=0.9, top_k=4, logprobs=3), [2]) is None
    assert logit_rules(request(min_tokens=4, ignore_eos=True), [2]) is None  # nothing to ban


def test_min_tokens_ban_every_token_that_ends_the_sequence() -> None:
    asked = logit_rules(request(min_tokens=4, stop_token_ids=(9,)), [2, 5])
    assert asked == LogitRules(num_prompt_tokens=2, min_tokens=4, banned_until=(2, 5, 9))
    asked = logit_rules(request(min_tokens=4, stop_token_ids=(9,), ignore_eos=True), [2, 5])
    assert asked == LogitRules(num_prompt_tokens=2, min_tokens=4, banned_until=(9,))
