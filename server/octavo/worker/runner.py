"""Runs step plans on one model: copies, forward pass, logits where a token is drawn, sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import Row, StepPlan, StepResult
from octavo.layers.batch import ActivationBuffers
from octavo.models.base import CausalLM
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.rules import RuleBook
from octavo.sampling.sampler import NOT_FINITE, Draw, Sampler
from octavo.worker.draws import Wanted, draws_of, row_result
from octavo.worker.inputs import StepInputs
from octavo.worker.sizing import CacheSize
from octavo_kernels import Ops

LOGIT_ROWS = 256  # rows of logits held at once: with a vocabulary of 262,144 a quarter of a GiB


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
        self.inputs = StepInputs(
            activations, max_num_seqs, size.max_model_len, size.block_size, 1, size.num_blocks, device
        )
        shape = ops.kv_cache_shape(
            size.num_blocks + 1, size.block_size, model.shape.kv_heads, model.shape.head_dim
        )
        self.pages = [zeroed(shape, dtype, device) for _ in range(model.config.num_layers)]
        self.caches = [(0, page) for page in self.pages]
        self._sampler = Sampler(RuleBook(max_num_seqs))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One forward pass. A row whose logits are not finite gets an error of its own."""
        if plan.copies:
            self._copy(plan.copies)
        if not plan.rows:
            return StepResult(plan.step, [])
        hidden = self.model.forward(self.inputs.fill(plan.rows), self.caches)
        ends = np.cumsum([len(row.token_ids) + len(row.drafts) for row in plan.rows]).tolist()
        draws = [list(draws_of(row, end)) for row, end in zip(plan.rows, ends, strict=True)]
        drawn = iter(self._draw(hidden, [draw for each in draws for draw in each]))
        results = []
        for row, end, each in zip(plan.rows, ends, draws, strict=True):
            scores = None if row.prompt_logprobs is None else self._score_prompt(hidden, row, end)
            results.append(row_result(row, [next(drawn) for _ in each], scores))
        return StepResult(plan.step, results)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        pairs = torch.tensor(copies, dtype=torch.int64, device=self._device)
        for pages in self.pages:
            self._ops.copy_blocks(pages, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())

    def _draw(self, hidden: Tensor, wanted: Sequence[Wanted]) -> list[Draw]:
        draws: list[Draw] = []
        for first in range(0, len(wanted), LOGIT_ROWS):
            part = wanted[first : first + LOGIT_ROWS]
            tokens, specs, pasts = zip(*part, strict=True)
            draws += self._sampler.sample(self._logits(hidden, tokens), specs, pasts)
        return draws

    def _score_prompt(self, hidden: Tensor, row: Row, end: int) -> list[Draw]:
        """The log probabilities of the known tokens that follow each of a row's own."""
        assert row.history is not None and row.prompt_logprobs is not None
        begin = end - len(row.drafts) - len(row.token_ids)
        following = row.history[row.start + 1 : row.start + 1 + len(row.token_ids)]
        scores: list[Draw] = []
        for first in range(0, len(following), LOGIT_ROWS):
            part = following[first : first + LOGIT_ROWS]
            tokens = range(begin + first, begin + first + len(part))
            for token, logits in zip(part, self._logits(hidden, tokens).cpu().numpy(), strict=True):
                known = np.isfinite(logits.max())
                logprobs = token_logprobs(logits, token, row.prompt_logprobs) if known else None
                scores.append(Draw(token, logprobs, None if known else NOT_FINITE))
        return scores

    def _logits(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """Float32 logits [len(tokens), V] after these tokens of the batch; ``tokens`` may repeat some."""
        if len(tokens) == len(hidden) and list(tokens) == list(range(len(hidden))):
            return self.model.logits(hidden, None)
        return self.model.logits(hidden, torch.tensor(tokens, device=self._device))


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from calloc, so that pages take memory only once blocks in them are used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape))
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(shape)
