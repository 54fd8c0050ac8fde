"""Which tokens of a step are drawn from, and what the draws say of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec

from octavo.core.plan import Row, RowResult, SampleSpec, TokenLogprobs
from octavo.sampling.rules import Past
from octavo.sampling.sampler import Draw

Wanted: TypeAlias = tuple[int, SampleSpec, Past | None]


def draws_of(row: Row, end: int) -> Iterator[Wanted]:
    """(token of the batch whose logits are drawn from, how, after what) for a row whose last token is
    ``end`` - 1.

    Several samples draw from the same logits. With drafts one is drawn at each draft's place and one after.
    """
    first = end - 1 - len(row.drafts)
    past = None if row.history is None else Past(row.request_id, row.history, row.drafts)
    if not row.drafts:
        yield from ((first, spec, past) for spec in row.samples)
    elif row.samples:
        yield from ((first + i, moved(row.samples[0], i), past) for i in range(len(row.drafts) + 1))


def moved(spec: SampleSpec, by: int) -> SampleSpec:
    """The same sample's draw so many tokens later."""
    return msgspec.structs.replace(spec, position=spec.position + by) if by else spec


def row_result(row: Row, draws: Sequence[Draw], scores: Sequence[Draw] | None = None) -> RowResult:
    """What a row's draws, and the scores of its prompt, amount to.

    A draft is accepted where it equals the draw at its place: what is drawn after it then stands on the
    target's own tokens. The first draw that differs is the row's last token.
    """
    if row.drafts:
        draws = draws[: 1 + accepted(row.drafts, draws)]
    for draw in (*draws, *(scores or ())):
        if draw.error is not None:
            return RowResult(row.request_id, [], error=draw.error)
    return RowResult(
        row.request_id,
        [draw.token for draw in draws],
        _logprobs(draws) or None,
        prompt_logprobs=None if scores is None else _logprobs(scores),
    )


def _logprobs(draws: Sequence[Draw]) -> list[TokenLogprobs]:
    return [draw.logprobs for draw in draws if draw.logprobs is not None]


def accepted(drafts: Sequence[int], draws: Sequence[Draw]) -> int:
    """How many drafts from the first on equal the draws."""
    for place, (draft, draw) in enumerate(zip(drafts, draws, strict=False)):
        if draft != draw.token:
            return place
    return len(drafts)
