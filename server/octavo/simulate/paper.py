"""How much of a KV cache holds tokens: contiguous reservation against pages, and what sharing saves.

The setting is the reference's: OPT-13B, 800 KB of K and V a token, a cache of 12 GB, at most 2,048 tokens a
request, blocks of 16. Each request is taken at a uniformly random moment of its life: its length then is the
prompt and a random part of the output. Requests are packed in order of arrival until the pool is full; those
that do not fit any more are passed over. Nothing grows and nothing is preempted.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.block_pool import BlockPool
from octavo.core.kv_cache import KVCache
from octavo.core.kv_layout import KVSpec
from octavo.core.outputs import EngineRequest
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.simulate.lengths import PAPER, Lengths

TOKEN_BYTES = 800_000
CACHE_BYTES = 12_000_000_000
SLOTS = CACHE_BYTES // TOKEN_BYTES
LOOK_AHEAD = 100  # requests of the queue that are tried before the pool counts as full
SAMPLES = (2, 4, 6)
SHARED_PROMPT, SHARED_OUTPUT = 300, 100  # tokens of a prompt, and of each sample, where samples share


@dataclass(frozen=True)
class Packing:
    """Means over pools filled one after the other."""

    token_share: float  # of the memory that holds tokens, 0 .. 1
    requests: float
    lost_slots: float  # reserved slots without a token, a request

    def row(self) -> str:
        return f"{self.token_share:>8.1%} {self.requests:>10.1f} {self.lost_slots:>18.1f}"


REFERENCE_CONTIGUOUS = (0.171, 7.0)
REFERENCE_PAGED = (0.979, 40.0, 7.4)
REFERENCE_SHARING = {2: (50, 32, 0.360), 4: (100, 46, 0.540), 6: (150, 60, 0.600)}


def moments(count: int, seed: int, lengths: Lengths = PAPER) -> list[int]:
    """Tokens that each of ``count`` requests holds at a random moment of its life."""
    rng = random.Random(seed)
    drawn = (lengths.draw(rng) for _ in range(count))
    return [prompt + round(rng.random() * output) for prompt, output in drawn]


def pack(held: Sequence[int], units: Callable[[int], int], capacity: int, unit_slots: int) -> Packing:
    """Fill pools of ``capacity`` units; a request of n tokens takes ``units(n)`` of ``unit_slots`` slots."""
    waiting = deque(held)
    fills: list[list[int]] = []
    while len(waiting) > LOOK_AHEAD:  # the last requests could not fill a pool
        pool = BlockPool(capacity)
        taken: list[int] = []
        passed: list[int] = []
        while waiting and len(passed) < LOOK_AHEAD and pool.num_free:
            tokens = waiting.popleft()
            if units(tokens) <= pool.num_free:
                pool.allocate(units(tokens))
                taken.append(tokens)
            else:
                passed.append(tokens)
        waiting.extendleft(reversed(passed))
        fills.append(taken)
    return Packing(
        statistics.mean(sum(fill) / SLOTS for fill in fills),
        statistics.mean(len(fill) for fill in fills),
        statistics.mean(units(tokens) * unit_slots - tokens for fill in fills for tokens in fill),
    )


def packings(requests: int, seed: int, block_size: int) -> tuple[Packing, Packing]:
    """The same requests reserved contiguously at full length, and in pages."""
    held = moments(requests, seed)
    whole = pack(held, lambda tokens: 1, SLOTS // PAPER.max_total, PAPER.max_total)
    return whole, pack(held, lambda tokens: -(-tokens // block_size), SLOTS // block_size, block_size)


def sharing(samples: int, block_size: int, prompt: int, output: int) -> tuple[int, int]:
    """Blocks of ``samples`` sequences of one prompt, without and with sharing, counted in a real cache."""
    apart = samples * -(-(prompt + output) // block_size)
    cache = KVCache(apart, block_size, None, [KVSpec()])
    first, *others = (_sequence(index, prompt) for index in range(samples))
    cache.admit(first, cache.find_prefix(first), 0, prompt)
    first.num_computed_tokens = prompt
    for other in others:
        cache.fork(first, other)
    for position in range(prompt, prompt + output):
        for one in (first, *others):
            cache.grow(one, position + 1)
            one.num_computed_tokens = position + 1
        cache.take_copies()
    return apart, cache.pool.num_blocks - cache.pool.num_free


def _sequence(index: int, prompt: int) -> Request:
    request = EngineRequest(
        request_id=str(index), prompt_token_ids=[0] * prompt, sampling=SamplingParams(seed=0)
    )
    return Request(request, arrival=0.0, max_model_len=PAPER.max_total, num_groups=1)


def mean_packing(each: Sequence[Packing]) -> Packing:
    return Packing(
        *(statistics.mean(getattr(one, name) for one in each) for name in Packing.__dataclass_fields__)
    )
