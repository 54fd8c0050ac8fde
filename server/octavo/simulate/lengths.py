"""Synthetic request lengths: lognormal, as those of real conversations are.

``PAPER`` is fitted so that the packing of ``octavo simulate paper`` gives the reference's figures. The means
of ``SHAREGPT`` and ``ALPACA`` are those that the PagedAttention paper (SOSP 2023) reports for its two traces;
the spreads are ours: conversations have a long tail, instructions hardly one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Means in tokens, before the cut at ``max_total``; ``sigma`` is the logarithm's standard deviation."""

    prompt_mean: float
    output_mean: float
    sigma: float
    max_total: int = 2048

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output tokens of one request, at least 1 each, together at most ``max_total``."""
        prompt = min(self.max_total - 1, self._lognormal(rng, self.prompt_mean))
        return prompt, min(self.max_total - prompt, self._lognormal(rng, self.output_mean))

    def _lognormal(self, rng: random.Random, mean: float) -> int:
        mu = math.log(mean) - self.sigma**2 / 2
        return max(1, round(rng.lognormvariate(mu, self.sigma)))


PAPER = Lengths(prompt_mean=256, output_mean=230, sigma=0.8)
SHAREGPT = Lengths(prompt_mean=161, output_mean=338, sigma=1.0)
ALPACA = Lengths(prompt_mean=19, output_mean=58, sigma=0.6)
WORKLOADS = {"sharegpt": SHAREGPT, "alpaca": ALPACA}
