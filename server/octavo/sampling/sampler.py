"""From logits to tokens. Each row is drawn by itself, so no row changes because of its neighbours.

Greedy rows cost one argmax. A random row is drawn by inverting the cumulative distribution at one uniform
number (``octavo.sampling.random``): over the vocabulary in its order, or, where min-p, top-k or top-p cut it
(in this order, after the temperature, as vLLM), over the tokens from the most likely down, equal ones by id.
A row with rules (``octavo.sampling.rules``) is drawn from a changed copy. All of it runs in numpy: on CPUs
its argmax, sort and exp are many times faster than torch's, and a row's result does not depend on how many
rows there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import SampleSpec, TokenLogprobs
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.random import uniforms
from octavo.sampling.rules import Past, Row, RuleBook, RuleFault

MIN_TEMPERATURE = 1e-6  # below it float32 logits differ by more than the temperature: the draw is greedy
NOT_FINITE = "the model produced logits that are not finite numbers (NaN or infinity)"
NO_TOKEN_LEFT = "the request's allowed_token_ids, bad_words and grammar leave no token to draw"
_PART = 64  # tokens summed together before the cumulative sum


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """What one row gave: a token, with its log probabilities if asked for, or an error; ``refused``: one that
    the request's own settings lead to.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    refused: bool = False


class Sampler:
    """Draws tokens. ``rules`` keeps what it counted for the sequences whose rows have rules."""

    def __init__(self, rules: RuleBook) -> None:
        self._rules = rules

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], pasts: Sequence[Past | None] | None = None
    ) -> list[Draw]:
        """Draw one token for each row of float32 logits [S, V].

        ``pasts`` say what each draw follows; a row without rules needs none. Draws of one past may come with
        different positions, one after each of its drafts.

        A row with NaN, +infinity or nothing but -infinity gets an error, and so does one whose rules leave no
        token; -infinity alone is a token of probability zero. Equal logits: the lowest token id wins. Log
        probabilities are the model's own, before rules, temperature and cuts.
        """
        best, peaks = _maxima(logits)
        errors = [None if fine else NOT_FINITE for fine in np.isfinite(peaks).tolist()]
        random = [i for i, spec in enumerate(specs) if spec.temperature > 0 and errors[i] is None]
        numbers = dict(zip(random, _uniforms(specs, random), strict=True)) if random else {}
        ruled = [i for i, spec in enumerate(specs) if spec.rules is not None and errors[i] is None]
        shown = [i for i, spec in enumerate(specs) if spec.logprobs is not None]
        rows = _rows(logits, sorted({*random, *ruled, *shown}))
        changed = dict(rows)
        for i in ruled:
            try:
                changed[i] = self._changed(rows[i], specs[i], pasts[i] if pasts else None)
            except RuleFault as fault:
                errors[i] = str(fault)
                continue
            best[i] = int(changed[i].argmax())
            peaks[i] = changed[i][best[i]]
            if not np.isfinite(peaks[i]):
                errors[i] = NO_TOKEN_LEFT if np.isneginf(peaks[i]) else NOT_FINITE
        draws = []
        for i, spec in enumerate(specs):
            if (error := errors[i]) is not None:
                draws.append(Draw(token=-1, error=error, refused=error == NO_TOKEN_LEFT))
                continue
            token = _draw(changed[i], peaks[i], spec, numbers[i]) if i in numbers else best[i]
            logprobs = None if spec.logprobs is None else token_logprobs(rows[i], token, spec.logprobs)
            draws.append(Draw(token, logprobs))
        return draws

    def _changed(self, row: Row, spec: SampleSpec, past: Past | None) -> Row:
        if spec.rules is None or past is None:
            raise ValueError("a draw with rules needs the tokens that it follows")
        return self._rules.changed(row, spec.rules, past, spec.position)


def _maxima(logits: Tensor) -> tuple[list[int], Row]:
    """The largest logit of each row: its token, and itself. A NaN counts as the largest, so it shows here."""
    if logits.device.type == "cpu":
        rows = logits.numpy()
        best = rows.argmax(axis=1)
        return best.tolist(), rows[np.arange(len(best)), best]
    index = torch.argmax(logits, dim=1, keepdim=True)
    return index[:, 0].tolist(), logits.gather(1, index)[:, 0].cpu().numpy()


def _rows(logits: Tensor, needed: Sequence[int]) -> dict[int, Row]:
    """The rows that are looked at beyond their maximum, in host memory."""
    if logits.device.type == "cpu":
        rows = logits.numpy()
        return {i: rows[i] for i in needed}
    copied = logits[list(needed)].cpu().numpy()
    return dict(zip(needed, copied, strict=True))


def _uniforms(specs: Sequence[SampleSpec], chosen: Sequence[int]) -> list[float]:
    numbers: list[float] = uniforms(
        [(specs[i].seed, specs[i].sample_index, specs[i].position) for i in chosen]
    ).tolist()
    return numbers


def _draw(row: Row, peak: np.float32, spec: SampleSpec, number: float) -> int:
    inverse = np.float32(1.0 / max(spec.temperature, MIN_TEMPERATURE))
    if spec.top_k in (0, -1) and spec.top_p >= 1.0 and spec.min_p <= 0.0:
        return _draw_from_all(np.exp((row - peak) * inverse), number)
    return _draw_from_top(row, peak, inverse, spec, number)


def _draw_from_all(weights: Row, number: float) -> int:
    """Invert the cumulative sum in two steps: over sums of parts of the vocabulary, then inside one part."""
    parts = np.add.reduceat(weights, np.arange(0, len(weights), _PART)).astype(np.float64)
    cumulative = np.cumsum(parts)
    target = number * cumulative[-1]
    part = int(np.searchsorted(cumulative, target, side="right"))
    part = min(part, _last_positive(parts))
    inside = weights[part * _PART : (part + 1) * _PART].astype(np.float64)
    before = cumulative[part - 1] if part else 0.0  # at most the target, so no token of probability zero
    offset = int(np.searchsorted(np.cumsum(inside) + before, target, side="right"))
    return part * _PART + min(offset, _last_positive(inside))


def _draw_from_top(row: Row, peak: np.float32, inverse: np.float32, spec: SampleSpec, number: float) -> int:
    """Keep the tokens at least min_p times as likely as the first, the k most likely of them, and of those
    the fewest that hold top_p of their mass (at least one); draw among them.
    """
    values = row
    if spec.min_p > 0.0:
        values = row[np.exp((row - peak) * inverse) >= np.float32(spec.min_p)]
    size = len(values)
    kept = size if spec.top_k in (0, -1) else min(spec.top_k, size)
    if kept < size:
        values = np.partition(values, size - kept)[size - kept :]
    descending = np.sort(values)[::-1]
    cumulative = np.cumsum(np.exp((descending - peak) * inverse), dtype=np.float64)
    if spec.top_p < 1.0:
        kept = min(kept, int(np.searchsorted(cumulative, spec.top_p * cumulative[-1], side="left")) + 1)
    place = int(np.searchsorted(cumulative[:kept], number * cumulative[kept - 1], side="right"))
    place = min(place, kept - 1)
    value = descending[place]
    among_equals = place - int(np.searchsorted(-descending, -value, side="left"))
    return int(np.flatnonzero(row == value)[among_equals])


def _last_positive(weights: NDArray[np.float64]) -> int:
    return int(np.flatnonzero(weights > 0)[-1])
