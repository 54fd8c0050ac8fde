"""The real scheduler on simulated time: requests arrive by a trace, steps take what ``costs`` says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.outputs import EngineOutput, EngineRequest
from octavo.core.plan import RowResult, StepPlan, StepResult, TransferDone
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.errors import ConfigError, ContextLengthExceeded, QueueFull
from octavo.simulate.costs import Machine
from octavo.simulate.trace import VOCABULARY, Arrival


@dataclass
class Request:
    """What became of one arrival. Times are seconds of the simulation."""

    arrival: Arrival
    cached_tokens: int = 0
    first_token: float = math.nan
    finished: float = math.nan

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival.time

    @property
    def normalised_latency(self) -> float:
        """Seconds from arrival to end for each output token: the PagedAttention paper's measure."""
        return (self.finished - self.arrival.time) / self.arrival.output_tokens


@dataclass(frozen=True)
class Sample:
    """The engine after one step."""

    time: float
    running: int
    waiting: int
    kv_usage: float
    generated: int
    preemptions: int


@dataclass
class Replay:
    """The whole run."""

    served: list[Request] = field(default_factory=list)
    refused: list[tuple[Arrival, str]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    steps: int = 0
    token_share: float = 0.0  # of the allocated slots, over all steps, that held tokens

    @property
    def seconds(self) -> float:
        return self.samples[-1].time if self.samples else 0.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replay(arrivals: Sequence[Arrival], settings: SchedulerSettings, machine: Machine) -> Replay:
    """Run a trace to its end. A request that can never fit is refused, as the engine would.

    Raises ``ConfigError`` where the machine has no room for one block.
    """
    blocks = machine.num_blocks(settings.block_size)
    if blocks < 1:
        raise ConfigError(f"{machine.kv_bytes:.0f} bytes of KV cache hold no block of {settings.block_size}")
    clock = Clock()
    scheduler = Scheduler(settings, blocks, eos_token_ids=(), clock=clock)
    result, requests = Replay(), {}
    coming, held, allocated = 0, 0, 0
    while coming < len(arrivals) or scheduler.has_requests:
        if not scheduler.has_requests:
            clock.now = max(clock.now, arrivals[coming].time)
        while coming < len(arrivals) and arrivals[coming].time <= clock.now:
            one = arrivals[coming]
            try:
                scheduler.add([_request(one, coming)])
                requests[str(coming)] = Request(one)
                result.served.append(requests[str(coming)])
            except (ContextLengthExceeded, QueueFull) as error:
                result.refused.append((one, error.message))
            coming += 1
        plan = scheduler.schedule()
        if plan is None:
            continue
        clock.now += machine.step_s(plan, settings.block_size)
        outputs = scheduler.update(plan, _execute(plan, machine, settings.block_size))
        for output in outputs:
            _note(requests[output.request_id], output, clock.now)
        stats = scheduler.stats()
        result.steps += 1
        held += sum(row.start + len(row.token_ids) for row in plan.rows)
        allocated += sum(len(row.block_tables[0]) for row in plan.rows) * settings.block_size
        result.samples.append(
            Sample(
                clock.now,
                stats.running,
                stats.waiting,
                stats.kv_usage,
                stats.generation_tokens,
                stats.preemptions,
            )
        )
    result.token_share = held / allocated if allocated else 0.0
    return result


def _request(arrival: Arrival, number: int) -> EngineRequest:
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=arrival.output_tokens, ignore_eos=True)
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=arrival.prompt(number),
        sampling=sampling,
        arrival_time=arrival.time or 1e-9,  # 0 would mean: take the clock's
    )


def _execute(plan: StepPlan, machine: Machine, block_size: int) -> StepResult:
    """Draw tokens that no other sequence has at the same place; transfers end with the step."""
    rows = [
        RowResult(
            row.request_id, [hash((row.request_id, spec.position)) % VOCABULARY for spec in row.samples]
        )
        for row in plan.rows
    ]
    done = [TransferDone(one.id, machine.transfer_s(len(one.blocks), block_size)) for one in plan.transfers]
    return StepResult(plan.step, rows, done)


def _note(request: Request, output: EngineOutput, now: float) -> None:
    if output.token_ids and math.isnan(request.first_token):
        request.first_token = now
        request.cached_tokens = output.num_cached_tokens
    if output.finish_reason is not None:
        request.finished = now
