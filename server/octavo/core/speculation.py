"""Drafts: whose next step carries some, how many of them hold, and when they are not worth their cost.

A draft costs a token of the step and saves a step of its sequence when it is accepted. Both sides are
measured. A sequence whose drafts are mostly rejected gets none, but for one now and then (``PROBE_TOKENS``)
that tells when its text has become easier to guess. And for each size of batch the tokens a second of steps
with drafts are held against those of steps without: the faster way is taken, the other one is tried again in
one of ``PROBE_STEPS`` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.core.group import Planned
from octavo.core.kv_cache import KVCache
from octavo.core.request import Request

MIN_ACCEPTANCE = 0.25  # of drafts that were judged; below it they cost more than they save on any machine
KEEP_ACCEPTANCE = 0.9  # weight of what was known beside one more judged draft
PROBE_TOKENS = 32  # a sequence with hopeless drafts tries one again after so many tokens
PROBE_STEPS = 64  # steps after which the slower way is tried once more,
PROBE_RUN = 2  # for so many steps: a draft model's proposals are drawn in the step before
MAX_UNFOLLOWED = 64  # tokens that a draft model catches up on; a sequence further ahead of it gets no drafts
MIN_STEPS = 4  # steps of one way before it is compared with the other
KEEP_PACE = 0.98  # weight of the steps so far beside one more


class Proposer(Protocol):
    """Guesses the next tokens of one sequence from its tokens."""

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens that may follow; the list has grown at its end since the last call."""


class Pace:
    """Tokens a second over steps, old ones counting less."""

    def __init__(self) -> None:
        self.steps = 0
        self._tokens = 0.0
        self._seconds = 0.0

    def measure(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        self._tokens = KEEP_PACE * self._tokens + tokens
        self._seconds = KEEP_PACE * self._seconds + seconds

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class SpeculationControl:
    """Whether steps with so many decoding rows are faster with drafts or without."""

    def __init__(self) -> None:
        self._paces: dict[int, tuple[Pace, Pace, list[int]]] = {}  # by size: without, with, steps counted

    def worthwhile(self, rows: int) -> bool:
        """Whether the next step of ``rows`` decoding rows should carry drafts."""
        without, with_, count = self._size(rows)
        if with_.steps < MIN_STEPS or without.steps < MIN_STEPS:
            return with_.steps <= without.steps
        count[0] += 1
        faster = with_.tokens_per_s > without.tokens_per_s
        return faster != (count[0] % PROBE_STEPS < PROBE_RUN)

    def measure(self, rows: int, drafted: bool, tokens: int, seconds: float) -> None:
        """Take in a step of decoding rows alone that gave ``tokens`` in all."""
        without, with_, _ = self._size(rows)
        (with_ if drafted else without).measure(tokens, seconds)

    def _size(self, rows: int) -> tuple[Pace, Pace, list[int]]:
        return self._paces.setdefault(rows.bit_length(), (Pace(), Pace(), [0]))


class Speculation:
    """The drafts of an engine's sequences, up to ``limit`` a row, and what has become of them.

    ``make_proposer`` gives a sequence its own proposer; without, drafts come back with the results of steps
    (``Request.drafts``).
    """

    def __init__(self, limit: int, make_proposer: Callable[[], Proposer] | None) -> None:
        self.limit = limit
        self.control = SpeculationControl()
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted = 0
        self.accepted_at = [0] * limit
        self._make_proposer = make_proposer
        self._on = True

    def add_drafts(self, rows: Sequence[Planned], budget: int, kv: KVCache) -> None:
        """Let decoding rows carry drafts, as far as the step's budget, the blocks and the limits go."""
        decoding = [
            row
            for row in rows
            if row.end == row.start + 1 == len(row.request.token_ids)
            and row.group.shared
            and row.group.search is None
            and not row.request.finished
        ]
        left = budget - sum(row.end - row.start for row in rows)
        before = self._on
        if decoding:
            self._on = self.control.worthwhile(len(decoding))
        if self._make_proposer is None:
            self._use(decoding if before else [], left, kv)
            self._ask(rows, left - sum(len(row.drafts) for row in decoding), kv)
        else:
            self._use(decoding if self._on else [], left, kv)

    def _use(self, rows: Sequence[Planned], left: int, kv: KVCache) -> None:
        for row in rows:
            drafts = self.drafts(row.request)[: max(0, left)]
            if drafts and kv.grow(row.request, row.end + len(drafts), row.start):
                row.drafts = drafts
                left -= len(drafts)

    def _ask(self, rows: Sequence[Planned], left: int, kv: KVCache) -> None:
        """Let the draft model follow the rows, and propose what comes after those that draw.

        The blocks grow for the proposals where there are some; else there will be fewer.
        """
        for row in rows:
            request, behind = row.request, min(row.request.unfollowed, row.start)
            hopeless = request.acceptance < MIN_ACCEPTANCE or row.group.search is not None
            if not self._on or hopeless or behind > min(left, MAX_UNFOLLOWED):
                request.unfollowed = behind + row.end - row.start
                continue
            left -= behind
            row.propose, row.drafted, request.unfollowed = self.limit, row.start - behind, 0
            if row.end == len(request.token_ids) and row.group.shared:
                end = row.end + len(row.drafts) + self.limit
                kv.grow(request, min(end, request.max_total_tokens), row.start)

    def drafts(self, request: Request) -> list[int]:
        """What may follow a sequence all of whose tokens are computed or planned."""
        limit = min(self.limit, request.max_total_tokens - len(request.token_ids) - 1)
        if request.acceptance < MIN_ACCEPTANCE:
            request.undrafted += 1
            if request.undrafted < PROBE_TOKENS:
                return []
            request.undrafted, limit = 0, min(1, limit)
        if limit <= 0:
            return []
        if self._make_proposer is None:
            return request.drafts[:limit]
        if request.proposer is None:
            request.proposer = self._make_proposer()
        return request.proposer.propose(request.token_ids, limit)

    def judge(self, request: Request, drafts: int, accepted: int) -> None:
        """Take in that of so many drafts the first ``accepted`` held."""
        self.num_drafts += 1
        self.num_draft_tokens += drafts
        self.num_accepted += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1
        for judged in range(min(drafts, accepted + 1)):
            held = judged < accepted
            request.acceptance = KEEP_ACCEPTANCE * request.acceptance + (1 - KEEP_ACCEPTANCE) * held
