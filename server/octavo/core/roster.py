"""The requests that are here, from their entry to their last output: each ends exactly once."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from octavo.core.group import Group
from octavo.core.kv_cache import KVCache
from octavo.core.outputs import EngineOutput, FinishReason
from octavo.core.plan import TokenLogprobs
from octavo.core.planner import Planner
from octavo.core.request import Request


class Roster:
    """``requests`` by id. ``clock`` tells when deadlines are past."""

    def __init__(self, kv: KVCache, planner: Planner, clock: Callable[[], float]) -> None:
        self.requests: dict[str, Request] = {}
        self._kv, self._planner, self._clock = kv, planner, clock
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._entered = 0

    def enter(self, group: Group) -> None:
        """Let the requests of a group wait in their place."""
        for request in group.requests:
            self.requests[request.request_id] = request
            self._entered += 1
            if (deadline := request.request.deadline) is not None:
                heapq.heappush(self._deadlines, (deadline, self._entered, request))
        self._planner.enqueue(group)

    def expire(self) -> list[EngineOutput]:
        """End the requests whose deadline is past."""
        outputs: list[EngineOutput] = []
        while self._deadlines and (self._deadlines[0][2].finished or self._deadlines[0][0] <= self._clock()):
            request = heapq.heappop(self._deadlines)[2]
            if not request.finished:
                outputs.append(self.finish(request, [], "abort", stop_reason="timeout"))
        return outputs

    def finish(
        self,
        request: Request,
        token_ids: list[int],
        reason: FinishReason,
        *,
        logprobs: list[TokenLogprobs] | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
        refused: bool = False,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        cumulative_logprob: float | None = None,
    ) -> EngineOutput:
        """End a request, free what it alone holds, and make its last output."""
        request.finished = True
        del self.requests[request.request_id]
        group = request.group
        if group.search is None:
            self._leave(request, trusted=error is None)
        elif all(one.finished for one in group.requests):
            for beam in list(group.members):
                beam.finished = True
                self._leave(beam, trusted=error is None)
        if not group.members:
            self._planner.remove(group)
        elif not group.running:
            self._planner.waiting.recount(group)
        return EngineOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            num_cached_tokens=max(0, request.num_cached_tokens),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            refused=refused,
            times=request.times(self._clock()),
            prompt_logprobs=prompt_logprobs,
            cumulative_logprob=cumulative_logprob,
        )

    def _leave(self, member: Request, *, trusted: bool) -> None:
        """Take a sequence out of its group. Others may count on blocks that its decided row is to fill: then
        it keeps its blocks until that row is on its way.
        """
        group = member.group
        restart = self._hand_over(group) if not group.shared and member is group.lead else False
        if member.planned is not None and member.planned.known:
            member.planned.trusted = trusted
        else:
            self._kv.free(member, trusted=trusted)
        group.leave(member)
        if restart:
            self._planner.requeue(group)

    def _hand_over(self, group: Group) -> bool:
        """The first member is leaving amid the prompt: the next one carries on. True where it has to begin
        anew, since the blocks are on their way.
        """
        lead, heir = group.members[0], group.members[1]
        if group.swapped or lead.transfer is not None:
            return True
        self._kv.fork(lead, heir)
        if lead.planned is not None:
            heir.planned, lead.planned = lead.planned, None
            heir.planned.request = heir
        return False
