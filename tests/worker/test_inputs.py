"""Rows of a plan become a flat batch: positions, slots, tables; and the largest step has the size it says."""

import pytest
import torch
from fake_gpu import FakeGpu

from octavo.core.plan import NO_BLOCK, Row
from octavo.layers.batch import ActivationBuffers, ActivationShape
from octavo.worker.device import Device
from octavo.worker.gpu import largest_step
from octavo.worker.inputs import StepInputs

CPU = torch.device("cpu")


ZERO_PAGE = 99


def inputs(groups: int = 1, device: Device | None = None) -> StepInputs:
    shape = ActivationShape(hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=8)
    activations = ActivationBuffers(shape, 32, torch.float32, CPU)
    return StepInputs(activations, 4, 64, 4, groups, ZERO_PAGE, device or Device())


def row(start: int, tokens: list[int], blocks: list[int]) -> Row:
    return Row("r", tokens, start, [blocks])


def test_a_mixed_step_is_laid_out_flat() -> None:
    (batch,) = inputs().fill([row(5, [7], [9, 2]), row(3, [1, 2, 3], [4, 6]), row(0, [8, 8], [5])])
    assert batch.token_ids.tolist() == [7, 1, 2, 3, 8, 8]
    assert batch.positions.tolist() == [5, 3, 4, 5, 0, 1]
    assert batch.slots.tolist() == [2 * 4 + 1, 4 * 4 + 3, 6 * 4, 6 * 4 + 1, 5 * 4, 5 * 4 + 1]
    assert batch.attention.query_start.tolist() == [0, 1, 4, 6]
    assert batch.attention.seq_lens.tolist() == [6, 6, 2]
    assert batch.attention.max_query_len == 3
    assert batch.attention.block_tables[1, :2].tolist() == [4, 6]
    assert len(batch.activations.x) == 6


def test_tables_follow_when_a_row_gets_other_blocks() -> None:
    step = inputs()
    blocks = [1, 2]
    step.fill([row(4, [1], blocks), row(0, [1], [3])])
    blocks[1] = 7  # the caller's list may change after the step
    (batch,) = step.fill([row(5, [1], blocks), row(1, [1], [3])])
    assert batch.attention.block_tables[0, :2].tolist() == [1, 7]
    (batch,) = step.fill([row(1, [1], [3])])
    assert batch.attention.block_tables[0, 0].item() == 3
    assert batch.slots.tolist() == [3 * 4 + 1]


def test_each_group_of_layers_has_tables_and_slots_of_its_own() -> None:
    rows = [Row("r", [7], 9, [[1, 2, 3], [NO_BLOCK, 5, 6]]), Row("s", [8], 4, [[4, 7], [8, 9]])]
    full, sliding = inputs(groups=2).fill(rows)
    assert full.slots.tolist() == [3 * 4 + 1, 7 * 4]
    assert sliding.slots.tolist() == [6 * 4 + 1, 9 * 4]
    assert full.attention.block_tables[0, :3].tolist() == [1, 2, 3]
    assert sliding.attention.block_tables[0, :3].tolist() == [ZERO_PAGE, 5, 6]
    assert full.token_ids is sliding.token_ids and full.activations is sliding.activations


def test_drafts_follow_the_tokens_of_their_row() -> None:
    drafting = Row("r", [7], 5, [[9, 2]], drafts=[3, 4])
    (batch,) = inputs().fill([drafting, row(0, [8], [5])])
    assert batch.token_ids.tolist() == [7, 3, 4, 8]
    assert batch.positions.tolist() == [5, 6, 7, 0]
    assert batch.attention.seq_lens.tolist() == [8, 1]
    assert batch.attention.max_query_len == 3


def test_a_decode_step_reuses_its_views() -> None:
    step = inputs()
    (first,) = step.fill([row(0, [1], [0])])
    (second,) = step.fill([row(1, [2], [0])])
    assert first.token_ids is second.token_ids
    assert first.activations is second.activations


def test_rows_of_padding_see_nothing_and_write_nowhere() -> None:
    step = inputs(groups=2)
    step.fill([Row(str(i), [9], 5, [[i, 3], [i, 7]]) for i in range(4)])  # leaves its numbers behind
    full, sliding = step.fill([Row("r", [7], 2, [[1], [2]])], padded=3)
    assert full.token_ids.tolist() == [7, 0, 0] and full.positions.tolist() == [2, 0, 0]
    assert full.slots.tolist() == [1 * 4 + 2, -1, -1] and sliding.slots.tolist() == [2 * 4 + 2, -1, -1]
    assert full.attention.seq_lens.tolist() == [3, 0, 0]
    assert full.attention.query_start.tolist() == [0, 1, 2, 3]
    assert full.attention.max_query_len == 1 and len(full.attention.block_tables) == 3


@pytest.mark.parametrize(("joined_bytes", "copies"), [(0, [16, 16]), (64, [48])])
def test_a_gpu_gets_copies_of_what_changed_after_those_of_the_step_before_are_done(
    joined_bytes: int, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.worker.inputs.JOINED_BYTES", joined_bytes)
    gpu = FakeGpu()
    step = inputs(device=gpu)
    tables = [[1], [2], [3], [4]]
    for start in range(3):
        rows = [row(start, [start], table) for table in tables]
        earlier = gpu.started
        (batch,) = step.fill(rows)
        assert all(number >= earlier for number, _ in gpu.under_way)  # older ones were waited for
        assert batch.token_ids.tolist() == [start] * 4
    assert gpu.started - earlier == 5  # no table
    tables[1], tables[3] = [5], [6]
    (batch,) = step.fill([row(3, [7], table) for table in tables])
    assert batch.attention.block_tables[:, 0].tolist() == [1, 5, 3, 6]
    copied = [copy.source.numel() for _, copy in gpu.under_way]
    assert copied == [4, 4, 5, 4, 4, *copies]  # tables of 16 entries, with the one between or without


def test_the_largest_step_fills_rows_and_tokens() -> None:
    plan = largest_step(rows=8, max_tokens=100, max_length=500, block_size=16, num_groups=2)
    assert (len(plan.rows), plan.num_tokens) == (8, 96)
    assert all(r.samples and len(r.block_tables) == 2 for r in plan.rows)
    assert largest_step(rows=8, max_tokens=100, max_length=5, block_size=16, num_groups=1).num_tokens == 32
