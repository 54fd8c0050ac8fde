"""Which tokens of a step are drawn from, the draws, and what they say of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from torch import Tensor

from octavo.core.plan import Row, RowResult, SampleSpec, TokenLogprobs
from octavo.models.base import CausalLM
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.rules import Past
from octavo.sampling.sampler import NOT_FINITE, Draw, Sampler
from octavo.worker.device import Device

LOGIT_ROWS = 256  # rows of logits held at once: with a vocabulary of 262,144 a quarter of a GiB

Wanted: TypeAlias = tuple[int, SampleSpec, Past | None]


class Drawer:
    """From a model's hidden states to draws, a bounded number of logits at a time.

    Without a sampler only this rank's share of the logits is computed, for the first rank, which draws.
    """

    def __init__(self, model: CausalLM, sampler: Sampler | None, device: Device) -> None:
        self._model, self._sampler, self._device = model, sampler, device

    @property
    def draws(self) -> bool:
        """Whether this rank does."""
        return self._sampler is not None

    def draw(self, hidden: Tensor, wanted: Sequence[Wanted]) -> list[Draw]:
        """One draw for each of ``wanted`` from the hidden states [T, hidden] of a step."""
        draws: list[Draw] = []
        for first in range(0, len(wanted), LOGIT_ROWS):
            tokens, specs, pasts = zip(*wanted[first : first + LOGIT_ROWS], strict=True)
            logits = self._logits(hidden, tokens)
            if self._sampler is not None:
                draws += self._sampler.sample(logits, specs, pasts)
        return draws

    def score_prompt(self, hidden: Tensor, row: Row, end: int) -> list[Draw]:
        """The log probabilities of the known tokens that follow each of a row's own, which end before
        ``end``.
        """
        assert row.history is not None and row.prompt_logprobs is not None
        begin = end - len(row.drafts) - len(row.token_ids)
        following = row.history[row.start + 1 : row.start + 1 + len(row.token_ids)]
        scores: list[Draw] = []
        for first in range(0, len(following), LOGIT_ROWS):
            part = following[first : first + LOGIT_ROWS]
            tokens = range(begin + first, begin + first + len(part))
            scored = self._logits(hidden, tokens)
            if self._sampler is None:
                continue
            (rows,) = self._device.read(scored)()
            for token, logits in zip(part, rows, strict=True):
                known = np.isfinite(logits.max())
                logprobs = token_logprobs(logits, token, row.prompt_logprobs) if known else None
                scores.append(Draw(token, logprobs, None if known else NOT_FINITE))
        return scores

    def _logits(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """Float32 logits [len(tokens), V] after these tokens of the step; ``tokens`` may repeat some."""
        if len(tokens) == len(hidden) and list(tokens) == list(range(len(hidden))):
            return self._model.logits(hidden, None)
        return self._model.logits(hidden, self._device.tensor(tokens))


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
            return RowResult(row.request_id, [], error=draw.error, refused=draw.refused)
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
