"""A sequence on its way through the engine, and the checks it passes before it may enter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from octavo.core.kv_layout import KVSpec, blocks_needed
from octavo.core.outputs import EngineRequest, Feature, FinishReason, RequestTimes
from octavo.core.plan import LogitRules, TokenLogprobs
from octavo.core.sampling_params import MAX_N
from octavo.errors import ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from octavo.core.block_content import Content
    from octavo.core.group import Group, Planned
    from octavo.core.speculation import Proposer


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may ask for: tokens of a sequence, sequences at once, blocks of the KV cache.

    ``max_chunk`` is the most tokens that one step computes of a sequence.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    groups: tuple[KVSpec, ...] = (KVSpec(),)
    max_num_seqs: int = 256
    max_chunk: int = 2048
    max_logprobs: int = 20

    def blocks_needed(self, prompt: int, tokens: int, samples: int = 1) -> int:
        """Blocks for ``samples`` sequences of ``tokens`` tokens each that share a prompt's full blocks."""
        needed = 0
        for spec in self.groups:
            own = blocks_needed((spec,), tokens, self.block_size, self.max_chunk)
            shared = min(own, prompt // self.block_size) if spec.kind == "full" else 0
            needed += shared + samples * (own - shared)
        return needed

    @property
    def capacity(self) -> int:
        """The most tokens of one sequence, alone, that the KV cache can hold."""
        holds = range(1, self.max_model_len + 1)
        return bisect_right(holds, self.num_blocks, key=lambda tokens: self.blocks_needed(0, tokens))


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
    for name, held, (least, most) in (
        ("sample_index", request.sample_index, (0, MAX_N - 1)),
        ("priority", request.priority, (-(2**31), 2**31 - 1)),
    ):
        if not least <= held <= most:
            raise InvalidRequest(f"{name} is {held}: it must be between {least} and {most}", param=name)
    for name, number in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if number is not None and number > limits.max_logprobs:
            raise InvalidRequest(
                f"{name} is {number}: it must be between 0 and {limits.max_logprobs} (max-logprobs)",
                param=name,
            )
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
    need = prompt + output
    # Clients that do not look at the code know this error by words of OpenAI's and Anthropic's, here in both.
    asked = f"the request needs {need} tokens ({prompt} of the prompt, {output} of output)"
    too_long, longest = "the prompt is too long: ", "this model's maximum context length is"
    if need > limits.max_model_len:
        over = prompt >= limits.max_model_len
        raise ContextLengthExceeded(
            f"{too_long if over else ''}{asked}; {longest} {limits.max_model_len}: shorten the prompt or "
            "lower max_tokens",
            param="prompt" if over else "max_tokens",
        )
    if need - 1 > limits.capacity:  # the last token drawn is never computed
        over = prompt > limits.capacity
        raise ContextLengthExceeded(
            f"{too_long if over else ''}{asked}; {longest} {limits.capacity} with this KV cache "
            f"({limits.num_blocks} blocks of {limits.block_size}): shorten the prompt, lower max_tokens, or "
            "give the engine a larger kv-cache-memory-bytes",
            param="prompt" if over else "max_tokens",
        )


def check_requests(requests: Sequence[EngineRequest], limits: Limits) -> list[list[EngineRequest]]:
    """Refuse, as ``check_request`` does, what of a client's request is malformed or can never fit: each
    sequence, and all samples of a prompt together. Returns the groups, in order.
    """
    groups: dict[str, list[EngineRequest]] = {}
    for request in requests:  # an id without a group names one of its own
        groups.setdefault(f"g{request.group}" if request.group else f"r{request.request_id}", []).append(
            request
        )
    for group in groups.values():
        first = group[0]
        check_request(first, limits)
        if any(
            (one.prompt_token_ids, one.sampling, one.priority, one.num_prior_output_tokens)
            != (first.prompt_token_ids, first.sampling, first.priority, first.num_prior_output_tokens)
            for one in group[1:]
        ):
            raise InvalidRequest(
                f"the samples of group {first.group!r} differ: one prompt and one way of sampling"
            )
        _check_samples(first, len(group), limits)
    return list(groups.values())


def _check_samples(first: EngineRequest, samples: int, limits: Limits) -> None:
    sampling, prior = first.sampling, first.num_prior_output_tokens
    if sampling.use_beam_search and prior:
        raise InvalidRequest(
            "beam search cannot go on from tokens made elsewhere", param="num_prior_output_tokens"
        )
    if samples > limits.max_num_seqs:
        raise InvalidRequest(
            f"n is {samples}: this engine runs {limits.max_num_seqs} sequences at once (max-num-seqs)",
            param="n",
        )
    prompt = len(first.prompt_token_ids)
    assert sampling.max_tokens is not None  # check_request has seen to it
    need = limits.blocks_needed(prompt - prior, prompt - prior + sampling.max_tokens - 1, samples)
    if need > limits.num_blocks:
        raise ContextLengthExceeded(
            f"{samples} samples of {sampling.max_tokens} tokens after a prompt of {prompt - prior} need "
            f"{need} blocks of the KV cache; it holds {limits.num_blocks}: lower n or max_tokens",
            param="n",
        )


class Request:
    """One sequence. ``token_ids`` are the prompt and what was generated; ``num_computed_tokens`` chases them.

    ``block_tables`` holds the physical blocks of each KV group; ``contents`` the names of the full blocks of
    ``token_ids``. ``transfer`` is the transfer that its blocks take part in; until that has ended nothing
    of the sequence is computed. ``finished`` is set once, when it leaves the scheduler for good.
    """

    __slots__ = (
        "acceptance",
        "arrival",
        "block_tables",
        "contents",
        "drafts",
        "drawn",
        "finished",
        "first_token_time",
        "group",
        "host_tables",
        "ignore_eos",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_registered",
        "pending",
        "planned",
        "preemptions",
        "proposer",
        "request",
        "request_id",
        "room",
        "rules",
        "sample_index",
        "sampling",
        "scheduled_time",
        "snapshot_due",
        "stop_token_ids",
        "stops_at_prompt",
        "token_ids",
        "transfer",
        "undrafted",
        "unfollowed",
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
        self.sampling, self.sample_index = sampling, request.sample_index
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
        self.contents: list[Content] = []
        self.snapshot_due = False  # the state after the last computed token is to be kept under a name
        self.transfer: int | None = None
        original_prompt = self.num_prompt_tokens - request.num_prior_output_tokens
        self.max_total_tokens = min(original_prompt + sampling.max_tokens, max_model_len)
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        self.ignore_eos = sampling.ignore_eos
        self.group: Group
        self.stops_at_prompt = False  # others wait for the blocks of the prompt
        self.planned: Planned | None = None  # its row of the next step, where that is decided already
        self.pending = 0  # tokens that the step under way adds for certain
        self.drawn: TokenLogprobs | None = None  # of a beam: its continuations, until all have theirs
        self.drafts: list[int] = []  # what a draft model proposes to follow
        self.acceptance = 1.0  # share of its drafts that held, of late
        self.unfollowed = 0  # computed tokens that the draft model has still to compute
        self.undrafted = 0  # tokens since it last had a draft, where they are hopeless
        self.proposer: Proposer | None = None  # what proposes drafts from the tokens themselves
        self.scheduled_time = 0.0
        self.first_token_time = 0.0
        self.preemptions = 0
        self.finished = False

    @property
    def num_tokens(self) -> int:
        """Tokens that are to be computed by now: all that are known, or the prompt that others wait for."""
        return self.num_prompt_tokens if self.stops_at_prompt else len(self.token_ids)

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
        return RequestTimes(
            self.arrival, self.scheduled_time, self.first_token_time, finished, self.preemptions
        )
