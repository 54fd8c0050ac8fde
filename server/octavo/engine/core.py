"""The engine without its process: a scheduler and an executor, one step at a time."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from octavo.config import EngineConfig, SpeculativeConfig
from octavo.core.kv_layout import KVSpec
from octavo.core.outputs import EngineOutput, EngineRequest, EngineStats
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Limits, check_requests
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.core.speculation import Proposer
from octavo.engine.event_publisher import EventPublisher
from octavo.engine.executor import Executor
from octavo.engine.grammar_wait import GrammarWait
from octavo.engine.messages import ASLEEP
from octavo.engine.pitfalls import Pitfalls
from octavo.errors import ConfigError, InvalidRequest, OctavoError, Unavailable
from octavo.speculative.ngram import NgramProposer

GRAMMAR_WAIT_S = 0.01  # an engine that only waits for grammars looks up for messages this often
LONG_STEP_S = 2.0  # a step expected to take longer is foretold, lest its silence is taken for a stall
LOOK_STEPS = 16  # how often the engine's counts are looked at for pitfalls
UNMEASURED_STEP_S = 60.0  # what the first prompts may take, before their rate is known; and a wake-up
MEMORY_PARTS = ("weights", "kv_cache")  # of the executor: what a sleep gives back and a wake-up brings back

_log = logging.getLogger("octavo.engine")


def wall_clock() -> Callable[[], float]:
    """Seconds since the epoch that never jump: what the system's clock said at first, plus a steady count."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


def kv_groups(kv: dict[str, Any]) -> tuple[KVSpec, ...]:
    """The KV groups of an executor's ``info.kv``. Raises ``ConfigError`` for a kind the scheduler has not."""
    kinds = [group["kind"] for group in kv["groups"]]
    if unknown := sorted(set(kinds) - {"full", "sliding_window"}):
        raise ConfigError(
            f"the model keeps K/V by the rule {unknown[0]!r}: 'full' and 'sliding_window' are supported"
        )
    return tuple(KVSpec(group["kind"], group.get("window")) for group in kv["groups"])


def proposers(guesses: SpeculativeConfig | None) -> Callable[[], Proposer] | None:
    """What makes each sequence its proposer; None where there are no drafts, or a draft model makes them."""
    if guesses is None or guesses.method != "ngram":
        return None
    return lambda: NgramProposer(guesses.prompt_lookup_min, guesses.prompt_lookup_max)


class EngineCore:
    """Requests in, outputs out; the caller calls ``step`` while ``has_work``.

    With ``async_scheduling`` a step runs on a thread of its own while the caller does something with the
    outputs of the one before, and while the next is planned; the tokens are the same either way.

    ``foretell`` is called with the seconds expected before a step that may be long.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        clock: Callable[[], float] | None = None,
        foretell: Callable[[float], None] | None = None,
        rank: int = 0,
    ) -> None:
        """Raises ``ConfigError`` when the settings do not fit the model, or a port for KV events is taken."""
        info = executor.info
        self.info = info
        self._executor = executor
        events = config.kv_events_config
        publishes = events is not None and events.on
        guesses = config.speculative_config
        self._scheduler = Scheduler(
            SchedulerSettings(
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_logprobs=info.vocab_size if config.max_logprobs < 0 else config.max_logprobs,
                max_queue=config.max_queue,
                max_queue_tokens=config.max_queue_tokens,
                scheduling_policy=config.scheduling_policy,  # type: ignore[arg-type]  # one of its choices
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                preemption_mode=config.preemption_mode,  # type: ignore[arg-type]
                enable_chunked_prefill=config.enable_chunked_prefill,
                enable_prefix_caching=config.enable_prefix_caching,
                prefix_caching_hash_algo=config.prefix_caching_hash_algo,
                prefix_caching_verify=config.prefix_caching_verify,
                kv_events=publishes,
                num_speculative_tokens=guesses.num_speculative_tokens if guesses else 0,
                draft_model=guesses is not None and guesses.method == "draft_model",
            ),
            info.num_blocks,
            info.eos_token_ids,
            clock=clock or wall_clock(),
            groups=kv_groups(dict(info.kv)),
            block_bytes=info.block_bytes,
            num_host_blocks=info.num_host_blocks,
            offload=config.kv_offloading_gib > 0,
            make_proposer=proposers(guesses),
        )
        self._pitfalls = Pitfalls(block_size=config.block_size, prefix_caching=config.enable_prefix_caching)
        self._turns = self._row_faults = 0
        self._paused = False  # no step begins; what runs ends, and sequences keep their blocks
        self._asleep: set[str] = set()  # the parts of the executor's memory that were given back
        self._foretell = foretell
        self._grammars = GrammarWait(lambda grammar: executor.prepare(grammar))
        self._rejected: list[tuple[list[str], OctavoError]] = []
        self._ended: list[EngineOutput] = []  # outputs of aborted requests, given out with the next step
        self._runner = ThreadPoolExecutor(1, "executor") if config.async_scheduling else None
        self._begun = threading.Event()
        self._running: tuple[StepPlan, Future[StepResult]] | None = None
        self._publisher = EventPublisher(events, config.host, rank) if events and publishes else None
        if self._publisher is not None:
            weakref.finalize(self, self._publisher.close)
        self._admin: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self._scheduler.reset_prefix_cache,
            "kv_snapshot": self._kv_snapshot,
            "pause": self._pause,
            "resume": self._resume,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }

    @property
    def kv(self) -> dict[str, Any]:
        """The ``kv`` object of ``/server_info``; without a prefix cache there is no hash scheme."""
        hasher, caching = self._scheduler.hasher, self._scheduler.settings.enable_prefix_caching
        return {
            "hash": hasher.algo if caching else None,
            "root": hasher.root.hex() if caching else None,
            "block_size": hasher.block_size,
            "num_blocks": self.info.num_blocks,
            **self.info.kv,
            "events": self._publisher.addresses if self._publisher is not None else None,
        }

    @property
    def limits(self) -> Limits:
        """What one request may ask for."""
        return self._scheduler.limits

    def check(self, requests: Sequence[EngineRequest]) -> None:
        """Raise what ``add`` would raise for these requests whatever else is going on."""
        check_requests(requests, self.limits)

    def max_tokens_after(self, prompt_tokens: int) -> int:
        """The longest output that fits after a prompt; 0 or less when not even the prompt fits."""
        limits = self.limits
        return min(limits.max_model_len, limits.capacity + 1) - prompt_tokens

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Take all of these or none: ``InvalidRequest``, ``ContextLengthExceeded``, ``QueueFull``,
        ``DeadlineExceeded``, or ``Unavailable`` while the engine sleeps.

        Those with a grammar that is not built yet enter once it is; ``take_rejected`` tells of those refused.
        """
        if self._asleep:
            raise Unavailable(ASLEEP)
        self.check(requests)
        if not self._grammars.hold(requests):
            self._enter(requests)

    def take_rejected(self) -> list[tuple[list[str], OctavoError]]:
        """Requests that could not enter after their grammars were built, and why, since the last call."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _enter(self, requests: Sequence[EngineRequest]) -> None:
        self._scheduler.add(requests)
        for request in requests:
            if not request.sample_index:
                self._pitfalls.saw(request.prompt_token_ids)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these; their blocks are free at once, their last outputs come with the next ``step``."""
        outputs = (self._grammars.abort(one) or self._scheduler.abort(one) for one in request_ids)
        self._ended += [output for output in outputs if output is not None]

    @property
    def has_work(self) -> bool:
        waiting = bool(self._ended) or bool(self._grammars)
        to_run = self._scheduler.has_requests and not self._paused
        return waiting or self._running is not None or to_run

    def wait(self) -> bool:
        """Let the step that runs come to its end, and plan the next meanwhile. False when none runs."""
        if self._running is None:
            return False
        plan, done = self._running
        if not done.done():
            self._foretell_long(plan)
            self._scheduler.prepare()
            done.exception()  # waits, and raises nothing
        return True

    def step(self) -> list[EngineOutput]:
        """Run one step, if there is anything to compute: its outputs; or, with asynchronous scheduling, start
        one: the outputs of the one before.

        What the executor raises, and an interrupt from the keyboard within it, ends the requests of the step.
        """
        self._executor.check()
        if self._grammars:
            self._enter_waiting()
        outputs, self._ended = self._ended + self._scheduler.expire(), []
        try:
            if self._runner is None:
                self._run_step(outputs)
            else:
                self._turn_step(outputs, self._runner)
        except BaseException:
            self._ended = outputs  # an interrupt too: a notebook's user goes on with the same engine
            raise
        self._publish_events()
        self._turns += 1
        if self._turns % LOOK_STEPS == 0:
            for warning in self._pitfalls.look(self._scheduler.stats()):
                _log.warning(warning)
        return outputs

    def _enter_waiting(self) -> None:
        if self._running is None and not self._ended and not self._scheduler.has_requests:
            self._grammars.wait(GRAMMAR_WAIT_S)
        for requests, fault in self._grammars.ready():
            try:
                if fault is not None:
                    raise fault
                self._enter(requests)
            except OctavoError as error:
                self._rejected.append(([request.request_id for request in requests], error))

    def _run_step(self, outputs: list[EngineOutput]) -> None:
        plan = None if self._paused else self._scheduler.schedule()
        if plan is None:
            return
        self._foretell_long(plan)
        try:
            result = self._executor.execute(plan)
        except BaseException:
            outputs += self._scheduler.lose_step()
            raise
        outputs += self._update(plan, result)

    def _turn_step(self, outputs: list[EngineOutput], runner: ThreadPoolExecutor) -> None:
        if self.wait() and self._running is not None:  # an interrupt of the wait leaves the step running
            (plan, done), self._running = self._running, None
            if (fault := done.exception()) is not None:
                outputs += self._scheduler.lose_step()
                raise fault
            outputs += self._update(plan, done.result())
        if not self._paused and (following := self._scheduler.schedule()) is not None:
            self._running = following, runner.submit(self._execute, following)
            self._begun.wait()  # else the step only begins when this thread next lets go of the interpreter
            self._begun.clear()

    def _execute(self, plan: StepPlan) -> StepResult:
        self._begun.set()
        return self._executor.execute(plan)

    def _update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        outputs = self._scheduler.update(plan, result)
        self._row_faults += sum(one.finish_reason == "error" and not one.refused for one in outputs)
        return outputs

    def _foretell_long(self, plan: StepPlan) -> None:
        if self._foretell is not None and (seconds := self._expected_s(plan)) > LONG_STEP_S:
            self._foretell(seconds)

    def _expected_s(self, plan: StepPlan) -> float:
        prompt = sum(len(row.token_ids) for row in plan.rows if len(row.token_ids) > 1)
        rate = self._scheduler.prefill_tokens_per_s
        return prompt / rate if rate else UNMEASURED_STEP_S * bool(prompt)

    def _publish_events(self) -> None:
        if self._publisher is not None:
            self._publisher.publish(self._scheduler.kv.take_events())

    def _pause(self) -> None:
        self._paused = True

    def _resume(self) -> None:
        self._paused = False

    def _sleep(self, level: int = 1) -> None:
        """End all requests, forget all prefixes, and give the memory back."""
        self.abort([*self._grammars.request_ids, *self._scheduler.request_ids])
        self._scheduler.reset_prefix_cache()  # nothing is saved to the host tier any more
        self._paused, ended = False, self._ended
        while self.has_work:  # a step or transfers under way
            ended = ended + self.step()
        self._scheduler.reset_prefix_cache()
        self._ended = ended
        self._publish_events()
        self._executor.sleep(level)
        self._asleep = set(MEMORY_PARTS)

    def _wake_up(self, tags: Sequence[str] = ()) -> list[str]:
        """Bring back these parts, all without any -> those that still sleep. The cache is made last."""
        if unknown := set(tags) - set(MEMORY_PARTS):
            known = " and ".join(MEMORY_PARTS)
            raise InvalidRequest(f"tags holds {min(unknown)!r:.80}: known are {known}", param="tags")
        left = self._asleep - set(tags or MEMORY_PARTS)
        if self._asleep and self._foretell is not None:
            self._foretell(UNMEASURED_STEP_S)
        if "weights" in self._asleep - left:
            self._executor.load_weights()
        if self._asleep and not left:
            self._executor.make_cache()
        self._asleep = left
        return sorted(left)

    def _kv_snapshot(self) -> dict[str, Any]:
        """What can be found in the cache now, and the number of the batch of events that led there."""
        self._publish_events()
        sequence = self._publisher.sequence if self._publisher is not None else None
        return {"sequence": sequence, **msgspec.structs.asdict(self._scheduler.kv.snapshot())}

    def stats(self) -> EngineStats:
        """The load now, and totals since the start; a step counts when it has ended."""
        stats, kv, events = self._scheduler.stats(), self._scheduler.kv, self._publisher
        return msgspec.structs.replace(
            stats,
            steps=stats.steps - (self._running is not None),
            host_usage=kv.host.pool.usage,
            host_hit_tokens=kv.host_hit_tokens,
            host_blocks_saved=kv.host.blocks_saved,
            host_blocks_loaded=kv.host.blocks_loaded,
            row_faults=self._row_faults,
            kv_event_batches=events.sequence + 1 if events else 0,
            kv_event_batches_dropped=events.dropped if events else 0,
            kv_event_batches_missed=events.missed if events else 0,
        )

    def admin(self, method: str, **arguments: Any) -> Any:
        """Call an admin method by name. Raises ``InvalidRequest`` for one that does not exist."""
        if method not in self._admin:
            known = ", ".join(self._admin)
            raise InvalidRequest(f"no admin method {method!r}: known are {known}", param="method")
        return self._admin[method](**arguments)
