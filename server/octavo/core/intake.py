"""What a step's draws make of its sequences: tokens, shared prompts, the next beams, endings and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.beam_search import BeamSearch
from octavo.core.beam_steps import ending, look_on
from octavo.core.group import Group, Planned
from octavo.core.outputs import EngineOutput, FinishReason
from octavo.core.plan import RowResult, TokenLogprobs
from octavo.core.planner import Planner
from octavo.core.request import Request
from octavo.core.roster import Roster
from octavo.core.speculation import Speculation


class Intake:
    """Takes in what came of rows. ``generation_tokens`` counts since the start."""

    def __init__(
        self,
        roster: Roster,
        planner: Planner,
        speculation: Speculation | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.generation_tokens = 0
        self._roster, self._planner, self._speculation = roster, planner, speculation
        self._eos = eos_token_ids

    def take(self, planned: Planned, start: int, drawn: RowResult, now: float) -> Iterable[EngineOutput]:
        """The outputs that a row leads to, which began at position ``start``."""
        request, takers = planned.request, planned.takers
        group = request.group
        request.pending = 0
        group.open_ended = False
        if drawn.error is not None or len(drawn.token_ids) < len(takers):
            return self.fail(planned, drawn.error or "the step drew no token", refused=drawn.refused)
        if drawn.prompt_logprobs is not None:
            group.keep_prompt_logprobs(start, drawn.prompt_logprobs)
        if not takers:
            return ()
        if group.search is not None:
            return self._search_on(planned, group.search, drawn, now)
        if len(takers) > 1:
            return self._take_samples(group, takers, drawn, now)
        if request.finished:
            return ()
        if self._speculation is not None:
            self._take_drafts(planned, drawn, self._speculation)
        return (self._take(request, drawn.token_ids, drawn.logprobs, now),)

    def fail(self, planned: Planned, error: str, *, refused: bool = False) -> list[EngineOutput]:
        """End those that a row was computed for: its sequence, or all that wait for a shared prompt."""
        return [
            self._roster.finish(one, [], "error", error=error, refused=refused)
            for one in planned.owners
            if not one.finished
        ]

    def _take_samples(
        self, group: Group, takers: Sequence[Request], drawn: RowResult, now: float
    ) -> Iterable[EngineOutput]:
        """The prompt's end gave each sample its first token: from here on each has a sequence of its own."""
        if group.members:
            self._planner.share_prompt(group)
        for place, request in enumerate(takers):
            if not request.finished:
                logprobs = None if drawn.logprobs is None else drawn.logprobs[place : place + 1]
                yield self._take(request, drawn.token_ids[place : place + 1], logprobs, now)

    def _take_drafts(self, planned: Planned, drawn: RowResult, speculation: Speculation) -> None:
        request = planned.request
        request.drafts = drawn.drafts
        if planned.drafts:
            accepted = len(drawn.token_ids) - 1
            request.num_computed_tokens += accepted
            if not planned.propose:
                request.unfollowed += accepted
            speculation.judge(request, len(planned.drafts), accepted)

    def _take(
        self, request: Request, drawn: list[int], logprobs: list[TokenLogprobs] | None, now: float
    ) -> EngineOutput:
        taken = 0
        reason: FinishReason | None = None
        stop_token: int | None = None
        while reason is None and taken < len(drawn):
            request.token_ids.append(drawn[taken])
            taken += 1
            reason, stop_token = request.finish_reason(self._eos)
        self.generation_tokens += taken
        first = request.first_token_time == 0.0
        if first:
            request.first_token_time = now
        tokens = drawn[:taken]
        if logprobs is not None:
            logprobs = logprobs[:taken]
        prompt_logprobs = request.group.take_prompt_logprobs(request) if first else None
        if reason is not None:
            return self._roster.finish(
                request,
                tokens,
                reason,
                logprobs=logprobs,
                stop_reason=stop_token,
                prompt_logprobs=prompt_logprobs,
            )
        return EngineOutput(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            num_cached_tokens=request.num_cached_tokens,
            times=request.times(0.0) if first else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _search_on(
        self, planned: Planned, search: BeamSearch, drawn: RowResult, now: float
    ) -> list[EngineOutput]:
        """One beam has its continuations; with the last one the search goes a token on, and perhaps ends."""
        group = planned.group
        if not group.members:
            return []
        if drawn.logprobs is None:
            return self.fail(planned, "the step gave no log probabilities")
        self.generation_tokens += look_on(group, planned.request, drawn.logprobs[0], search, self._planner.kv)
        if not search.done:
            return []
        outputs = []
        for request, result in zip(group.requests, search.results, strict=False):
            if not request.finished:
                request.first_token_time = now
                outputs.append(self._roster.finish(request, **ending(request, result, search, self._eos)))
        for request in group.requests:
            if not request.finished:
                error = f"the search found {len(search.results)} results: fewer than asked for"
                outputs.append(self._roster.finish(request, [], "error", error=error))
        return outputs
