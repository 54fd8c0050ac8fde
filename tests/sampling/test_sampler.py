"""The sampler: distributions, cuts, ties, faults, and rows that know nothing of their neighbours."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from octavo.core.plan import SampleSpec
from octavo.sampling.rules import RuleBook
from octavo.sampling.sampler import Draw, Sampler
from octavo_kernels import KernelsUnavailable, load

Sample = Callable[..., list[Draw]]


@pytest.fixture(scope="module", params=["cpu", "reference"])
def sample(request) -> Sample:
    try:
        return Sampler(load(request.param), RuleBook(8)).sample
    except KernelsUnavailable as why:
        pytest.skip(str(why))


def spec(
    temperature=1.0, top_k=0, top_p=1.0, seed=0, sample_index=0, position=0, logprobs=None, min_p=0.0
) -> SampleSpec:
    return SampleSpec(temperature, top_k, top_p, seed, sample_index, position, logprobs, min_p)


def tokens(sample: Sample, logits: torch.Tensor, specs: list[SampleSpec]) -> list[int]:
    return [draw.token for draw in sample(logits, specs)]


def frequencies(sample: Sample, row: torch.Tensor, draws: int, **settings) -> np.ndarray:
    specs = [spec(position=i, **settings) for i in range(draws)]
    drawn = tokens(sample, row.expand(draws, -1), specs)
    return np.bincount(drawn, minlength=len(row)) / draws


def chi2(observed: np.ndarray, expected: np.ndarray, draws: int) -> float:
    kept = expected > 0
    assert observed[~kept].sum() == 0
    return float((draws * (observed[kept] - expected[kept]) ** 2 / expected[kept]).sum())


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(70, 300, generator=torch.Generator().manual_seed(1)) * 3


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(sample: Sample) -> None:
    row = torch.zeros(2, 10)
    row[0, [3, 7]] = 2.0
    assert tokens(sample, row, [spec(temperature=0)] * 2) == [3, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_each_temperature(sample: Sample, temperature: float) -> None:
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5] + [-2.0] * 195)
    expected = torch.softmax(row.double() / temperature, 0).numpy()
    observed = frequencies(sample, row, 20_000, temperature=temperature)
    few = np.append(expected[:5], expected[5:].sum())
    assert chi2(np.append(observed[:5], observed[5:].sum()), few, 20_000) < 20.5  # 99.9 %, 5 degrees


def test_top_k_and_top_p_cut_and_renormalise(sample: Sample) -> None:
    row = torch.log(torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1]))
    cases = [
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.8}, [0, 0.4 / 0.85, 0.15 / 0.85, 0.3 / 0.85, 0]),
        ({"top_p": 0.3}, [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7, 0]),  # top_p counts the mass that top_k left: 0.85
        ({"min_p": 0.3}, [0, 0.4 / 0.85, 0.15 / 0.85, 0.3 / 0.85, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.3, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),  # and that min_p left: 0.7 of 0.85
        ({"min_p": 0.01}, [0.05, 0.4, 0.15, 0.3, 0.1]),
    ]
    for settings, expected in cases:
        assert (
            chi2(frequencies(sample, row, 10_000, **settings), np.array(expected), 10_000) < 16.3
        )  # 99.9 %, 3 degrees


def test_ties_at_the_cut_go_to_the_lowest_ids(sample: Sample) -> None:
    row = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    assert set(np.flatnonzero(frequencies(sample, row, 500, top_k=3))) == {1, 2, 5}


def test_top_k_of_the_whole_vocabulary_and_more_cuts_nothing(sample: Sample, logits: torch.Tensor) -> None:
    specs = [spec(top_k=k, position=i, seed=3) for i, k in enumerate([300, 301, 10**6] * 20)]
    capped = [spec(top_k=300, position=i, seed=3) for i in range(60)]
    assert tokens(sample, logits[:60], specs) == tokens(sample, logits[:60], capped)


def test_a_row_is_the_same_alone_and_in_any_company(sample: Sample, logits: torch.Tensor) -> None:
    """Case 1: a seeded request beside one without a seed, and every other mixture."""
    settings = [
        {"temperature": 0.8}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 1.7,
        "logprobs": 3}, {"min_p": 0.1}, {"min_p": 0.02, "top_k": 9, "top_p": 0.8},
    ]  # fmt: skip
    specs = [spec(seed=42, position=i, **settings[i % 7]) for i in range(70)]
    together = sample(logits, specs)
    assert together == [sample(logits[i : i + 1], [specs[i]])[0] for i in range(70)]
    order = list(reversed(range(70)))
    assert together == list(reversed(sample(logits[order], [specs[i] for i in order])))


def test_samples_of_one_seed_differ(sample: Sample, logits: torch.Tensor) -> None:
    row = logits[:1].expand(40, -1) / 3
    streams = [
        tuple(tokens(sample, row, [spec(seed=7, sample_index=n, position=i) for i in range(40)]))
        for n in range(3)
    ]
    assert len(set(streams)) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_fails_alone(
    sample: Sample, logits: torch.Tensor, bad: float, temperature: float
) -> None:
    broken = logits[:3].clone()
    broken[1, 17] = bad
    specs = [spec(temperature=temperature, position=i) for i in range(3)]
    draws = sample(broken, specs)
    assert draws[1].error is not None and "finite" in draws[1].error
    healthy = sample(logits[:3], specs)
    assert (draws[0], draws[2]) == (healthy[0], healthy[2])


def test_minus_infinity_is_a_token_that_is_never_drawn(sample: Sample) -> None:
    row = torch.full((130,), float("-inf"))
    row[5] = row[129] = 0.0
    assert set(np.flatnonzero(frequencies(sample, row, 300))) == {5, 129}
    assert sample(torch.full((1, 9), float("-inf")), [spec()])[0].error is not None


def test_a_tiny_temperature_is_greedy(sample: Sample, logits: torch.Tensor) -> None:
    specs = [spec(temperature=1e-300, position=i) for i in range(70)]
    assert tokens(sample, logits, specs) == logits.argmax(1).tolist()


def test_logprobs_are_the_models_own_with_rank_and_alternatives(sample: Sample, logits: torch.Tensor) -> None:
    truth = torch.log_softmax(logits.double(), -1)
    draws = sample(logits, [spec(temperature=1.5, position=i, logprobs=4) for i in range(70)])
    for row, draw in zip(truth, draws, strict=True):
        assert draw.logprobs is not None
        assert draw.logprobs.logprob == pytest.approx(float(row[draw.token]), abs=1e-5)
        assert draw.logprobs.rank == 1 + int((row > row[draw.token]).sum())
        values, ids = row.topk(4)
        assert [token for token, _ in draw.logprobs.top] == ids.tolist()
        assert [value for _, value in draw.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_of_equals_rank_by_id_and_zero_alternatives_are_none(sample: Sample) -> None:
    draw = sample(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [spec(temperature=0, logprobs=3)])[0]
    assert draw.logprobs is not None
    assert (draw.logprobs.rank, [t for t, _ in draw.logprobs.top]) == (1, [1, 2, 0])
    only = sample(torch.tensor([[1.0, 2.0]]), [spec(temperature=0, logprobs=0)])[0]
    assert only.logprobs is not None and only.logprobs.top == []


def kept_by_transformers(row: torch.Tensor, *processors) -> set[int]:
    scores = row[None].clone()
    for processor in processors:
        scores = processor(None, scores)
    return set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_the_cuts_keep_what_transformers_keeps(
    sample: Sample, logits: torch.Tensor, temperature: float
) -> None:
    """In transformers' order but for min-p, which comes first here as in vLLM."""
    from transformers.generation import logits_process as theirs

    row = logits[0, :40]
    warm = theirs.TemperatureLogitsWarper(temperature)
    cases = [
        ({"min_p": 0.15}, [warm, theirs.MinPLogitsWarper(0.15)]),
        ({"top_k": 6}, [warm, theirs.TopKLogitsWarper(6)]),
        ({"top_p": 0.75}, [warm, theirs.TopPLogitsWarper(0.75)]),
        ({"top_k": 6, "top_p": 0.75}, [warm, theirs.TopKLogitsWarper(6), theirs.TopPLogitsWarper(0.75)]),
        (
            {"min_p": 0.05, "top_k": 9, "top_p": 0.9},
            [warm, theirs.MinPLogitsWarper(0.05), theirs.TopKLogitsWarper(9), theirs.TopPLogitsWarper(0.9)],
        ),
    ]
    for settings, processors in cases:
        drawn = set(np.flatnonzero(frequencies(sample, row, 6000, temperature=temperature, **settings)))
        assert drawn == kept_by_transformers(row, *processors), settings
