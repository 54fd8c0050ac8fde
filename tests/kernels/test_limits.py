"""What benchmarks measure a machine's limits with does the work that it claims."""

import numpy as np
import pytest
import torch

from octavo_kernels.cpu.library import open_library

FLOAT32, BFLOAT16 = 0, 1


@pytest.fixture
def library(cpu, monkeypatch):
    monkeypatch.setenv("OCTAVO_KERNELS_ISA", cpu.isa)
    yield open_library()
    open_library.cache_clear()


def test_a_read_passes_over_every_byte(library):
    memory = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    checksum = np.bitwise_xor.reduce(memory.numpy().view(np.uint64))
    assert library.long.read(memory.data_ptr(), memory.numel()) == checksum


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_multiplications_are_counted_by_step_and_thread(library, cpu, dtype):
    multiply = library.long.multiply
    cpu.set_num_threads(1)
    one = multiply(dtype, 10)
    assert one > 0 and multiply(dtype, 30) == 3 * one
    cpu.set_num_threads(2)
    assert multiply(dtype, 10) == 2 * one
