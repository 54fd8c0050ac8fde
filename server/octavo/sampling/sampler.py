"""From logits to tokens. Each row is drawn by itself, so no row changes because of its neighbours.

The kernels draw (:meth:`octavo_kernels.Ops.sample`): they take the largest logit, or invert the cumulative
distribution at one uniform number (``octavo.sampling.random``), over the tokens that min-p, top-k and top-p
keep (in this order, after the temperature, as vLLM). A row with rules (``octavo.sampling.rules``) is drawn
from a changed copy; it and log probabilities are numpy's work, one row at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import SampleSpec, TokenLogprobs
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.random import uniforms
from octavo.sampling.rules import Past, Row, RuleBook, RuleFault
from octavo_kernels import DrawSettings, Ops

MIN_TEMPERATURE = 1e-6  # below it float32 logits differ by more than the temperature: the draw is greedy
NOT_FINITE = "the model produced logits that are not finite numbers (NaN or infinity)"
NO_TOKEN_LEFT = "the request's allowed_token_ids, bad_words and grammar leave no token to draw"
_GREEDY = DrawSettings(0.0, 0, 1.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """What one row gave: a token, with its log probabilities if asked for, or an error; ``refused``: one that
    the request's own settings lead to.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    refused: bool = False


Read: TypeAlias = Callable[..., Callable[[], list[NDArray[Any]]]]
"""Starts to bring tensors of a GPU to the host -> what waits for them."""


class Sampler:
    """Draws tokens. ``rules`` keeps what it counted for the sequences whose rows have rules.

    Logits lie in host memory, or on a GPU from which ``read`` brings the draws and what else is looked at.
    """

    def __init__(self, ops: Ops, rules: RuleBook, read: Read | None = None) -> None:
        self._ops, self._rules, self._read = ops, rules, read

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
        ruled = [i for i, spec in enumerate(specs) if spec.rules is not None]
        random = [i for i, spec in enumerate(specs) if spec.temperature > 0]
        settings = _settings(specs, random) if random else {}
        drawn = self._draw(logits, {i: each for i, each in settings.items() if specs[i].rules is None})
        shown = [i for i, spec in enumerate(specs) if spec.logprobs is not None]
        tokens, rows = self._look(drawn, logits, sorted({*ruled, *shown}))
        errors = {i: NOT_FINITE for i, token in enumerate(tokens) if token < 0}
        changed: dict[int, Row] = {}
        for i in ruled:
            if i not in errors:
                try:
                    changed[i] = self._changed(rows[i], specs[i], pasts[i] if pasts else None)
                except RuleFault as fault:
                    errors[i] = str(fault)
        if changed:
            own = {place: settings[i] for place, i in enumerate(changed) if i in settings}
            redrawn = self._draw(torch.from_numpy(np.stack(list(changed.values()))), own).tolist()
            for (i, row), token in zip(changed.items(), redrawn, strict=True):
                tokens[i] = token
                if token < 0:
                    errors[i] = NO_TOKEN_LEFT if np.isneginf(row.max()) else NOT_FINITE
        draws = []
        for i, (spec, token) in enumerate(zip(specs, tokens, strict=True)):
            if (error := errors.get(i)) is not None:
                draws.append(Draw(token=-1, error=error, refused=error == NO_TOKEN_LEFT))
                continue
            logprobs = None if spec.logprobs is None else token_logprobs(rows[i], token, spec.logprobs)
            draws.append(Draw(token, logprobs))
        return draws

    def _draw(self, logits: Tensor, settings: dict[int, DrawSettings]) -> Tensor:
        """A token for each row, or -1; those without settings are greedy."""
        draws = None
        if settings:
            each = [settings.get(i, _GREEDY) for i in range(len(logits))]
            draws = torch.from_numpy(np.array(each, dtype=np.float64))
        return self._ops.sample(logits, draws)

    def _look(self, drawn: Tensor, logits: Tensor, needed: Sequence[int]) -> tuple[list[int], dict[int, Row]]:
        """What was drawn, and the rows that are looked at beyond it, in host memory."""
        if self._read is None:
            return drawn.tolist(), {i: logits[i].numpy() for i in needed}
        kept = [torch.stack([logits[i] for i in needed])] if needed else []
        tokens, *copied = self._read(drawn, *kept)()
        return tokens.tolist(), dict(zip(needed, copied[0], strict=True)) if needed else {}

    def _changed(self, row: Row, spec: SampleSpec, past: Past | None) -> Row:
        if spec.rules is None or past is None:
            raise ValueError("a draw with rules needs the tokens that it follows")
        return self._rules.changed(row, spec.rules, past, spec.position)


def _settings(specs: Sequence[SampleSpec], chosen: Sequence[int]) -> dict[int, DrawSettings]:
    """How the kernels draw those, which are random."""
    numbers = uniforms([(specs[i].seed, specs[i].sample_index, specs[i].position) for i in chosen])
    return {
        i: DrawSettings(
            max(specs[i].temperature, MIN_TEMPERATURE),
            max(specs[i].top_k, 0),
            specs[i].top_p,
            specs[i].min_p,
            number,
        )
        for i, number in zip(chosen, numbers, strict=True)
    }
