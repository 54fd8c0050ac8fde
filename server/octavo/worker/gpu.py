"""GPU memory: what the weights hold and what the largest step needs at its peak, measured."""

from __future__ import annotations

import torch

from octavo.core.plan import Row, SampleSpec, StepPlan
from octavo.worker.runner import ModelRunner
from octavo.worker.sizing import gpu_cache_bytes


def gpu_budget(profiling: ModelRunner, plan: StepPlan, utilisation: float, device: torch.device) -> int:
    """Bytes for the KV pool, after one run of the largest step on ``profiling`` (a runner with a small
    cache).
    """
    _, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    profiling.run(plan)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - weights
    return gpu_cache_bytes(total, utilisation, weights, peak)


def largest_step(max_rows: int, max_tokens: int, block_size: int, num_groups: int = 1) -> StepPlan:
    """As many rows and tokens as a step may have, each row drawing; the rows share their blocks."""
    rows = min(max_rows, max_tokens)
    share = max_tokens // rows
    tables = [list(range(-(-share // block_size)))] * num_groups
    draw = SampleSpec(0.0, 0, 1.0, 0, 0, share)
    return StepPlan(0, [Row(str(i), [0] * share, 0, tables, [draw], propose=1) for i in range(rows)])
