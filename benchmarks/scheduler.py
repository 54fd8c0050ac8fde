"""What scheduling and bookkeeping cost a step: the median of schedule + update with 256 decoding sequences.

python benchmarks/scheduler.py [--sequences 256] [--steps 400] [--block-size 16] [--context 512]
"""

from __future__ import annotations

import argparse
import statistics
import time

from octavo.core.outputs import EngineRequest
from octavo.core.plan import RowResult, StepPlan, StepResult
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings

LIMIT_MS = 1.0  # what a step of 256 sequences may cost at most


def drawn(plan: StepPlan) -> StepResult:
    """A token for each sample, all of them the same."""
    return StepResult(plan.step, [RowResult(row.request_id, [7] * len(row.samples)) for row in plan.rows])


def measure(sequences: int, steps: int, block_size: int, context: int, waiting: int) -> list[float]:
    """CPU seconds of schedule + update in each step in which all sequences decode.

    What runs beside this process does not count, but slows all it does: so look at the machine first.
    """
    length = context + steps + 100
    blocks = sequences * (length // block_size + 2)
    settings = SchedulerSettings(
        max_model_len=2 * length,
        vocab_size=50_000,
        block_size=block_size,
        max_num_seqs=sequences,
        max_num_batched_tokens=8192,
        max_queue=waiting + sequences,
    )
    scheduler = Scheduler(settings, blocks, [2], clock=time.monotonic)
    for i in range(sequences + waiting):
        prompt = [(i * 7919 + j) % 50_000 for j in range(context)]
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=length, ignore_eos=True)
        scheduler.add([EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling)])
    times: list[float] = []
    while len(times) < steps:
        began = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None
        result = drawn(plan)
        resumed = time.thread_time()
        scheduler.update(plan, result)
        scheduler.stats()
        ended = time.thread_time()
        if all(len(row.token_ids) == 1 for row in plan.rows) and len(plan.rows) == sequences:
            times.append(planned - began + ended - resumed)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--waiting", type=int, default=0, help="sequences in the queue meanwhile")
    args = parser.parse_args()
    times = measure(args.sequences, args.steps, args.block_size, args.context, args.waiting)
    median, worst = 1000 * statistics.median(times), 1000 * max(times)
    print(
        f"{args.sequences} sequences decode, {args.waiting} wait: {median:.2f} ms a step (median of "
        f"{len(times)}; worst {worst:.2f}), {1000 * median / args.sequences:.2f} us a sequence; "
        f"the limit is {LIMIT_MS} ms"
    )


if __name__ == "__main__":
    main()
