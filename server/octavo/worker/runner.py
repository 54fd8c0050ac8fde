"""Runs step plans on one model: copies, forward pass, logits where a token is drawn, sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import Row, RowResult, StepPlan, StepResult
from octavo.layers.batch import ActivationBuffers
from octavo.models.base import CausalLM
from octavo.sampling.sampler import Draw, sample
from octavo.worker.inputs import StepInputs
from octavo.worker.sizing import CacheSize
from octavo_kernels import Ops


class ModelRunner:
    """One model with its KV cache: ``run`` takes a plan and returns the tokens drawn."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        activations: ActivationBuffers,
        size: CacheSize,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self._ops, self._device = model, ops, device
        self.max_rows, self.max_tokens = max_num_seqs, activations.max_tokens
        self.block_size = size.block_size
        self.inputs = StepInputs(activations, max_num_seqs, size.max_model_len, size.block_size, device)
        shape = ops.kv_cache_shape(
            size.num_blocks, size.block_size, model.shape.kv_heads, model.shape.head_dim
        )
        self.caches = [zeroed(shape, dtype, device) for _ in range(model.config.num_layers)]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One forward pass. A row whose logits are not finite gets an error of its own."""
        if any(row.drafts or len(row.samples) > 1 for row in plan.rows):
            raise ValueError("a row has drafts or several samples: not supported by this runner")
        if plan.copies:
            self._copy(plan.copies)
        hidden = self.model.forward(self.inputs.fill(plan.rows), self.caches)
        drawing = [i for i, row in enumerate(plan.rows) if row.samples]
        results: dict[int, Draw] = {}
        if drawing:
            logits = self.model.logits(hidden, self._last_tokens(plan.rows, drawing, len(hidden)))
            draws = sample(logits, [spec for row in plan.rows for spec in row.samples])
            results = dict(zip(drawing, draws, strict=True))
        return StepResult(plan.step, [_row_result(row, results.get(i)) for i, row in enumerate(plan.rows)])

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._device)
        for cache in self.caches:
            self._ops.copy_blocks(cache, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())

    def _last_tokens(self, rows: Sequence[Row], drawing: Sequence[int], tokens: int) -> Tensor | None:
        """Which tokens of the batch end a drawing row, int64; None when each token does."""
        if len(drawing) == tokens:
            return None
        ends = np.cumsum([len(row.token_ids) for row in rows]) - 1
        return torch.from_numpy(ends[drawing]).to(self._device)


def _row_result(row: Row, draw: Draw | None) -> RowResult:
    if draw is None:
        return RowResult(row.request_id, [])
    if draw.error is not None:
        return RowResult(row.request_id, [], error=draw.error)
    return RowResult(row.request_id, [draw.token], None if draw.logprobs is None else [draw.logprobs])


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from calloc, so that pages take memory only once blocks in them are used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
