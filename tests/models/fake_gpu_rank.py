"""A tensor parallel rank on a fake GPU that has half the memory of rank 0's."""

import sys

from fake_gpu import GIB, FakeGpu, GraphOps

import octavo_kernels
from octavo.worker import loading, rank


class SmallGpu(FakeGpu):
    def total(self):
        return 4 * GIB


gpu = SmallGpu(ops=GraphOps())
loading.find_gpu = lambda rank, world: gpu
octavo_kernels.load = lambda *place: gpu.ops

if __name__ == "__main__":
    sys.exit(rank.main())
