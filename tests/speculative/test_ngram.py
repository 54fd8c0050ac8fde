"""Prompt lookup: the longest suffix that occurred before, at its most recent place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.speculative.ngram import NgramProposer


def looked_up(tokens, low, high, limit):
    """The definition, in few words and slowly."""
    for size in range(min(high, len(tokens) - 1), low - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + limit]
    return []


@given(
    tokens=st.lists(st.sampled_from([0, 1, 256, 65536, 2**31]), min_size=1, max_size=40),
    grown=st.integers(0, 40),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    limit=st.integers(1, 5),
)
def test_proposals_are_those_of_the_definition_however_the_text_grew(tokens, grown, low, more, limit):
    proposer = NgramProposer(low, low + more)
    if grown:
        proposer.propose(tokens[:grown], limit)
    assert proposer.propose(tokens, limit) == looked_up(tokens, low, low + more, limit)


def test_the_longest_match_wins_over_a_later_shorter_one():
    assert NgramProposer(1, 3).propose([1, 2, 3, 9, 9, 3, 7, 1, 2, 3], 2) == [9, 9]
    assert NgramProposer(1, 1).propose([1, 2, 3, 9, 9, 3, 7, 1, 2, 3], 2) == [7, 1]
