"""What the engine takes in and gives out, per request. These cross the process border as msgpack."""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.core.plan import TokenLogprobs
from octavo.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Feature(msgspec.Struct, frozen=True):
    """A piece of the prompt that token ids do not tell (an image): the tokens from ``offset`` on, ``length``
    of them, stand for what ``identifier`` names. It goes into the names of the blocks that it covers.
    """

    identifier: str
    offset: int
    length: int


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A request with n > 1 becomes n of these with ``sample_index`` 0 .. n-1, all
    with the same ``group`` and prompt, handed over together: they share the prompt's blocks and are scheduled
    and preempted as one. With ``sampling.use_beam_search`` a group of n is one search with n beams, and
    ``sample_index`` is the rank of the result.

    ``prompt_token_ids`` may end in tokens already generated elsewhere (``num_prior_output_tokens`` of them):
    the sequence then goes on from there with the same random numbers. ``sampling.seed`` and
    ``sampling.max_tokens`` are set (not None).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sample_index: int = 0
    num_prior_output_tokens: int = 0
    group: str | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    features: tuple[Feature, ...] = ()
    priority: int = 0  # lower is served first, under the policy ``priority``
    deadline: float | None = (
        None  # seconds since the epoch: refused if it cannot start, ended when it is past
    )
    tenant: str | None = None
    arrival_time: float = 0.0


class RequestTimes(msgspec.Struct, frozen=True):
    """Seconds since the epoch; zero where the stage was not reached. ``preemptions``: how often the sequence
    was put back to make room.
    """

    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    preemptions: int = 0


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of one request. Each request ends with exactly one output whose ``finish_reason`` is set.

    ``stop_reason`` is the stop token's id when it was not the model's end of sequence; "timeout" with the
    reason "abort" says that the deadline is past. With the reason "error" ``refused`` says that the request's
    own settings led to it, else it is a fault. ``num_cached_tokens`` is how many prompt tokens the prefix
    cache held when the request was first scheduled. ``prompt_logprobs``, for the first sample and once, has
    an entry for each prompt token but the first. ``cumulative_logprob`` is a beam's.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: bool = False
    times: RequestTimes | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's load after a step; gauges are current values, the rest are totals since start."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    cached_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_collisions: int = 0  # look-ups that found other tokens under an equal hash
    preemptions: int = 0
    preemptions_by_swap: int = 0  # of preemptions; the others compute again
    drafts: int = 0  # rows that carried draft tokens
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()  # how often the first, second, ... draft of a row was accepted
    swapped: int = 0  # of waiting; their blocks are in host memory
    host_usage: float = 0.0
    host_hit_tokens: int = 0  # of prefix_cache_hits: those that came from the host tier
    host_blocks_saved: int = 0
    host_blocks_loaded: int = 0
    row_faults: int = 0  # requests that the executor failed on, alone
    kv_event_batches: int = 0
    kv_event_batches_dropped: int = 0  # the publisher's queue was full
    kv_event_batches_missed: int = 0  # times that a subscriber's queue was full
