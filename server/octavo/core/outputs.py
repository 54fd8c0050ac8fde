"""What the engine takes in and gives out, per request. These cross the process border as msgpack."""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.core.plan import TokenLogprobs
from octavo.core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A request with n > 1 becomes n of these with ``sample_index`` 0 .. n-1.

    ``prompt_token_ids`` may end in tokens already generated elsewhere (``num_prior_output_tokens`` of them):
    the sequence then goes on from there with the same random numbers. ``sampling.seed`` and
    ``sampling.max_tokens`` are set (not None).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sample_index: int = 0
    num_prior_output_tokens: int = 0
    cache_salt: str | None = None
    arrival_time: float = 0.0


class RequestTimes(msgspec.Struct, frozen=True):
    """Seconds since the epoch; zero where the stage was not reached."""

    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of one request. Each request ends with exactly one output whose ``finish_reason`` is set.

    ``stop_reason`` is the stop token's id when it was not the model's end of sequence. ``num_cached_tokens``
    is how many prompt tokens the prefix cache held when the request was first scheduled.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    times: RequestTimes | None = None


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
    preemptions: int = 0
