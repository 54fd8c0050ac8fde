"""Each Triton kernel compiles for each GPU in question, spills nothing, and leaves room for others beside it.

No GPU is needed: the compilers and assemblers come with Triton. The first run compiles for a minute on two
cores; later ones take Triton's cache.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from attention_cases import Case
from gpu_compilation import compile_kernels

from octavo_kernels.ops import FP8

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32

DECODE, PREFILL = ((1, 4000),) * 2, ((64, 4000), (1, 9))
FLOAT8, INT8 = {"stored": FP8}, {"stored": torch.int8}
GEMMA = {"window": 1024, "softcap": 30.0}
ATTENTION = [
    Case(dtype, 2, 4, dim, 16, rows, **options)
    for dim in (64, 128, 256)
    for rows in (DECODE, PREFILL)
    for dtype, options in ((BRAIN, {}), (HALF, FLOAT8 | GEMMA), (BRAIN, INT8), (FULL, {}))
]

# Of one program: registers a lane, KiB of shared memory. A processor of NVIDIA's has 65536 registers and 164
# KiB (sm_80) or 228 KiB, so beside a decode program of 128 lanes there is room for a second; a mixed program
# of 256 lanes may have all registers. A quarter of AMD's has 512 registers for each lane of a wave: a decode
# program leaves room for a second; all of the processor has 64 KiB.
BOUNDS = {
    "sm_80": {"decode_kernel": (176, 80), "mixed_kernel": (255, 72)},
    "sm_90": {"decode_kernel": (176, 80), "mixed_kernel": (255, 200)},
    "sm_100": {"decode_kernel": (176, 80), "mixed_kernel": (255, 136)},
    "gfx942": {"decode_kernel": (224, 32), "mixed_kernel": (340, 40)},
}
# The others are bound by memory: many programs at once keep it busy.
SMALL = (64, 16)


@pytest.fixture(scope="module")
def usages():
    """What every kernel takes, by architecture; two at a time, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        found = pool.map(compile_kernels, ARCHITECTURES, [ATTENTION] * len(ARCHITECTURES))
        yield dict(zip(ARCHITECTURES, found, strict=True))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_keep_to_their_registers_and_shared_memory(usages, arch):
    for usage in usages[arch]:
        registers, kibibytes = BOUNDS[arch].get(usage.kernel, SMALL)
        assert usage.spilled == 0, usage
        assert usage.registers <= registers and usage.shared <= kibibytes << 10, usage


def test_every_kernel_of_the_backend_is_among_them(usages):
    from triton.runtime.jit import JITFunction

    from octavo_kernels.triton import attention, elementwise, kv_cache

    kernels = {
        name
        for module in (attention, elementwise, kv_cache)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    assert len(kernels) == 8
    for arch in ARCHITECTURES:
        assert {usage.kernel for usage in usages[arch]} == kernels
