"""What a step takes on a machine that is not there: a roofline of memory and arithmetic.

A step reads all weights once and the keys and values of every row, and multiplies every token with the
weights; the larger of the two times counts, plus a fixed overhead. Reading pages costs more than reading one
stretch: each block adds as much as ``BLOCK_OVERHEAD_TOKENS`` tokens, which at block size 16 makes attention
23 % slower than over contiguous memory, in the middle of what the PagedAttention paper measured (20 to 26 %).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.plan import StepPlan

BLOCK_OVERHEAD_TOKENS = 3.7


@dataclass(frozen=True)
class Machine:
    """A model on a device. The defaults are OPT-13B in 16 bits on one A100 with 40 GB, at the shares of peak
    that good kernels reach.
    """

    parameters: float = 13e9
    kv_token_bytes: int = 819_200
    kv_bytes: float = 12e9
    read_bytes_per_s: float = 1.2e12
    flops_per_s: float = 1.6e14
    copy_bytes_per_s: float = 2e10  # to host memory and back
    step_overhead_s: float = 0.002

    def num_blocks(self, block_size: int) -> int:
        return int(self.kv_bytes / (self.kv_token_bytes * block_size))

    def step_s(self, plan: StepPlan, block_size: int) -> float:
        """Seconds that one step takes."""
        context = blocks = 0
        for row in plan.rows:
            end = row.start + len(row.token_ids)
            context += end
            blocks += -(-end // block_size)
        read = 2 * self.parameters + self.kv_token_bytes * (context + BLOCK_OVERHEAD_TOKENS * blocks)
        arithmetic = 2 * self.parameters * plan.num_tokens / self.flops_per_s
        copied = len(plan.copies) * block_size * self.kv_token_bytes / self.read_bytes_per_s
        return self.step_overhead_s + max(read / self.read_bytes_per_s, arithmetic) + copied

    def transfer_s(self, blocks: int, block_size: int) -> float:
        """Seconds that copying so many blocks to host memory or back takes."""
        return blocks * block_size * self.kv_token_bytes / self.copy_bytes_per_s
