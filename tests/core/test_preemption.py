"""The means by which a victim gives way, from measured rates."""

from __future__ import annotations

import pytest

from octavo.core.preemption import FIRST_COPY_RATE, CopyRate, choose, tokens_kept


@pytest.mark.parametrize(
    ("tokens", "rate", "size", "copies", "means"),
    [
        (1000, 1000.0, 10_000_000, 1e9, "swap"),  # 1 s again against 20 ms of copies
        (10, 1000.0, 10_000_000, 1e9, "recompute"),  # 10 ms
        (20, 1000.0, 10_000_000, 1e9, "recompute"),  # as long either way
        (1000, 0.0, 1, 1e9, "recompute"),  # nothing was measured yet
        (0, 1000.0, 1, 1e9, "recompute"),  # the prefix cache will still hold it all
    ],
)
def test_the_cheaper_means_is_chosen(tokens, rate, size, copies, means):
    assert choose(tokens, rate, size, copies) == means


def test_a_victims_prefix_is_kept_while_others_find_older_blocks():
    assert tokens_kept(100, free=50, others=10, block_size=16) == 96
    assert tokens_kept(100, free=0, others=2, block_size=16) == 64
    assert tokens_kept(100, free=0, others=50, block_size=16) == 0


def test_the_copy_rate_is_that_of_the_copies_of_late():
    rate = CopyRate()
    assert rate.bytes_per_s == FIRST_COPY_RATE
    rate.measure(1 << 20, 1.0)
    assert rate.bytes_per_s == 1 << 20
    for _ in range(20):
        rate.measure(1 << 30, 0.1)
    assert rate.bytes_per_s == pytest.approx(10 * (1 << 30), rel=0.01)
