"""The counter-based generator: published vectors, and independence of order and company."""

import numpy as np
import pytest

from octavo.sampling.random import philox, uniforms


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, expected) -> None:
    assert tuple(int(word[0]) for word in philox(words(*counter), words(*key))) == expected


def test_a_number_depends_on_its_own_seed_sample_and_position_only() -> None:
    draws = [
        (seed, sample, position) for seed in (-1, 0, 2**63 - 1) for sample in (0, 1) for position in range(9)
    ]
    together = uniforms(draws)
    alone = [uniforms([draw])[0] for draw in draws]
    assert together == alone
    assert len(set(alone)) == len(draws)


def test_numbers_are_uniform() -> None:
    numbers = np.array(uniforms([(7, 0, position) for position in range(20_000)]))
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi2 = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert chi2 < 43.8  # 99.9 % quantile for 19 degrees of freedom
