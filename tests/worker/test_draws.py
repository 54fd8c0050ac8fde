"""The head is computed for the tokens that are drawn from, and for no others."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.core.plan import Row, SampleSpec
from octavo.sampling.rules import RuleBook
from octavo.sampling.sampler import Sampler
from octavo.worker.device import Device
from octavo.worker.draws import LOGIT_ROWS, Drawer, draws_of
from octavo_kernels import load

VOCAB = 12


class Head:
    """Notes how many rows of logits are asked for; a hidden state [1] holds the token of its largest."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        states = hidden if rows is None else hidden[rows]
        self.rows.append(len(states))
        return torch.eye(VOCAB)[states[:, 0].long()]


def drawn(rows: list[Row], hidden: list[int]) -> tuple[list[int], list[int]]:
    """The tokens drawn in a step whose hidden states hold these, and the sizes of the head's products."""
    head = Head()
    drawer = Drawer(head, Sampler(load("reference"), RuleBook(4)), Device())
    wanted, end = [], 0
    for row in rows:
        end += len(row.token_ids) + len(row.drafts)
        wanted += draws_of(row, end)
    draws = drawer.draw(torch.tensor(hidden, dtype=torch.float32)[:, None], wanted)
    return [draw.token for draw in draws], head.rows


def greedy(position: int) -> SampleSpec:
    return SampleSpec(0.0, 0, 1.0, 0, 0, position)


def test_a_prompt_is_drawn_from_at_its_end_and_an_unfinished_one_not_at_all() -> None:
    prompt = Row("a", [1, 2, 3], 0, [[0]], [greedy(3)])
    unfinished = Row("b", [1, 2], 0, [[1]])
    decoding = Row("c", [5], 7, [[2]], [greedy(8)])
    assert drawn([prompt, unfinished, decoding], [1, 2, 3, 4, 5, 6]) == ([3, 6], [2])


def test_a_step_of_unfinished_prompts_computes_no_logits() -> None:
    assert drawn([Row("a", [1, 2], 0, [[0]])], [1, 2]) == ([], [])


def test_drafts_are_drawn_from_as_well() -> None:
    drafting = Row("a", [1], 4, [[0]], [greedy(5)], drafts=[2, 3])
    assert drawn([Row("b", [1, 2], 0, [[1]]), drafting], [1, 2, 3, 4, 5]) == ([3, 4, 5], [3])


def test_the_rows_of_logits_held_at_once_are_bounded() -> None:
    rows = [Row(str(i), [1], 4, [[i]], [greedy(5)]) for i in range(LOGIT_ROWS + 5)]
    tokens, sizes = drawn(rows, [i % VOCAB for i in range(len(rows))])
    assert tokens == [i % VOCAB for i in range(len(rows))]
    assert sizes == [LOGIT_ROWS, 5]
