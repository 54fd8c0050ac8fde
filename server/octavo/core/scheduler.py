"""Continuous batching: which tokens of which sequences the next step computes.

There is no prefill or decode phase. Each sequence has ``num_computed_tokens`` chasing ``num_tokens``; each
step hands out one budget of tokens, running sequences first, then waiting ones, both in order of arrival.
Prefix hits, chunks of a long prompt and preempted sequences that come back are all that one rule.

Sequences run in order of arrival and wait in order of arrival, and every running one came before every
waiting one. A sequence is admitted only with blocks for all its present tokens and with budget left over from
those before it: so at most the last running one is amid its prompt, and a long prompt never holds up a
running stream. When blocks run out the latest to arrive gives up its own and goes back to the head of the
queue; the oldest is never a victim of others, and alone it fits (``check_request``), so it always progresses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from octavo.core.block_hash import BlockHasher
from octavo.core.kv_cache import KVCache
from octavo.core.kv_layout import KVSpec
from octavo.core.logit_rules import logit_rules
from octavo.core.outputs import EngineOutput, EngineRequest, EngineStats, FinishReason
from octavo.core.plan import Row, RowResult, SampleSpec, StepPlan, StepResult, TokenLogprobs
from octavo.core.prefill_rate import PrefillRate
from octavo.core.request import Limits, Request, check_request
from octavo.errors import ConfigError, InvalidRequest, QueueFull

MAX_RETRY_AFTER_S = 60  # a longer guess at when the queue has room is not worth telling
RESERVE_SHARE = 100  # one block in so many stays free on admission, for running sequences to grow into


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of ``EngineConfig`` that scheduling needs, with the model's own limits filled in."""

    max_model_len: int
    vocab_size: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_queue: int = 1024
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    prefix_caching_verify: bool = False
    kv_events: bool = False


class Scheduler:
    """Owns the requests and their blocks. Pure: the only input beside the calls is ``clock`` (seconds).

    Use: ``plan = schedule()``, run it, ``update(plan, result)``, and again. ``add`` and ``abort`` come at any
    time.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        num_blocks: int,
        eos_token_ids: Sequence[int],
        *,
        clock: Callable[[], float],
        groups: Sequence[KVSpec] = (KVSpec(),),
    ) -> None:
        if not settings.enable_chunked_prefill and settings.max_model_len > settings.max_num_batched_tokens:
            raise ConfigError(
                f"max-num-batched-tokens is {settings.max_num_batched_tokens}, below max-model-len "
                f"{settings.max_model_len}: without chunked prefill a prompt must fit one step. Raise it, "
                "lower max-model-len, or leave chunked prefill on"
            )
        self.settings = settings
        self.hasher = BlockHasher(settings.prefix_caching_hash_algo, settings.block_size)
        caching = settings.enable_prefix_caching
        self.kv = KVCache(
            num_blocks,
            settings.block_size,
            self.hasher if caching else None,
            groups,
            max_chunk=settings.max_num_batched_tokens,
            verify=settings.prefix_caching_verify,
            events=settings.kv_events,
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._eos = frozenset(eos_token_ids)
        self.limits = Limits(
            settings.max_model_len, settings.vocab_size, num_blocks // len(groups), settings.block_size
        )
        self._reserve = num_blocks // RESERVE_SHARE
        self._clock = clock
        self._rate = PrefillRate()
        self._step = 0
        self._in_flight: list[Request] | None = None  # of the plan that was not updated yet, in its order
        self._started = 0.0
        self._preemptions = self._prompt_tokens = self._generation_tokens = 0
        self._cache_queries = self._cache_hits = 0

    # Requests come and go

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises ``InvalidRequest``, ``ContextLengthExceeded`` (it can never fit; names need and capacity) or
        ``QueueFull`` (with seconds after which there may be room); then nothing was queued.
        """
        check_request(request, self.limits)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request_id {request.request_id!r} is in use", param="request_id")
        seats = max(0, self.settings.max_num_seqs - len(self.running))
        if len(self.waiting) - seats >= self.settings.max_queue:
            raise QueueFull(
                f"{len(self.waiting)} requests wait (max-queue {self.settings.max_queue}): try again later",
                retry_after_s=self._retry_after(),
            )
        new = Request(
            request,
            arrival=request.arrival_time or self._clock(),
            max_model_len=self.settings.max_model_len,
            num_groups=len(self.kv.groups),
            rules=logit_rules(request, self._eos),
        )
        self.kv.name_blocks(new)
        self._requests[new.request_id] = new
        self.waiting.append(new)

    def abort(self, request_id: str) -> EngineOutput | None:
        """End a request in any state; its blocks are free at once. None for an id that is not here."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        return self._finish(request, [], "abort")

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    # A step

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._step} was planned but not updated")
        self._started = self._clock()
        rows: list[Row] = []
        planned: list[Request] = []
        budget = self.settings.max_num_batched_tokens
        index, preempted = 0, False
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            while not self.kv.grow(request, request.num_tokens):
                preempted = True
                victim = self._preempt_latest()
                if victim is request:
                    break
            else:
                budget -= self._plan_row(request, budget, rows)
                planned.append(request)
                index += 1
        seats = 0 if preempted else self.settings.max_num_seqs - len(self.running)
        while self.waiting and budget > 0 and seats > 0:
            request = self.waiting[0]
            if not self._admit(request, budget, alone=not self.running):
                break
            seats -= 1
            budget -= self._plan_row(request, budget, rows)
            planned.append(request)
        if not rows:
            return None
        self._step += 1
        self._in_flight = planned
        return StepPlan(self._step, rows, self.kv.take_copies())

    def _plan_row(self, request: Request, budget: int, rows: list[Row]) -> int:
        """Plan the next tokens of a sequence that has its blocks. Returns how many."""
        start, total = request.num_computed_tokens, len(request.token_ids)
        end = min(total, start + budget)
        samples: list[SampleSpec] = []
        if end == total:
            sampling = request.request.sampling
            samples = [
                SampleSpec(
                    sampling.temperature,
                    sampling.top_k,
                    sampling.top_p,
                    sampling.seed,  # type: ignore[arg-type]  # check_request has seen to it
                    request.request.sample_index,
                    end,
                    sampling.logprobs,
                    sampling.min_p,
                    request.rules,
                )
            ]
        rows.append(
            Row(
                request.request_id,
                request.token_ids[start:end],
                start,
                [*request.block_tables],
                samples,
                history=request.token_ids if request.rules is not None else None,
            )
        )
        request.num_computed_tokens = end
        self.kv.register(request)
        return end - start

    def _admit(self, request: Request, budget: int, *, alone: bool) -> bool:
        self.kv.name_blocks(request)
        hit = self.kv.find_prefix(request)
        if not self.settings.enable_chunked_prefill and request.num_tokens - hit.num_tokens > budget:
            return False
        if not self.kv.admit(request, hit, 0 if alone else self._reserve, request.num_tokens):
            return False
        self.waiting.popleft()
        self.running.append(request)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = hit.num_tokens
            request.scheduled_time = self._started
            self._prompt_tokens += request.num_prompt_tokens
            if self.settings.enable_prefix_caching:
                self._cache_queries += request.num_prompt_tokens
                self._cache_hits += hit.num_tokens
        return True

    def _preempt_latest(self) -> Request:
        victim = self.running.pop()
        self.kv.free(victim)
        self.waiting.appendleft(victim)
        self._preemptions += 1
        return victim

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in what a step produced. Raises ``RuntimeError`` for a result that is not the plan's."""
        if self._in_flight is None or not plan.step == result.step == self._step:
            raise RuntimeError(f"step {self._step} is out; the plan is {plan.step}, the result {result.step}")
        names = [row.request_id for row in result.rows]
        if names != [row.request_id for row in plan.rows]:
            raise RuntimeError(f"the rows of step {plan.step} came back as {names}")
        planned, self._in_flight = self._in_flight, None
        now = self._clock()
        self._rate.measure(plan, now - self._started)
        outputs = []
        for request, row, drawn in zip(planned, plan.rows, result.rows, strict=True):
            if request.finished:
                continue
            if drawn.error is not None or (row.samples and not drawn.token_ids):
                outputs.append(
                    self._finish(request, [], "error", error=drawn.error or "the step drew no token")
                )
            elif row.samples:
                outputs.append(self._take_tokens(request, drawn, now))
        if any(output.finish_reason is not None for output in outputs):
            self.running = [request for request in self.running if not request.finished]
        return outputs

    def lose_step(self) -> list[EngineOutput]:
        """The planned step broke off: its sequences end, and what their blocks were to hold is forgotten.

        Returns their last outputs; without a step under way there are none.
        """
        planned, self._in_flight = self._in_flight or [], None
        lost = [request for request in planned if not request.finished]
        outputs = [self._finish(request, [], "error", error="the step broke off") for request in lost]
        self.running = [request for request in self.running if not request.finished]
        return outputs

    def _take_tokens(self, request: Request, drawn: RowResult, now: float) -> EngineOutput:
        taken = 0
        reason: FinishReason | None = None
        stop_token: int | None = None
        while reason is None and taken < len(drawn.token_ids):
            request.token_ids.append(drawn.token_ids[taken])
            taken += 1
            reason, stop_token = request.finish_reason(self._eos)
        self._generation_tokens += taken
        first = request.first_token_time == 0.0
        if first:
            request.first_token_time = now
        tokens, logprobs = drawn.token_ids[:taken], drawn.logprobs
        if logprobs is not None:
            logprobs = logprobs[:taken]
        if reason is not None:
            return self._finish(request, tokens, reason, logprobs=logprobs, stop_reason=stop_token)
        return EngineOutput(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            num_cached_tokens=request.num_cached_tokens,
            times=request.times(0.0) if first else None,
        )

    def _finish(
        self,
        request: Request,
        token_ids: list[int],
        reason: FinishReason,
        *,
        logprobs: list[TokenLogprobs] | None = None,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> EngineOutput:
        """Free what a request holds and make its last output. The caller takes it off its queue."""
        request.finished = True
        self.kv.free(request, trusted=error is None)
        del self._requests[request.request_id]
        return EngineOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            num_cached_tokens=max(0, request.num_cached_tokens),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            times=request.times(self._clock()),
        )

    # What others may know

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured on the steps so far; 0.0 until one was."""
        return self._rate.tokens_per_s

    def stats(self) -> EngineStats:
        """The load now, and totals since the start."""
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            waiting_tokens=self._waiting_tokens(),
            kv_usage=self.kv.pool.usage,
            cached_blocks=self.kv.pool.num_cached,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            steps=self._step,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=self._cache_queries,
            prefix_cache_hits=self._cache_hits,
            prefix_cache_collisions=self.kv.collisions,
            preemptions=self._preemptions,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        self.kv.reset_prefix_cache()

    def _waiting_tokens(self) -> int:
        """Tokens to compute before the last of the queue draws its first: waiting, or of prompts begun."""
        queued = sum(len(request.token_ids) for request in self.waiting)
        if self.running:  # only the last of them can be amid its prompt
            last = self.running[-1]
            queued += max(0, len(last.token_ids) - last.num_computed_tokens - 1)
        return queued

    def _retry_after(self) -> int:
        rate = self.prefill_tokens_per_s
        guess = self._waiting_tokens() / rate if rate else 1
        return max(1, min(MAX_RETRY_AFTER_S, round(guess)))
