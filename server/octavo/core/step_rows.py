"""From what was decided to what the executor is told: one row of a step."""

from __future__ import annotations

from octavo.core.group import Planned
from octavo.core.kv_cache import KVCache
from octavo.core.plan import Row, SampleSpec
from octavo.core.request import Request
from octavo.core.settings import SchedulerSettings


def make_row(planned: Planned, settings: SchedulerSettings, kv: KVCache) -> Row | None:
    """The row, now that all tokens before the step are known. None where its sequence has ended and nothing
    hangs on the row; where others may use the blocks that it fills, it is computed but draws nothing.
    """
    request = planned.request
    group = request.group
    request.planned, group.planned = None, False
    start, end, tokens = planned.start, planned.end, request.token_ids
    tables = request.block_tables  # each only grows at its end, or they are replaced
    if request.finished:
        return Row(request.request_id, tokens[start:end], start, tables) if planned.known else None
    single = group.shared and group.search is None  # it has a sequence of its own to go on with
    planned.owners = (request,) if single else group.requests
    if not planned.known and end % settings.block_size == 0:
        kv.register(request)
    samples: list[SampleSpec] = []
    if end == len(tokens):
        if single:
            planned.takers, samples = planned.owners, [_spec(request, end)]
        elif group.search is not None:
            width = min(group.search.width, settings.vocab_size)
            planned.takers, samples = (request,), [_beam_spec(request, end, width)]
        else:
            planned.takers = tuple(group.members)
            samples = [_spec(taker, end) for taker in planned.takers]
        if single and not planned.drafts:
            request.pending = 1
        else:
            group.open_ended = True
    prompt_logprobs = request.sampling.prompt_logprobs
    if prompt_logprobs is not None and len(group.prompt_logprobs) >= group.num_scored:
        prompt_logprobs = None
    needs_history = request.rules is not None or prompt_logprobs is not None or settings.draft_model
    return Row(
        request.request_id,
        tokens[start:end],
        start,
        tables,
        samples,
        planned.drafts,
        tokens if needs_history else None,
        prompt_logprobs,
        planned.propose,
        planned.drafted,
    )


def _spec(request: Request, position: int) -> SampleSpec:
    sampling = request.sampling
    return SampleSpec(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.seed,  # type: ignore[arg-type]  # check_request has seen to it
        request.sample_index,
        position,
        sampling.logprobs,
        sampling.min_p,
        request.rules,
    )


def _beam_spec(request: Request, position: int, width: int) -> SampleSpec:
    """Nothing is drawn of a beam: its ``width`` likeliest continuations are looked at."""
    return SampleSpec(0.0, 0, 1.0, request.sampling.seed, 0, position, width)  # type: ignore[arg-type]
