"""Compiling the Triton kernels for GPUs that this machine need not have, as the backend itself launches them.

The backend is called on CPU tensors for an architecture; each launch is compiled and not run. So what is
compiled has the very types, alignments, constants and tiles of a launch. What a kernel takes is read from its
binary: on NVIDIA by cuobjdump, which comes with Triton; on AMD from the assembly's metadata.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from attention_cases import Case
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from octavo_kernels import AttentionBatch
from octavo_kernels.ops import FP8
from octavo_kernels.triton.backend import TritonOps

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def target(arch: str) -> GPUTarget:
    """GPUTarget of "sm_90", "gfx942" ..."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", arch, 64)


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one program of a kernel takes: registers a lane, bytes spilled a lane, bytes of shared memory."""

    kernel: str
    registers: int
    spilled: int
    shared: int


class _NoDevice:
    """Stands in for Triton's driver: it says what to compile for, and can run nothing."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_device(self) -> str:
        return self.arch

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return target(self.arch)


def compile_kernels(arch: str, attention: Sequence[Case]) -> list[Usage]:
    """What each kernel takes for ``arch``, attention in each of the cases; for a process of its own, which
    can run no kernel afterwards.
    """
    found: list[Usage] = []

    def compile_launch(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            measure = _nvidia if arch.startswith("sm_") else _amd
            found.append(measure(kernel.__name__, compiled))

        return launch

    driver.set_active(_NoDevice(arch))
    JITFunction.__getitem__ = compile_launch
    ops = TritonOps(arch)
    for case in attention:
        _attend(ops, case)
    _write(ops)
    _elementwise(ops)
    return found


def _attend(ops: TritonOps, case: Case) -> None:
    """Of the sizes of an engine: what tensors hold does not matter, nor how many blocks there are."""
    tokens, sequences = sum(queries for queries, _ in case.rows), len(case.rows)
    longest = max(context for _, context in case.rows)
    q = torch.empty(tokens, case.kv_heads * case.group, case.dim, dtype=case.dtype)
    dtype = case.stored or case.dtype
    shape = ops.kv_cache_shape(4, case.block_size, case.kv_heads, case.dim, dtype)
    cache = torch.empty(shape, dtype=dtype)
    starts, lengths = torch.empty(sequences + 1, dtype=torch.int32), torch.empty(sequences, dtype=torch.int32)
    tables = torch.empty(sequences, -(-longest // case.block_size), dtype=torch.int32)
    batch = AttentionBatch(starts, lengths, tables, case.block_size, max(queries for queries, _ in case.rows))
    ops.paged_attention(q, cache, batch, **case.options)


def _write(ops: TritonOps) -> None:
    for dtype in (torch.bfloat16, torch.float16, FP8, torch.int8):
        k = torch.empty(3, 8, 128, dtype=torch.float16 if dtype == torch.float16 else torch.bfloat16)
        cache = torch.empty(ops.kv_cache_shape(4, 16, 8, 128, dtype), dtype=dtype)
        ops.write_kv(k, k, cache, torch.empty(3, dtype=torch.int64))


def _elementwise(ops: TritonOps) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = torch.empty(3, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
        ops.rms_norm(x, weight, 1e-5)
        ops.add_rms_norm(x, x, weight, 1e-5)
        q = torch.empty(3, 32, 128, dtype=dtype)
        ops.rms_norm(q, weight[:128], 1e-5, q)
        cos = torch.empty(9, 64)
        ops.rotary(q, q[:, :8], cos, cos, torch.empty(3, dtype=torch.int64))
        pair = ops.pack_gate_up(torch.zeros(14336, 16), torch.zeros(14336, 16), dtype)
        for activation in ("silu", "gelu_tanh"):
            ops.gate_up(x[:, :16], pair, activation)


def _nvidia(name: str, compiled: Any) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (
        int(re.search(rf"{key}:(\d+)", printed)[1]) for key in ("REG", "STACK", "LOCAL")
    )
    return Usage(name, registers, stack + local, compiled.metadata.shared)


def _amd(name: str, compiled: Any) -> Usage:
    def value(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", compiled.asm["amdgcn"])[1])

    # A register is 4 bytes in each lane; scalars spill to lanes of vector registers first.
    spilled = 4 * value("vgpr_spill_count") + value("private_segment_fixed_size")
    return Usage(name, value("vgpr_count"), spilled, compiled.metadata.shared)
