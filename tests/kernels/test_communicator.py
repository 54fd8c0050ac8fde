"""Ranks add up what each of them has. Most are threads here, with a communicator each on one memory."""

import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import pytest
import torch

from octavo_kernels.cpu import communicator, library

DTYPES = [torch.float32, torch.bfloat16]


class Group:
    def __init__(self, world, widest=0):
        memory = communicator.shared_memory(world, widest)
        self.memory = mmap.mmap(memory, 0)
        self.ranks = [communicator.SharedMemoryCommunicator(rank, world, memory) for rank in range(world)]
        os.close(memory)

    def run(self, call):
        """call(communicator) of each rank at once -> what they return."""
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            calls = [threads.submit(call, rank) for rank in self.ranks]
            if wait(calls, return_when=FIRST_EXCEPTION).not_done:
                self.ranks[0].abort()  # for those who wait for one that failed
            return [each.result() for each in calls]


@pytest.fixture
def group(cpu, monkeypatch):
    monkeypatch.setenv("OCTAVO_KERNELS_ISA", cpu.isa)
    yield Group
    library.open_library.cache_clear()


@pytest.fixture
def small_slots(monkeypatch):
    """Slots that hold few rows, so that calls take several stages."""
    monkeypatch.setattr(communicator, "_LEAST_SLOT", 64)


def sum_of(parts):
    """In float32, rank by rank, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def check_sum(group, rows, n, dtype, margin=0):
    torch.manual_seed(rows + n)
    parts = torch.randn(len(group.ranks), rows, n + margin).to(dtype)
    expected = parts.clone()
    expected[..., :n] = sum_of(parts)[..., :n]
    group.run(lambda ranks: ranks.all_reduce(parts[ranks.rank, :, :n]))
    assert torch.equal(parts, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sum_is_that_of_float32_in_the_order_of_the_ranks(group, world, dtype):
    ranks = group(world)
    for rows, n in [(1, 1), (1, 576), (5, 100), (32, 576), (0, 8), (300, 1003)]:
        check_sum(ranks, rows, n, dtype)
        check_sum(ranks, rows, n, dtype, margin=9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [1, 3, 40])
def test_a_sum_takes_as_many_stages_as_its_rows_need(group, small_slots, held, dtype):
    ranks = group(3, widest=held * 576 * dtype.itemsize)
    for rows in (1, 3, 4, 50, 121):
        check_sum(ranks, rows, 576, dtype, margin=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_one_sum_alone_and_among_others(group, small_slots, dtype):
    parts = torch.randn(3, 300, 577).to(dtype)
    together, alone = parts.clone(), parts[:, 123:124].clone()
    few, many = group(3, widest=7 * 577 * dtype.itemsize), group(3, widest=1 << 20)
    few.run(lambda ranks: ranks.all_reduce(together[ranks.rank]))
    many.run(lambda ranks: ranks.all_reduce(alone[ranks.rank]))
    assert torch.equal(together[:, 123:124], alone)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("columns", [1, 2, 4, 10, 1003])
def test_rank_0_gathers_columns_that_do_not_divide(group, small_slots, world, columns):
    widest = -(-columns // world)
    ranks = group(world, widest=2 * widest * 4)
    for rows in (1, 2, 37):
        whole = torch.randn(rows, columns)
        shares = [whole[:, rank * widest : (rank + 1) * widest] for rank in range(world)]
        out, *others = ranks.run(lambda ranks, shares=shares: ranks.gather(shares[ranks.rank], columns))
        assert torch.equal(out, whole)
        assert all(x is share for x, share in zip(others, shares[1:], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [2, 3])
def test_a_replay_sums_as_the_calls_do_for_any_rows(cpu, group, small_slots, world, dtype):
    most, hidden = 400, 64
    ranks = group(world, widest=30 * hidden * dtype.itemsize)
    torch.manual_seed(0)
    weights = [[cpu.pack(torch.randn(hidden, hidden).to(dtype), dtype) for _ in "ab"] for _ in ranks.ranks]
    norm, values = torch.randn(hidden).to(dtype), torch.randn(most, hidden).to(dtype)
    x, y, residual = torch.zeros(3, world, most, hidden, dtype=dtype)

    def layers(ranks, rows):
        mine = [t[ranks.rank, :rows] for t in (x, y, residual)]
        for weight in weights[ranks.rank]:
            cpu.add_rms_norm(mine[1], mine[2], norm, 1e-5, mine[0])
            cpu.matmul(mine[0], weight, mine[1])
            ranks.all_reduce(mine[1])

    replays = [cpu.record(lambda each=each: layers(each, 3)) for each in ranks.ranks]
    assert not y.any()  # recording runs nothing
    for rows in (1, 5, most):
        results = []
        for step in (layers, lambda ranks, rows: replays[ranks.rank](rows, 1)):
            x.zero_(), y.zero_(), residual.copy_(values)
            ranks.run(partial(step, rows=rows))
            results.append((y.clone(), residual.clone()))
        (y_called, residual_called), (y_replayed, residual_replayed) = results
        assert torch.equal(y_replayed, y_called) and torch.equal(residual_replayed, residual_called)
        assert y_called[:, :rows].any() and (y_called == y_called[0]).all()


def test_ranks_do_not_wait_for_one_that_is_gone(group):
    ranks = group(2)
    first, second = ranks.ranks
    with ThreadPoolExecutor() as threads:
        call = threads.submit(first.all_reduce, torch.zeros(1, 8))
        while not any(ranks.memory[:1000]):  # it has not arrived yet
            time.sleep(0.001)
        assert not call.done() and not first.broken
        second.abort()
        call.result()
    assert first.broken and second.broken
    first.all_reduce(torch.zeros(300, 8))
    first.gather(torch.zeros(1, 4), 8)


def test_what_cannot_be_summed_is_refused(group):
    alone = group(1).ranks[0]
    with pytest.raises(TypeError, match="float16"):
        alone.all_reduce(torch.zeros(1, 8, dtype=torch.float16))
    with pytest.raises(TypeError, match="bfloat16"):
        alone.gather(torch.zeros(1, 8, dtype=torch.bfloat16), 8)
    with pytest.raises(ValueError, match=r"2097152 bytes.* 1048576"):
        alone.all_reduce(torch.zeros(1, 1 << 19))
    with pytest.raises(ValueError, match=r"2097152 bytes.* 1048576"):
        alone.gather(torch.zeros(1, 1 << 19), 1 << 19)


def run_processes(world, meeting, memory=()):
    command = [sys.executable, Path(__file__).with_name("rank_process.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(meeting)],
            pass_fds=memory,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=300)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()


def test_processes_sum_and_gather_thousands_of_times(group, monkeypatch):
    # Stages of up to 8 parts, calls of up to 5 stages.
    monkeypatch.setattr(communicator, "_LEAST_SLOT", 1 << 17)
    memory = communicator.shared_memory(2, widest=0)
    try:
        run_processes(2, memory, [memory])
    finally:
        os.close(memory)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_sum_and_gather_through_gloo(world, tmp_path):
    run_processes(world, tmp_path / "meeting")
