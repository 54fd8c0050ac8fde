"""A sequence on its way through the engine, and the checks it passes before it may enter."""

from __future__ import annotations

import msgspec

from octavo.core.block_content import Content
from octavo.core.outputs import EngineRequest, Feature, FinishReason, RequestTimes
from octavo.core.plan import LogitRules
from octavo.errors import ContextLengthExceeded, InvalidRequest


class Limits(msgspec.Struct, frozen=True):
    """What one request may ask for. ``num_blocks`` x ``block_size`` tokens is the whole KV cache."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int


def check_request(request: EngineRequest, limits: Limits) -> None:
    """Refuse what is malformed (``InvalidRequest``) or can never fit (``ContextLengthExceeded``)."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise InvalidRequest("the prompt is empty: it must hold at least one token", param="prompt")
    if sampling.max_tokens is None or sampling.seed is None:
        field = "max_tokens" if sampling.max_tokens is None else "seed"
        raise InvalidRequest(f"{field} is not set: the engine takes it as a number", param=field)
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        wrong = next(t for t in prompt if not 0 <= t < limits.vocab_size)
        raise InvalidRequest(
            f"prompt holds token id {wrong}: ids are 0 to {limits.vocab_size - 1}", param="prompt"
        )
    sampling.check_vocabulary(limits.vocab_size)
    prior = request.num_prior_output_tokens
    if not 0 <= prior < len(prompt):
        raise InvalidRequest(
            f"num_prior_output_tokens is {prior}: it must be 0 to {len(prompt) - 1}",
            param="num_prior_output_tokens",
        )
    if prior >= sampling.max_tokens:
        raise InvalidRequest(
            f"max_tokens is {sampling.max_tokens} and {prior} tokens exist already: none is left to make",
            param="max_tokens",
        )
    for name, text in (("cache_salt", request.cache_salt), ("adapter", request.adapter)):
        if text is not None and not _is_text(text):
            raise InvalidRequest(f"{name} {text!r} is not valid Unicode", param=name)
    for feature in request.features:
        _check_feature(feature, len(prompt))
    _check_length(len(prompt) - prior, sampling.max_tokens, limits)


def _check_feature(feature: Feature, length: int) -> None:
    if not _is_text(feature.identifier):
        raise InvalidRequest(f"feature {feature.identifier!r} is not valid Unicode", param="features")
    if feature.offset < 0 or feature.length < 1 or feature.offset + feature.length > length:
        raise InvalidRequest(
            f"feature {feature.identifier!r} covers {feature.length} tokens from {feature.offset} on: "
            f"it must lie within the prompt's {length}",
            param="features",
        )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        return False
    return True


def _check_length(prompt: int, output: int, limits: Limits) -> None:
    need, capacity = prompt + output, limits.num_blocks * limits.block_size
    asked = f"the request needs {need} tokens ({prompt} of the prompt, {output} of output)"
    if need > limits.max_model_len:
        raise ContextLengthExceeded(
            f"{asked}; this model takes {limits.max_model_len}: shorten the prompt or lower max_tokens",
            param="prompt" if prompt >= limits.max_model_len else "max_tokens",
        )
    if need - 1 > capacity:  # the last token drawn is never computed
        raise ContextLengthExceeded(
            f"{asked}; the KV cache holds {capacity} ({limits.num_blocks} blocks of {limits.block_size}): "
            "shorten the prompt, lower max_tokens, or give the engine a larger kv-cache-memory-bytes",
            param="prompt" if prompt > capacity else "max_tokens",
        )


class Request:
    """One sequence. ``token_ids`` are the prompt and what was generated; ``num_computed_tokens`` chases them.

    ``block_tables`` holds the physical blocks of each KV group; ``contents`` the names of the full blocks of
    ``token_ids``. ``finished`` is set once, when the sequence leaves the scheduler for good.
    """

    __slots__ = (
        "arrival",
        "block_tables",
        "contents",
        "finished",
        "first_token_time",
        "host_tables",
        "ignore_eos",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_registered",
        "request",
        "request_id",
        "room",
        "rules",
        "scheduled_time",
        "snapshot_due",
        "stop_token_ids",
        "token_ids",
        "transfer",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        arrival: float,
        max_model_len: int,
        num_groups: int,
        rules: LogitRules | None = None,
    ) -> None:
        sampling = request.sampling
        assert sampling.max_tokens is not None  # check_request has seen to it
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival
        self.rules = rules
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1  # unknown until first scheduled
        self.num_registered = 0  # full blocks whose names the pool was given
        self.block_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.room = 0  # it has blocks of its own to write into for all positions below
        self.host_tables: list[list[int]] = []  # its blocks in the host tier while it is swapped out
        self.transfer: int | None = None  # what it waits for before it can be planned
        self.contents: list[Content] = []
        self.snapshot_due = False  # the state after the last computed token is to be kept under a name
        original_prompt = self.num_prompt_tokens - request.num_prior_output_tokens
        self.max_total_tokens = min(original_prompt + sampling.max_tokens, max_model_len)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.ignore_eos = sampling.ignore_eos
        self.scheduled_time = 0.0
        self.first_token_time = 0.0
        self.finished = False

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt included."""
        return len(self.token_ids)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
        """Whether the last token ends the sequence: (reason, the stop token if it is not the model's own)."""
        last = self.token_ids[-1]
        if not self.ignore_eos and last in eos_token_ids:
            return "stop", None
        if last in self.stop_token_ids:
            return "stop", last
        if len(self.token_ids) >= self.max_total_tokens:
            return "length", None
        return None, None

    def times(self, finished: float) -> RequestTimes:
        return RequestTimes(self.arrival, self.scheduled_time, self.first_token_time, finished)
