"""Beam search over log probabilities, step for step as transformers' ``generate(num_beams=n)`` does it.

In each step every continuation of every running beam has a score, the sum of the log probabilities of its
generated tokens. Of the best ``width`` continuations those that end (a stop token, or the length) and are
among the first n become results, if their sum / (generated tokens ** length_penalty) is among the n best so
far; the n best of the others run on. The search ends when no running beam can better the worst of n results
(judged by its score at its present length), with ``early_stopping`` as soon as there are n results, and at
the longest length. The prompt counts nowhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from octavo.core.plan import TokenLogprobs


class Beam(msgspec.Struct, frozen=True):
    """Generated tokens, each with its log probabilities, and their sum."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    total: float


class Result(msgspec.Struct, frozen=True):
    """A continuation that has ended; ``score`` is its sum after the length penalty."""

    beam: Beam
    score: float


class BeamSearch:
    """``beams`` run; ``results`` have ended, best first.

    ``stop_token_ids`` end a beam; ``max_tokens`` is the longest output.
    """

    def __init__(
        self,
        num_beams: int,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        length_penalty: float,
        early_stopping: bool,
    ) -> None:
        self.num_beams = num_beams
        self.width = max(2, 1 + len(stop_token_ids)) * num_beams
        self.beams = [Beam([], [], 0.0)]
        self.results: list[Result] = []
        self.done = False
        self._max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    def step(self, drawn: Sequence[TokenLogprobs]) -> list[int]:
        """Go one token on, given the ``width`` likeliest tokens after each beam. Returns the parent (its
        place) of each new beam.
        """
        length = len(self.beams[0].token_ids) + 1
        candidates = (
            (self.beams[place].total + logprob, place, rank, token, logprob)
            for place, each in enumerate(drawn)
            for rank, (token, logprob) in enumerate(each.top)
        )
        best = heapq.nsmallest(self.width, candidates, key=lambda one: (-one[0], one[1], one[2]))
        ended, going = [], []
        for index, (total, place, rank, token, logprob) in enumerate(best):
            beam = _follow(
                self.beams[place], total, token, TokenLogprobs(logprob, rank + 1, drawn[place].top)
            )
            if length < self._max_tokens and token not in self.stop_token_ids:
                going.append((place, beam))
            elif index < self.num_beams:
                ended.append(Result(beam, total / length**self._length_penalty))
        self.results = sorted(self.results + ended, key=lambda one: -one.score)[: self.num_beams]
        del going[self.num_beams :]
        self.beams = [beam for _, beam in going]
        self.done = not self.beams or (len(self.results) == self.num_beams and self._settled(length))
        return [place for place, _ in going]

    def _settled(self, length: int) -> bool:
        if self._early_stopping:
            return True
        best: float = self.beams[0].total / length**self._length_penalty
        return best <= self.results[-1].score


def _follow(beam: Beam, total: float, token: int, logprobs: TokenLogprobs) -> Beam:
    return Beam([*beam.token_ids, token], [*beam.logprobs, logprobs], total)
