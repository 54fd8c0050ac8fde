"""How fast this engine computes prompts, measured on the steps it runs."""

from __future__ import annotations

from octavo.core.plan import StepPlan

HALF_LIFE_TOKENS = 16384.0  # prompt tokens after which an old measurement counts half
MIN_SHARE = 0.5  # steps in which prompts are less than this share measure decoding, not prefill


class PrefillRate:
    """Prompt tokens a second, a ratio of decaying sums, so that long steps weigh more than short ones."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0.0 until something was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def measure(self, plan: StepPlan, seconds: float) -> None:
        """Take in one step that took ``seconds``; rows of more than one token are prompts."""
        total = prompt = 0
        for row in plan.rows:
            count = len(row.token_ids)
            total += count
            if count > 1:
                prompt += count
        if seconds <= 0 or prompt < MIN_SHARE * total or prompt == 0:
            return
        keep = 0.5 ** (prompt / HALF_LIFE_TOKENS)
        self._tokens = keep * self._tokens + prompt
        self._seconds = keep * self._seconds + seconds
