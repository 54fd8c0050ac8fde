"""The pick: which endpoint gives this request its first token soonest. Pure: no clock, no I/O, no state.

The expected time before the first token at an endpoint, in seconds, is

    (uncached prompt tokens + prefill tokens queued there + running sequences x DECODE_TOKENS) / prefill rate
    + the wait for a free sequence slot + the wait for free KV blocks

Work is counted in tokens, never in requests alone, and nothing is normalised between endpoints. A cached
prefix is worth exactly the prefill it saves, so a burst with one shared prefix spills to another endpoint as
soon as waiting costs more than computing the prefix there again. Costs within TIE_TOKENS are equal:
rendezvous hashing then decides, so that routers that know nothing of each other agree and distinct prefixes
spread.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Policy = Literal["prefix-affinity", "round-robin", "least-work"]
POLICIES: tuple[Policy, ...] = ("prefix-affinity", "round-robin", "least-work")
Why = Literal["prefix", "spill", "load", "rendezvous", "only", "round-robin", "least-work"]

# What one running sequence costs a newcomer, in prefill tokens: every step of the newcomer's prefill also
# decodes it, and the newcomer's own decoding shares steps with it afterwards.
DECODE_TOKENS = 64
# Costs this near are a tie. It covers the few blocks that a chat template's fixed opening makes every prompt
# share, which must not send all traffic to the endpoint that saw it first, and a difference of one running
# sequence, which a report of the last second may still show after it has ended.
TIE_TOKENS = 80
# Rates of engines that run the same model are measured under different loads; only a difference that hardware
# explains is believed, within it the median is used for all.
RATE_BAND = 4.0
# Prefill rate, in tokens per second, until any engine has measured its own.
DEFAULT_RATE = 2000.0


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked: ``prompt_tokens`` to prefill, ``blocks`` of KV cache, and the rendezvous ``key`` of its
    prefix.

    ``turn`` counts requests, for round-robin.
    """

    prompt_tokens: int
    key: bytes
    blocks: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One endpoint that may take the request, as the router believes it to be now.

    ``cached_tokens`` of the prompt are thought to be in its cache; ``queued_tokens`` are waiting to be
    prefilled; ``running`` counts the sequences there, those that wait too; ``rate`` is prefill tokens per
    second (0 = not known); ``slots`` and ``blocks`` are its limits (0 = not known), ``free_blocks`` is what
    is left; ``mean_s`` is how long a request has been taking there, end to end.
    """

    name: str
    cached_tokens: int = 0
    queued_tokens: int = 0
    running: int = 0
    rate: float = 0.0
    slots: int = 0
    blocks: int = 0
    free_blocks: int = 0
    mean_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The endpoint, its expected seconds before the first token, why it was chosen, and the cached tokens
    counted on.
    """

    endpoint: str
    cost: float
    why: Why
    cached_tokens: int


def pick(work: Work, candidates: Sequence[Candidate], policy: Policy = "prefix-affinity") -> Choice:
    """The endpoint for this request. ``candidates`` is not empty; its order does not matter."""
    rates = _rates(candidates)
    if policy == "round-robin":
        ordered = sorted(candidates, key=lambda c: c.name)
        chosen = ordered[work.turn % len(ordered)]
        return Choice(
            chosen.name, _cost(work, chosen, rates[chosen.name]), "round-robin", chosen.cached_tokens
        )
    affinity = policy == "prefix-affinity"
    costs = {c.name: _cost(work, c, rates[c.name], affinity) for c in candidates}
    best = min(costs.values())
    tied = [c for c in candidates if costs[c.name] <= best + TIE_TOKENS / rates[c.name]]
    if affinity:
        chosen = max(tied, key=lambda c: (_rendezvous(work.key, c.name), c.name))
        why = _why(chosen, candidates, tied)
    else:
        # Work alone: the least, and among equals each in turn.
        least = sorted((c for c in candidates if costs[c.name] <= best), key=lambda c: c.name)
        chosen, why = least[work.turn % len(least)], "least-work"
    return Choice(chosen.name, costs[chosen.name], why, chosen.cached_tokens)


def _cost(work: Work, candidate: Candidate, rate: float, affinity: bool = True) -> float:
    cached = min(candidate.cached_tokens, work.prompt_tokens) if affinity else 0
    tokens = work.prompt_tokens - cached + candidate.queued_tokens + candidate.running * DECODE_TOKENS
    return tokens / rate + _wait(work, candidate, cached)


def _wait(work: Work, candidate: Candidate, cached: int) -> float:
    """Seconds until a sequence slot and the KV blocks are free; sequences leave evenly, each after
    ``mean_s``.
    """
    wait = 0.0
    if candidate.slots:
        over = candidate.running + 1 - candidate.slots
        wait = max(0, over) / candidate.slots * candidate.mean_s
    if candidate.blocks and work.blocks:
        share = 1 - cached / work.prompt_tokens if work.prompt_tokens else 1.0
        short = work.blocks * share - candidate.free_blocks
        wait = max(wait, max(0.0, short) / candidate.blocks * candidate.mean_s)
    return wait


def _why(chosen: Candidate, candidates: Sequence[Candidate], tied: Sequence[Candidate]) -> Why:
    if len(candidates) == 1:
        return "only"
    most = max(c.cached_tokens for c in candidates)
    if most - chosen.cached_tokens > TIE_TOKENS:
        return "spill"
    if chosen.cached_tokens - min(c.cached_tokens for c in candidates) > TIE_TOKENS:
        return "prefix"
    return "rendezvous" if len(tied) > 1 else "load"


def _rates(candidates: Sequence[Candidate]) -> dict[str, float]:
    known = [c.rate for c in candidates if c.rate > 0]
    median = statistics.median(known) if known else DEFAULT_RATE
    return {
        c.name: c.rate if c.rate > 0 and not median / RATE_BAND <= c.rate <= median * RATE_BAND else median
        for c in candidates
    }


def _rendezvous(key: bytes, name: str) -> bytes:
    """Highest random weight (Thaler and Ravishankar, 1998): equal on every router."""
    return hashlib.blake2b(key + b"\0" + name.encode(), digest_size=8).digest()
