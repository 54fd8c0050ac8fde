"""The step plan: what the scheduler asks of an executor, and what comes back. Plain values, no tensors.

What is made once a row and step is kept from the garbage collector (``gc=False``): it lies in no cycle, and
hundreds a step would set the collector off in every one.
"""

from __future__ import annotations

import msgspec


class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """How to draw the next token of one row.

    The draw is a pure function of (seed, sample_index, position): the same whatever the batch, and replayable
    elsewhere. ``position`` is the index of the token to be drawn within the whole sequence, prompt included.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    sample_index: int
    position: int
    logprobs: int | None = None


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: tokens to compute at positions ``start``, ``start + 1``, ...

    ``block_tables`` holds one list of physical block numbers per KV group, long enough for the last token
    computed. ``sample`` is None when the chunk does not reach the end of the sequence (nothing is drawn).
    ``drafts`` are the speculative tokens at the end of ``token_ids``, to be verified.
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_tables: list[list[int]]
    sample: SampleSpec | None
    drafts: list[int] = []


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass. ``copies`` are (source, destination) blocks to copy first (copy on write)."""

    step: int
    rows: list[Row]
    copies: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities at one position: the drawn token's, its rank (1 = most likely), the top k."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """Tokens drawn for one row: one, or more with speculation; none when ``sample`` was None.

    ``error`` is set when this row alone failed (for instance NaN logits).
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced, rows in the order of the plan."""

    step: int
    rows: list[RowResult]
