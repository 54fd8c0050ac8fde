"""The C++ kernels are tested on every instruction set that this machine has."""

import contextlib
import os

import pytest
import torch

from octavo_kernels import KernelsUnavailable, load
from octavo_kernels.cpu import library

THREADS = 2


def start(isa):
    """The C++ kernels on one instruction set, which is a choice of the whole process: the last one counts."""
    library.open_library.cache_clear()
    os.environ["OCTAVO_KERNELS_ISA"] = isa
    try:
        ops = load("cpu")
    finally:
        del os.environ["OCTAVO_KERNELS_ISA"]
        library.open_library.cache_clear()
    ops.set_num_threads(THREADS)
    return ops


@pytest.fixture(scope="module", params=library.INSTRUCTION_SETS)
def cpu(request):
    torch.set_num_threads(1)
    try:
        return start(request.param)
    except KernelsUnavailable as why:
        pytest.skip(str(why))


@pytest.fixture
def each_set(cpu):
    """The kernels on every instruction set in turn; the one under test is in use again at the end."""

    def kernels():
        for isa in library.INSTRUCTION_SETS:
            with contextlib.suppress(KernelsUnavailable):
                yield start(isa)

    yield kernels()
    start(cpu.isa)


@pytest.fixture(scope="module")
def reference():
    return load("reference")
