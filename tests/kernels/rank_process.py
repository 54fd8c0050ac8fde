"""One of several ranks, as a process of its own: python rank_process.py RANK WORLD MEETING.

MEETING: the descriptor of shared memory, or the path at which ranks meet through Gloo.
"""

import random
import sys
from pathlib import Path

import torch

from octavo_kernels import load
from octavo_kernels.communicator import TorchCommunicator
from octavo_kernels.cpu.communicator import SharedMemoryCommunicator


def sums(communicator, calls):
    """So many calls of changing shapes that a rank that reads too early or writes too soon is seen."""
    shapes, world = random.Random(1), communicator.world
    for i in range(calls):
        rows, n = shapes.choice([1, 2, 7, 33, 150]), shapes.choice([1, 8, 24, 576, 1000])
        dtype = shapes.choice([torch.float32, torch.bfloat16])
        x = torch.full((rows, n), i % 50 + 100 * communicator.rank, dtype=dtype)
        communicator.all_reduce(x)
        total = world * (i % 50) + 50 * world * (world - 1)
        assert (x == torch.tensor(total, dtype=dtype)).all(), (i, x)
        if i % 10 == 0:
            gathered(communicator, rows, n)


def gathered(communicator, rows, columns):
    torch.manual_seed(columns)
    logits, widest = torch.randn(rows, columns), -(-columns // communicator.world)
    mine = logits[:, communicator.rank * widest : (communicator.rank + 1) * widest]
    out = communicator.gather(mine, columns)
    assert torch.equal(out, mine if communicator.rank else logits)


def sums_alone(communicator):
    """A row's sum is the same alone and among others."""
    torch.manual_seed(communicator.rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (40, 300):  # few numbers, and many
            together = torch.randn(rows, 576).to(dtype)
            alone = together[[0, 7, rows - 1]].clone()
            communicator.all_reduce(together)
            for row, among in zip(alone, together[[0, 7, rows - 1]], strict=True):
                communicator.all_reduce(row[None])
                assert torch.equal(row, among)


def main(rank, world, meeting):
    torch.set_num_threads(1)
    if meeting.isdecimal():
        load("cpu").set_num_threads(3 if rank == 0 else 1)
        communicator, calls = SharedMemoryCommunicator(rank, world, int(meeting)), 3000
    else:
        communicator, calls = TorchCommunicator(rank, world, "gloo", Path(meeting)), 100
        sums_alone(communicator)
    sums(communicator, calls)
    assert not communicator.broken
    communicator.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
