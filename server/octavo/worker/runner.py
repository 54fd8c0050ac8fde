"""Runs step plans on one model: transfers, copies, forward pass, draws where they are due, proposals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import torch

from octavo.core.plan import Row, RowResult, StepPlan, StepResult
from octavo.models.base import CausalLM
from octavo.worker.connector import KVConnector
from octavo.worker.device import Device
from octavo.worker.draft_model import DraftModel
from octavo.worker.draws import Drawer, draws_of, row_result
from octavo.worker.forward import Forward
from octavo.worker.pages import KVPages
from octavo_kernels import Ops


class ModelRunner:
    """One model with its KV cache: ``run`` takes a plan and returns what was drawn."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        drawer: Drawer,
        forward: Forward,
        pages: KVPages,
        connector: KVConnector,
        device: Device,
        draft: DraftModel | None = None,
    ) -> None:
        self.model, self.forward, self.pages = model, forward, pages
        self._ops, self._drawer, self._connector, self._draft = ops, drawer, connector, draft
        self._device = device
        self._tensors = pages.tensors + (draft.pages.tensors if draft is not None else [])

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture decode steps of so many rows, and those of the draft model."""
        self.forward.capture(sizes)
        if self._draft is not None:
            self._draft.forward.capture(sizes)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One forward pass, if the plan has rows; else wait for a transfer to end.

        A row whose logits are not finite gets an error of its own. Ranks other than the first return no rows.
        """
        for transfer in plan.transfers:
            (self._connector.load if transfer.load else self._connector.save)(transfer)
        if plan.copies:
            self._copy(plan.copies)
        results = self._run_rows(plan.rows) if plan.rows else []
        return StepResult(plan.step, results, self._connector.finished(wait=not plan.rows))

    def _run_rows(self, rows: Sequence[Row]) -> list[RowResult]:
        hidden = self.forward(rows)
        ends = list(accumulate(len(row.token_ids) + len(row.drafts) for row in rows))
        draws = [list(draws_of(row, end)) for row, end in zip(rows, ends, strict=True)]
        drawn = iter(self._drawer.draw(hidden, [draw for each in draws for draw in each]))
        scores = [
            None if row.prompt_logprobs is None else self._drawer.score_prompt(hidden, row, end)
            for row, end in zip(rows, ends, strict=True)
        ]
        if not self._drawer.draws:
            return []
        results = [
            row_result(row, [next(drawn) for _ in each], score)
            for row, each, score in zip(rows, draws, scores, strict=True)
        ]
        if self._draft is None:
            return results
        proposed = self._draft.propose(rows, results)
        return [
            msgspec.structs.replace(result, drafts=proposed.get(result.request_id, [])) for result in results
        ]

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        pairs = self._device.tensor(copies)
        for tensor in self._tensors:
            self._ops.copy_blocks(tensor, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
