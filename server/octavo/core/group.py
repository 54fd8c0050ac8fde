"""Sequences that are scheduled as one: the samples of a prompt, the beams of a search, or a single one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.beam_search import BeamSearch
from octavo.core.plan import NO_BLOCK, TokenLogprobs
from octavo.core.request import Request


class Group:
    """The sequences of one client request: admitted, preempted and brought back together.

    ``requests`` are what the client waits for; ``members`` the sequences that live: those requests that have
    not ended or, in a beam search, one for each beam (``spare`` ones are free to become beams). Only
    ``active`` members hold blocks and compute. Until the prompt is ``shared`` that is the first member: it
    computes the prompt, the others are then forked from it. A group of one has nothing to share out.

    ``alone`` is the member of a group that has no other and is no search: the usual case, in few words.
    ``order``: (priority, arrival), lower goes first. ``planned``: its rows of the next step are decided.
    ``open_ended``: the step under way adds a number of tokens to it that is not certain.
    """

    __slots__ = (
        "active",
        "alone",
        "begun",
        "members",
        "open_ended",
        "order",
        "planned",
        "prompt_logprobs",
        "requests",
        "running",
        "search",
        "seats",
        "shared",
        "spare",
        "swapped",
    )

    def __init__(
        self,
        requests: Sequence[Request],
        order: tuple[int, int],
        search: BeamSearch | None = None,
        beams: Sequence[Request] = (),
    ) -> None:
        self.requests = tuple(requests)
        self.order = order
        self.search = search
        self.members = list(beams[:1] if search else requests)
        self.spare = list(beams[1:])
        self.seats = len(self.requests)  # sequences that it may come to hold at once
        self.alone = self.members[0] if self.seats == 1 and not search else None
        self.active = self.members
        self.shared = True
        self.unshare()
        self.running = False
        self.begun = False  # rows of it went to the executor
        self.swapped = False
        self.planned = False
        self.open_ended = False
        self.prompt_logprobs: list[TokenLogprobs] = []
        for request in (*requests, *beams):
            request.group = self

    def get_order(self) -> tuple[int, int]:
        return self.order

    @property
    def lead(self) -> Request:
        """The member that computes the prompt."""
        return self.members[0]

    def blocks(self) -> set[int]:
        """The blocks of the pool that it holds."""
        held = {block for one in self.active for table in one.block_tables for block in table}
        return held - {NO_BLOCK}

    def unshare(self) -> None:
        """No member holds anything: the first begins again with the prompt."""
        self.shared = len(self.members) == 1
        self.active = self.members if self.shared else self.members[:1]
        self.lead.stops_at_prompt = not self.shared

    def share(self) -> None:
        """The prompt is there for every member."""
        self.lead.stops_at_prompt = False
        self.shared = True
        self.active = self.members

    def leave(self, member: Request) -> None:
        """A member has ended, holding nothing any more; where it was the first, the next one takes over."""
        self.members.remove(member)
        if self.search is None:
            self.seats = len(self.members)
            self.alone = self.members[0] if self.seats == 1 else None
        if not self.shared and self.members:
            self.unshare()

    def tokens_to_plan(self, request: Request) -> int:
        """How many tokens of an active member can be computed by now; ``pending`` ones count, that the step
        under way draws, unless the sequence ends with them.
        """
        target = request.num_tokens + request.pending
        if request.pending and target >= request.max_total_tokens:
            return 0
        return target - request.num_computed_tokens

    @property
    def unshared_prompt_is_computed(self) -> bool:
        """Whether the prompt of a group that comes back is computed again, and can be shared out."""
        lead = self.members[0]
        return not self.shared and lead.num_computed_tokens >= lead.num_prompt_tokens < len(lead.token_ids)

    def keep_prompt_logprobs(self, start: int, scores: list[TokenLogprobs]) -> None:
        """Take in the log probabilities of the tokens from ``start`` + 1 on; some may be known already."""
        known = len(self.prompt_logprobs)
        self.prompt_logprobs += scores[known - start :]
        del self.prompt_logprobs[self.num_scored :]

    def take_prompt_logprobs(self, request: Request) -> list[TokenLogprobs] | None:
        """For the first output of the first sample, where they were asked for."""
        if request is not self.requests[0] or request.request.sampling.prompt_logprobs is None:
            return None
        return self.prompt_logprobs

    @property
    def num_scored(self) -> int:
        """How many tokens of the prompt have something before them; tokens made elsewhere are no prompt."""
        first = self.requests[0]
        return first.num_prompt_tokens - first.request.num_prior_output_tokens - 1

    def tokens_left(self) -> int:
        """Tokens to compute before every member draws again, the last one not counted once it runs."""
        lead = self.members[0]
        if self.shared:
            return sum(len(one.token_ids) - one.num_computed_tokens for one in self.members)
        outputs = sum(len(one.token_ids) - one.num_prompt_tokens for one in self.members)
        return lead.num_prompt_tokens - lead.num_computed_tokens + outputs


class Planned(msgspec.Struct, eq=False):
    """A row of the next step: ``request`` computes its tokens ``start`` .. ``end`` - 1.

    ``known`` says that those tokens were known when it was decided: blocks that they fill are findable since
    then, so the row is computed even if its sequence ends before the step begins. ``takers`` are the
    sequences that draw from its end, ``owners`` the requests that are lost with it; set when the step begins.
    """

    request: Request
    start: int
    end: int
    known: bool
    drafts: list[int] = []
    propose: int = 0  # tokens that the draft model shall propose,
    drafted: int = -1  # which has computed those below (-1: below ``start``)
    takers: Sequence[Request] = ()
    owners: Sequence[Request] = ()
    trusted: bool = True  # what it computes may stay findable

    @property
    def group(self) -> Group:
        return self.request.group
