"""A beam search among the scheduled sequences: one for each beam, forked and freed as the search goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.beam_search import BeamSearch, Result
from octavo.core.group import Group
from octavo.core.kv_cache import KVCache
from octavo.core.plan import TokenLogprobs
from octavo.core.request import Request


def new_search(requests: Sequence[Request], eos_token_ids: frozenset[int]) -> BeamSearch:
    """A search with a beam, and a result, for each request."""
    first, sampling = requests[0], requests[0].request.sampling
    stops = first.stop_token_ids if first.ignore_eos else first.stop_token_ids | eos_token_ids
    longest = first.max_total_tokens - first.num_prompt_tokens
    return BeamSearch(len(requests), longest, stops, sampling.length_penalty, sampling.early_stopping)


def look_on(group: Group, beam: Request, drawn: TokenLogprobs, search: BeamSearch, kv: KVCache) -> int:
    """Keep a beam's continuations. When all beams have theirs, go a token on, each new beam on the blocks of
    its parent. Returns the tokens generated so.
    """
    beam.drawn = drawn
    looked_at = [one.drawn for one in group.members if one.drawn is not None]
    if len(looked_at) < len(group.members):
        return 0
    parents = search.step(looked_at)
    if not search.done:
        _follow(group, parents, search, kv)
    return len(parents)


def _follow(group: Group, parents: Sequence[int], search: BeamSearch, kv: KVCache) -> None:
    old = group.members
    for place, one in enumerate(old):
        one.drawn = None
        if place not in parents:
            kv.free(one)
            group.spare.append(one)
    members: list[Request] = []
    for place in parents:
        one = old[place]
        if one in members:  # its first child goes on in its place
            one = group.spare.pop()
            kv.fork(old[place], one)
        members.append(one)
    for one, beam in zip(members, search.beams, strict=True):
        one.token_ids[one.num_prompt_tokens :] = beam.token_ids
    group.members = members
    group.share()


def ending(
    request: Request, result: Result, search: BeamSearch, eos_token_ids: frozenset[int]
) -> dict[str, Any]:
    """What the last output of a request says of its result."""
    tokens, kept = result.beam.token_ids, request.request.sampling.logprobs
    stopped = tokens[-1] in search.stop_token_ids
    logprobs = None
    if kept is not None:
        logprobs = [TokenLogprobs(one.logprob, one.rank, one.top[:kept]) for one in result.beam.logprobs]
    return {
        "token_ids": tokens,
        "reason": "stop" if stopped else "length",
        "logprobs": logprobs,
        "stop_reason": tokens[-1] if stopped and tokens[-1] not in eos_token_ids else None,
        "prompt_logprobs": request.group.take_prompt_logprobs(request),
        "cumulative_logprob": result.beam.total,
    }
