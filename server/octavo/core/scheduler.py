"""Continuous batching: from requests to the steps that compute them, and from results to outputs.

``octavo.core.planner`` decides which tokens of which sequences a step computes, ``octavo.core.intake`` makes
outputs of what came of it; this file lets requests in and makes the plan for the executor from what was
decided.

A step can be decided while the one before it still runs (``prepare``): then the tokens that are being drawn
are counted but not known. ``schedule`` fills them in, leaves out sequences that have ended meanwhile, and
decides what could not be decided early. Tokens are the same either way: a draw depends on its own sequence
only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.admission import check_deadline, check_queue
from octavo.core.beam_steps import new_search
from octavo.core.block_hash import BlockHasher
from octavo.core.group import Group, Planned
from octavo.core.intake import Intake
from octavo.core.kv_cache import KVCache
from octavo.core.kv_layout import KVSpec
from octavo.core.logit_rules import logit_rules
from octavo.core.outputs import EngineOutput, EngineRequest, EngineStats
from octavo.core.plan import LogitRules, Row, StepPlan, StepResult
from octavo.core.planner import Planner, count
from octavo.core.prefill_rate import PrefillRate
from octavo.core.request import Limits, Request, check_requests
from octavo.core.roster import Roster
from octavo.core.settings import SchedulerSettings
from octavo.core.speculation import Proposer, Speculation
from octavo.core.step_rows import make_row
from octavo.errors import ConfigError, InvalidRequest


class Scheduler:
    """Owns the requests and their blocks. Pure: the only input beside the calls is ``clock`` (seconds).

    Use: ``plan = schedule()``, run it (and ``prepare()`` meanwhile, or not), ``update(plan, result)``, and
    again. ``add``, ``abort`` and ``expire`` come at any time. ``make_proposer`` gives each sequence what
    proposes drafts from its tokens. The host tier has ``num_host_blocks`` of ``block_bytes`` each, and with
    ``offload`` cached blocks are kept there too.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        num_blocks: int,
        eos_token_ids: Sequence[int],
        *,
        clock: Callable[[], float],
        groups: Sequence[KVSpec] = (KVSpec(),),
        block_bytes: int = 0,
        num_host_blocks: int = 0,
        offload: bool = False,
        make_proposer: Callable[[], Proposer] | None = None,
    ) -> None:
        if not settings.enable_chunked_prefill and settings.max_model_len > settings.max_num_batched_tokens:
            raise ConfigError(
                f"max-num-batched-tokens is {settings.max_num_batched_tokens}, below max-model-len "
                f"{settings.max_model_len}: without chunked prefill a prompt must fit one step. Raise it, "
                "lower max-model-len, or leave chunked prefill on"
            )
        self.settings = settings
        self.hasher = BlockHasher(settings.prefix_caching_hash_algo, settings.block_size)
        hasher = self.hasher if settings.enable_prefix_caching else None
        chunk = settings.max_num_batched_tokens
        self.kv = KVCache(
            num_blocks,
            settings.block_size,
            hasher,
            groups,
            max_chunk=chunk,
            num_host_blocks=num_host_blocks,
            offload=offload,
            verify=settings.prefix_caching_verify,
            events=settings.kv_events,
        )
        self.limits = Limits(
            max_model_len=settings.max_model_len,
            vocab_size=settings.vocab_size,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            groups=tuple(groups),
            max_num_seqs=settings.max_num_seqs,
            max_chunk=chunk,
            max_logprobs=settings.max_logprobs,
        )
        self._rate = PrefillRate()
        self.planner = Planner(settings, self.kv, self._rate, block_bytes=block_bytes)
        self.speculation = (
            Speculation(settings.num_speculative_tokens, make_proposer)
            if settings.num_speculative_tokens
            else None
        )
        self.roster = Roster(self.kv, self.planner, clock)
        self._eos = frozenset(eos_token_ids)
        self.intake = Intake(self.roster, self.planner, self.speculation, self._eos)
        self._clock = clock
        self._arrivals = 0
        self._step = 0
        self._in_flight: list[Planned] | None = None  # of the plan that was not updated yet, in its order
        self._transfers: dict[int, int] = {}  # transfers under way: their sizes in bytes
        self._began: list[int] = []  # those that began with the step under way
        self._copied: set[int] = set()  # blocks that are copies made by the step under way
        self._started = 0.0
        self._prompt_tokens = 0
        self._cache_queries = self._cache_hits = 0

    # Requests come and go

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue the requests of one client request, all or none.

        Raises ``InvalidRequest``, ``ContextLengthExceeded`` (they can never fit; names need and capacity),
        ``QueueFull`` or ``DeadlineExceeded`` (with seconds after which there may be room).
        """
        groups = check_requests(requests, self.limits)
        seen: set[str] = set()
        for request in requests:
            if request.request_id in seen or request.request_id in self.roster.requests:
                raise InvalidRequest(f"request_id {request.request_id!r} is in use", param="request_id")
            seen.add(request.request_id)
        now, tokens, rate = self._clock(), self._waiting_tokens(), self.prefill_tokens_per_s
        for request in requests:
            check_deadline(request.deadline, now=now, tokens=tokens, rate=rate)
        check_queue(
            max_queue=self.settings.max_queue,
            max_queue_tokens=self.settings.max_queue_tokens,
            waiting=self.planner.waiting.seats,
            seats=max(0, self.settings.max_num_seqs - count(self.planner.running)),
            tokens=tokens,
            new_tokens=sum(len(group[0].prompt_token_ids) for group in groups),
            rate=rate,
        )
        for group in groups:
            self._enqueue(group, now)

    def _enqueue(self, requests: Sequence[EngineRequest], now: float) -> None:
        first, self._arrivals = requests[0], self._arrivals + 1
        priority = first.priority if self.settings.scheduling_policy == "priority" else 0
        order = (priority, self._arrivals)
        rules = logit_rules(first, self._eos)
        members = [self._sequence(request, now, rules) for request in requests]
        if first.sampling.use_beam_search:
            beams = [self._sequence(request, now, rules) for request in requests]
            group = Group(members, order, new_search(members, self._eos), beams)
        else:
            group = Group(members, order)
        self.kv.name_blocks(group.lead)
        self.roster.enter(group)

    def _sequence(self, request: EngineRequest, now: float, rules: LogitRules | None) -> Request:
        return Request(
            request,
            arrival=request.arrival_time or now,
            max_model_len=self.settings.max_model_len,
            num_groups=len(self.kv.groups),
            rules=rules,
        )

    def abort(self, request_id: str) -> EngineOutput | None:
        """End a request in any state; its blocks are free at once, or when the step that is decided has
        begun. None for an id that is not here.
        """
        request = self.roster.requests.get(request_id)
        return None if request is None else self.roster.finish(request, [], "abort")

    def expire(self) -> list[EngineOutput]:
        """End the requests whose deadline is past."""
        return self.roster.expire()

    @property
    def request_ids(self) -> list[str]:
        """Those that have not ended."""
        return list(self.roster.requests)

    @property
    def has_requests(self) -> bool:
        """Whether ``schedule`` may have something to run: requests, or what those that ended have left."""
        return bool(self.roster.requests or self.planner.rows or self.kv.host.num_transfers)

    # A step

    def prepare(self) -> None:
        """Decide what can be decided of the next step while the one before it runs."""
        if self._in_flight is not None:
            self.planner.plan(early=True)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do. A plan without rows waits for a transfer."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._step} was planned but not updated")
        self._started = self._clock()
        self.planner.plan(early=False)
        decided, self.planner.rows = self.planner.rows, []
        if self.speculation is not None:
            self.speculation.add_drafts(decided, self.settings.max_num_batched_tokens, self.kv)
        rows: list[Row] = []
        planned: list[Planned] = []
        for each in decided:
            group = each.request.group
            if not group.begun and not each.request.finished:
                self._first_scheduled(group)
            if (row := make_row(each, self.settings, self.kv)) is not None:
                rows.append(row)
                planned.append(each)
        if not rows and not self.kv.host.num_transfers:
            return None
        copies, transfers = self.kv.take_copies(), self.kv.take_transfers()
        self._transfers.update((one.id, len(one.blocks) * self.planner.block_bytes) for one in transfers)
        self._began = [one.id for one in transfers]
        self._copied = {copy for _, copy in copies}
        for each in planned:
            if each.request.finished:  # it ended when the row was decided: the row alone was still to run
                self.kv.free(each.request, trusted=each.trusted)
        self._step += 1
        self._in_flight = planned
        return StepPlan(self._step, rows, copies, transfers)

    def _first_scheduled(self, group: Group) -> None:
        group.begun, lead = True, group.lead
        for request in group.requests:
            request.scheduled_time = self._started
            request.num_cached_tokens = lead.num_cached_tokens
        self._prompt_tokens += lead.num_prompt_tokens
        if self.settings.enable_prefix_caching:
            self._cache_queries += lead.num_prompt_tokens
            self._cache_hits += lead.num_cached_tokens

    # What came of it

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in what a step produced. Raises ``RuntimeError`` for a result that is not the plan's."""
        if self._in_flight is None or not plan.step == result.step == self._step:
            raise RuntimeError(f"step {self._step} is out; the plan is {plan.step}, the result {result.step}")
        names = [row.request_id for row in result.rows]
        if names != [row.request_id for row in plan.rows]:
            raise RuntimeError(f"the rows of step {plan.step} came back as {names}")
        planned, self._in_flight, self._began = self._in_flight, None, []
        now = self._clock()
        self._measure(plan, result, now - self._started)
        outputs: list[EngineOutput] = []
        for each, row, drawn in zip(planned, plan.rows, result.rows, strict=True):
            outputs += self.intake.take(each, row.start, drawn, now)
        for done in result.done:
            if (size := self._transfers.pop(done.id, None)) is not None:  # else it was given up
                self.planner.copy_rate.measure(size, done.seconds)
                self.kv.transfer_done(done)
        return outputs

    def _measure(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        self._rate.measure(plan, seconds)
        if self.speculation is not None and all(row.samples and len(row.token_ids) == 1 for row in plan.rows):
            drafted, tokens = (
                any(row.drafts for row in plan.rows),
                sum(len(row.token_ids) for row in result.rows),
            )
            asked = any(row.propose for row in plan.rows)
            if drafted == asked or not self.settings.draft_model:  # else half of the cost, or of the gain
                self.speculation.control.measure(len(plan.rows), drafted, tokens, seconds)

    def lose_step(self) -> list[EngineOutput]:
        """The planned step broke off: its sequences end, and what their blocks were to hold is forgotten.

        What was decided to follow it starts anew. Returns last outputs; without a step under way, none.
        """
        planned, self._in_flight = self._in_flight or [], None
        outputs = [output for each in planned for output in self.intake.fail(each, "the step broke off")]
        for each in planned:
            if each.request.finished:  # its blocks were free before, and may be named after what was lost
                size = self.settings.block_size
                self.kv.forget(each.request.contents[each.start // size : each.end // size])
        decided, self.planner.rows = self.planner.rows, []
        for each in decided:
            each.request.planned, each.group.planned = None, False
            if not each.request.finished and each.group.running:
                self.planner.requeue(each.group, trusted=False)
            elif each.known and each.request.finished:
                self.kv.free(each.request, trusted=False)
        for group in list(self.planner.running if self._copied else ()):  # without a row, but with a copy
            if not self._copied.isdisjoint(group.blocks()):
                self.planner.requeue(group)
        for transfer_id in self._began:
            del self._transfers[transfer_id]
            for request in self.kv.transfer_lost(transfer_id):
                if not request.finished and request.group.swapped != request.group.running:
                    self.planner.requeue(request.group)
        self._began = []
        return outputs

    # What others may know

    @property
    def running(self) -> list[Group]:
        return self.planner.running

    @property
    def waiting(self) -> list[Group]:
        return self.planner.waiting.groups

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured on the steps so far; 0.0 until one was."""
        return self._rate.tokens_per_s

    def stats(self) -> EngineStats:
        """The load now, and totals since the start."""
        preemptions, speculation = self.planner.preemptions, self.speculation
        return EngineStats(
            running=count(self.running),
            waiting=self.planner.waiting.seats,
            waiting_tokens=self._waiting_tokens(),
            kv_usage=self.kv.pool.usage,
            cached_blocks=self.kv.pool.num_cached,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            steps=self._step,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self.intake.generation_tokens,
            prefix_cache_queries=self._cache_queries,
            prefix_cache_hits=self._cache_hits,
            prefix_cache_collisions=self.kv.collisions,
            preemptions=sum(preemptions.values()),
            swapped=self.planner.waiting.swapped,
            preemptions_by_swap=preemptions["swap"],
            drafts=speculation.num_drafts if speculation else 0,
            draft_tokens=speculation.num_draft_tokens if speculation else 0,
            accepted_draft_tokens=speculation.num_accepted if speculation else 0,
            accepted_by_position=tuple(speculation.accepted_at) if speculation else (),
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        self.kv.reset_prefix_cache()

    def _waiting_tokens(self) -> int:
        """Tokens to compute before the last of the queue draws its first: waiting, or of prompts begun."""
        return self.planner.waiting.tokens + self.planner.tokens_under_way()
