"""What goes wrong quietly in a paged engine: seen in its counts and prompts, said once, with the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.outputs import EngineStats

WINDOW_STEPS = 500  # steps over which preemptions and a full cache are judged
PREEMPTING_SHARE = 0.01  # of steps
FULL_USAGE = 0.9  # of the KV cache: beyond it a waiting prompt seldom fits
FULL_SHARE = 0.5  # of steps with a full cache and a queue
WINDOW_PROMPTS = 32  # prompts over which their fronts are judged
ALIKE_SHARE = 0.75  # of prompts that repeat most of the one before them
LOOK_AT_TOKENS = 512  # of each prompt
GRAM = 4  # tokens in a row that make a place recognisable wherever it stands

MORE_CACHE = (
    "give the KV cache more room (kv-cache-memory-bytes, on a GPU gpu-memory-utilization or a shorter "
    "max-model-len), lower max-num-seqs, or add replicas"
)


class Pitfalls:
    """Watches one engine. Pure: what it is told makes what it says."""

    def __init__(self, *, block_size: int, prefix_caching: bool) -> None:
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._said: set[str] = set()
        self._before = EngineStats()
        self._steps = self._preempting = self._full = 0
        self._prompt: Sequence[int] = ()
        self._prompts = self._alike = 0
        self._hits_before = 0

    def look(self, stats: EngineStats) -> list[str]:
        """What has become worth a warning by now."""
        before, self._before = self._before, stats
        steps = stats.steps - before.steps
        self._steps += steps
        self._preempting += min(steps, stats.preemptions - before.preemptions)
        if stats.waiting and stats.kv_usage >= FULL_USAGE:
            self._full += steps
        found = []
        if self._steps >= WINDOW_STEPS:
            found += self._judge_steps(stats)
            self._steps = self._preempting = self._full = 0
        if self._prompts >= WINDOW_PROMPTS:
            found += self._judge_prompts(stats)
            self._prompts = self._alike = 0
            self._hits_before = stats.prefix_cache_hits
        return found

    def saw(self, prompt: Sequence[int]) -> None:
        """A prompt came in; whether it repeats the one before it, but not from the front."""
        if not self._prefix_caching or "fronts" in self._said:
            return
        last, self._prompt = self._prompt, prompt[:LOOK_AT_TOKENS]
        self._prompts += 1
        size = self._block_size
        if len(prompt) >= 2 * size and last[:size] != self._prompt[:size]:
            grams, others = _grams(self._prompt), _grams(last)
            self._alike += 2 * len(grams & others) >= len(grams)

    def _judge_steps(self, stats: EngineStats) -> list[str]:
        found = []
        if self._preempting > PREEMPTING_SHARE * self._steps:
            found += self._once(
                "preemptions",
                f"{self._preempting} of the last {self._steps} steps preempted a sequence (more than "
                f"{PREEMPTING_SHARE:.0%}): its work is done twice. To avoid it, {MORE_CACHE}",
            )
        if self._full > FULL_SHARE * self._steps:
            found += self._once(
                "full",
                f"the KV cache is {stats.kv_usage:.0%} full and {stats.waiting} requests wait for it, in "
                f"{self._full} of the last {self._steps} steps. To serve more at once, {MORE_CACHE}",
            )
        return found

    def _judge_prompts(self, stats: EngineStats) -> list[str]:
        if self._alike < ALIKE_SHARE * self._prompts or stats.prefix_cache_hits > self._hits_before:
            return []
        return self._once(
            "fronts",
            f"{self._alike} of the last {self._prompts} prompts repeat most of the one before, but not its "
            f"first {self._block_size} tokens, so the prefix cache finds nothing. Put what differs (a date, "
            "an id) after what is shared, not at the front",
        )

    def _once(self, name: str, warning: str) -> list[str]:
        if name in self._said:
            return []
        self._said.add(name)
        return [warning]


def _grams(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    return set(zip(*(tokens[start:] for start in range(GRAM)), strict=False))
