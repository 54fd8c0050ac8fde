"""What scheduling needs to know of the engine's configuration."""

from __future__ import annotations

from typing import Literal

import msgspec


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of ``EngineConfig`` that scheduling needs, with the model's own limits filled in.

    ``num_speculative_tokens``: how many drafts a row may have at most; 0 for none. ``draft_model``: they come
    back with the results, and rows carry their history for it.
    """

    max_model_len: int
    vocab_size: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_logprobs: int = 20
    max_queue: int = 1024
    max_queue_tokens: int = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    prefix_caching_verify: bool = False
    kv_events: bool = False
    num_speculative_tokens: int = 0
    draft_model: bool = False
