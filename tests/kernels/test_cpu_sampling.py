"""The C++ kernels draw what the reference draws, whatever the row, the settings and the company."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels import DrawSettings

CLOSE = 2e-6  # roundings of float32 weights: of a sum, and of a cut
FINITE = float(torch.finfo(torch.float32).max)


def drawn(ops, logits, *rows):
    return ops.sample(logits, torch.tensor(rows, dtype=torch.float64)).tolist()


def draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, number=0.5):
    return DrawSettings(temperature, top_k, top_p, min_p, number)


def neighbours(how):
    """Settings that differ by less than float32 can tell."""
    for sign in (-1, 1):
        number = min(max(how.number + sign * CLOSE, 0.0), 1 - 2**-53)
        top_p = how.top_p if how.top_p == 1 else how.top_p + sign * CLOSE * min(how.top_p, 1 - how.top_p)
        yield how._replace(number=number)
        for min_p in (how.min_p, how.min_p * (1 - CLOSE), how.min_p * (1 + CLOSE)):
            yield how._replace(top_p=top_p, min_p=min_p)


def assert_drawn_as_the_reference(cpu, reference, row, how):
    """-> whether it is the same token, rather than one between those of settings as good as equal: tokens
    are drawn in the order of the vocabulary.
    """
    (token,), (expected,) = drawn(cpu, row[None], how), drawn(reference, row[None], how)
    if token != expected:
        settings = list(neighbours(how))
        near = drawn(reference, row.expand(len(settings), -1), *settings)
        first = 0 if how.number < CLOSE else min(near)  # before it are tokens of next to no weight,
        last = len(row) if how.number > 1 - CLOSE else max(near)  # and behind
        assert first <= token <= last and row[token] > -math.inf, how
    return token == expected


draws = st.builds(
    DrawSettings,
    temperature=st.sampled_from([0.0, 1e-6, 0.05, 0.7, 1.0, 2.0, 1000.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 300, 10**6]),
    top_p=st.sampled_from([1.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    number=st.floats(0, 1, exclude_max=True),
)


@st.composite
def rows(draw):
    """Logits of any width and spread; some rounded, so that many are equal, some masked."""
    size, seed = draw(st.integers(1, 1200)), draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(size, generator=generator) * draw(st.sampled_from([0.0, 0.3, 3.0, 30.0, 1e30]))
    if draw(st.booleans()):
        row = row.round()
    if draw(st.booleans()):
        masked = torch.rand(size, generator=generator) < 0.7
        masked[seed % size] = False
        row[masked] = -math.inf
    return row


@settings(max_examples=300, deadline=None)
@given(row=rows(), how=draws)
def test_a_draw_is_the_references(cpu, reference, row, how):
    assert_drawn_as_the_reference(cpu, reference, row, how)


@pytest.mark.parametrize("vocabulary", [49_152, 100_003])
def test_draws_from_large_vocabularies_are_the_references(cpu, reference, vocabulary):
    row = torch.randn(vocabulary, generator=torch.Generator().manual_seed(2)) * 3
    equal = 0
    for cut in ({}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 9000, "top_p": 0.7}, {"min_p": 0.01}):
        for number in (0.0, 0.2, 0.6, 0.93, 0.9999999):
            equal += assert_drawn_as_the_reference(cpu, reference, row, draw(number=number, **cut))
    assert equal >= 23  # of 25: the rest falls where roundings decide


def test_greedy_rows_take_the_first_of_the_largest(cpu, reference):
    generator = torch.Generator().manual_seed(0)
    for size in (1, 15, 16, 17, 255, 256, 257, 5000):
        logits = torch.randn(9, size, generator=generator).round()
        logits[3] = -FINITE
        expected = logits.max(dim=1).indices.tolist()
        assert cpu.sample(logits).tolist() == reference.sample(logits).tolist() == expected
        assert drawn(cpu, logits, *[draw(temperature=0.0)] * 9) == expected


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}])
def test_cuts_that_leave_one_token_are_greedy(cpu, cut):
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1))
    for number in (0.0, 0.5, 1 - 2**-53):
        assert drawn(cpu, logits, *[draw(number=number, **cut)] * 40) == logits.argmax(dim=1).tolist()


def test_equal_logits_are_cut_from_the_last_and_drawn_evenly(cpu):
    row = torch.zeros(1, 1000)
    row[0, :100] = -1.0
    for cut in ({"top_k": 300}, {"top_p": 300 / (900 + 100 * math.exp(-1)) - 1e-4}):
        tokens = [drawn(cpu, row, draw(number=(i + 0.5) / 300, **cut))[0] for i in range(300)]
        assert tokens == list(range(100, 400))


@pytest.mark.parametrize("place", [0, 300, 699])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.nan])
def test_a_row_that_is_not_finite_fails_alone(cpu, reference, bad, place):
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(3))
    broken = logits.clone()
    broken[1, place] = bad
    masked = broken.clone()
    masked[1] = -math.inf
    for how in ([draw(temperature=0.0)] * 3, [draw()] * 3, [draw(top_p=0.5)] * 3, [draw(top_k=9)] * 3):
        first, _, last = drawn(cpu, logits, *how)
        for ops in (cpu, reference):
            assert drawn(ops, broken, *how) == drawn(ops, masked, *how) == [first, -1, last]


def test_a_row_is_drawn_alone_as_in_any_company_and_by_any_number_of_threads(cpu):
    wide = torch.randn(64, 5003, generator=torch.Generator().manual_seed(4)) * 3
    logits = wide[:, 1:-1]
    cuts = [
        {},
        {"top_p": 0.8},
        {"top_k": 40},
        {"min_p": 0.05},
        {"temperature": 0.0},
        {"top_k": 9, "top_p": 0.5},
    ]
    how = [draw(number=i / 64, **cuts[i % len(cuts)]) for i in range(64)]
    together = drawn(cpu, logits, *how)
    assert together == [drawn(cpu, logits[i : i + 1], how[i])[0] for i in range(64)]
    try:
        cpu.set_num_threads(1)
        assert drawn(cpu, logits.flip(0), *reversed(how)) == together[::-1]
    finally:
        cpu.set_num_threads(2)


def test_instruction_sets_draw_the_same(each_set):
    logits = torch.randn(200, 3001, generator=torch.Generator().manual_seed(5)) * 2
    cuts = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}, {"top_k": 900, "top_p": 0.7}]
    how = [draw(temperature=0.8, number=i / 200, **cuts[i % len(cuts)]) for i in range(200)]
    first, *others = [drawn(ops, logits, *how) for ops in each_set]
    assert others == [first] * len(others)


def test_other_dtypes_are_refused(cpu):
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.sample(torch.zeros(1, 9, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="float32"):
        cpu.sample(torch.zeros(1, 9), torch.zeros(1, 5))
