"""The operations of :class:`octavo_kernels.ops.Ops` on a GPU: Triton kernels, and torch's matrix products.

Nothing here waits for the GPU or looks at what tensors hold: grids depend on shapes alone. So a step can be
captured once as a graph, over buffers that stay where they are, and launched again for other contents.
"""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton import knobs

from octavo_kernels.ops import FP8, AttentionBatch, KernelsUnavailable, PackedWeight, Replay
from octavo_kernels.quantised import QuantisedWeight
from octavo_kernels.reference import ReferenceOps
from octavo_kernels.triton import elementwise, kv_cache
from octavo_kernels.triton.launch import INTERPRETER, Shape, decode, launch, mixed, pieces, warps
from octavo_kernels.triton.tables import is_tuned

log = logging.getLogger(__name__)

OLDEST_CAPABILITY = (8, 0)
"""Of NVIDIA's GPUs, the first that Triton compiles for."""
_ACTIVATIONS = ("silu", "gelu_tanh")
_TILE = 2048
"""Elements of a program of the elementwise kernels, about: 16 for each lane of 4 warps."""


class TritonOps(ReferenceOps):
    """Triton kernels for one GPU architecture; with TRITON_INTERPRET=1 the same kernels on CPU tensors.

    Weights and pages lie as the reference has them; plain weights only.

    ``arch`` is "sm_90", "gfx942" ...: by default the current device's. Raises KernelsUnavailable
    without one, or without what Triton needs beside it.
    """

    name = "triton"
    dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16})
    replays_any_size = False

    def __init__(self, arch: str | None = None) -> None:
        self.isa = arch or _architecture()
        if not is_tuned(self.isa) and self.isa != INTERPRETER:
            log.warning("no table of tiles for %s: its kernels use those for any GPU", self.isa)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, forward: Callable[[], None]) -> Replay:
        """A CUDA graph. Graphs that live at once share their memory: they never run at once, and their
        results lie in the buffers of ``forward``. In the interpreter a replay calls ``forward`` again.
        """
        forward()
        if self.isa == INTERPRETER:
            return lambda tokens, sequences: forward()
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self._graphs), None)
        with torch.cuda.graph(graph, pool):
            forward()
        self._graphs.add(graph)
        return lambda tokens, sequences: graph.replay()

    def pack(self, weight: Tensor | QuantisedWeight, dtype: torch.dtype) -> PackedWeight:
        _refuse_quantised(weight)
        return super().pack(weight, dtype)

    def pack_gate_up(
        self, gate: Tensor | QuantisedWeight, up: Tensor | QuantisedWeight, dtype: torch.dtype
    ) -> PackedWeight:
        _refuse_quantised(gate, up)
        return super().pack_gate_up(gate, up, dtype)

    def matmul(
        self,
        x: Tensor,
        w: PackedWeight,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if out_dtype not in (None, x.dtype):
            y = _wide_product(x, w.data, out_dtype)
            y = y if bias is None else y.add_(bias)
            return y if out is None else out.copy_(y)
        if out is None:
            return F.linear(x, w.data, bias)
        if bias is None:
            return torch.mm(x, w.data.t(), out=out)
        return torch.addmm(bias, x, w.data.t(), out=out)

    def gate_up(
        self, x: Tensor, w: PackedWeight, activation: str = "silu", out: Tensor | None = None
    ) -> Tensor:
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
        pair = F.linear(x, w.data)
        tokens, dim = pair.shape[0], w.shape[0]
        out = torch.empty(tokens, dim, dtype=x.dtype, device=x.device) if out is None else out
        tile = min(_TILE, triton.next_power_of_2(dim))
        launch(
            elementwise.gated_kernel,
            (tokens, triton.cdiv(dim, tile)),
            pair,
            out,
            pair.stride(0),
            out.stride(0),
            DIM=dim,
            TILE=tile,
            GELU=activation == "gelu_tanh",
            num_warps=warps(tile),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        tokens, dim = x.shape[0], x.shape[-1]
        heads, x_head, out_head = (x.shape[1], x.stride(1), out.stride(1)) if x.dim() == 3 else (1, 0, 0)
        rows, tile = _row_tile(dim)
        launch(
            elementwise.rms_norm_kernel,
            (triton.cdiv(tokens * heads, rows),),
            x,
            weight,
            out,
            tokens * heads,
            heads,
            eps,
            x.stride(0),
            x_head,
            out.stride(0),
            out_head,
            DIM=dim,
            ROWS=rows,
            TILE=tile,
            num_warps=warps(rows * tile),
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        tokens, dim = x.shape
        rows, tile = _row_tile(dim)
        launch(
            elementwise.add_rms_norm_kernel,
            (triton.cdiv(tokens, rows),),
            x,
            residual,
            weight,
            out,
            tokens,
            eps,
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            DIM=dim,
            ROWS=rows,
            TILE=tile,
            num_warps=warps(rows * tile),
        )
        return out

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        tokens, q_heads, dim = q.shape
        heads, tile = _head_tile(max(q_heads, k.shape[1]), dim // 2)
        groups = triton.cdiv(q_heads, heads) + triton.cdiv(k.shape[1], heads)
        launch(
            elementwise.rotary_kernel,
            (tokens, groups),
            q,
            k,
            cos,
            sin,
            positions,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            Q_HEADS=q_heads,
            K_HEADS=k.shape[1],
            HALF=dim // 2,
            HEADS=heads,
            TILE=tile,
            num_warps=warps(heads * tile),
        )

    def write_kv(
        self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, kv_scale: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        tokens, kv_heads, dim = k.shape
        heads, tile = _head_tile(kv_heads, dim)
        numbers, scales, strides = pieces(cache, dim)
        launch(
            kv_cache.write_kv_kernel,
            (tokens, triton.cdiv(kv_heads, heads)),
            k,
            v,
            numbers,
            scales,
            slots,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            *strides,
            1.0 / kv_scale[0],
            1.0 / kv_scale[1],
            KV_HEADS=kv_heads,
            DIM=dim,
            BLOCK_SIZE=cache.shape[3],
            HEADS=heads,
            TILE=tile,
            FP8=cache.dtype == FP8,
            INT8=cache.dtype == torch.int8,
            enable_fp_fusion=False,  # what int8 rounds is the product, on every backend
            num_warps=warps(heads * tile),
        )

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        out: Tensor | None = None,
        kv_scale: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor:
        out = torch.empty_like(q) if out is None else out
        shape = Shape(self.isa, q, cache, batch.block_size, window or 0, softcap or 0.0)
        scales = (scale * kv_scale[0], kv_scale[1]) if cache.dtype == FP8 else (scale, 1.0)
        alone = batch.max_query_len == 1 and q.shape[0] == batch.seq_lens.shape[0]
        (decode if alone else mixed)(shape, q, cache, batch, scales, out)
        return out


def _refuse_quantised(*weights: Tensor | QuantisedWeight) -> None:
    if any(isinstance(weight, QuantisedWeight) for weight in weights):
        raise TypeError("the triton kernels take no quantised weights: dequantise them first")


def _architecture() -> str:
    """The current device's, in its maker's words. Raises KernelsUnavailable where it cannot be used."""
    if knobs.runtime.interpret:
        return INTERPRETER
    if not torch.cuda.is_available():
        raise KernelsUnavailable(
            "the triton kernels need a GPU, and torch finds no usable CUDA or ROCm device here: "
            "give the process one, or choose --device cpu"
        )
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise KernelsUnavailable(
            "the triton kernels need a C compiler on this machine, for Triton to build what launches them: "
            "install gcc, or name a compiler in CC"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise KernelsUnavailable(
            "the triton kernels need Python's headers on this machine, for Triton to build what launches "
            "them: install them (on Debian python3-dev)"
        )
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties().gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < OLDEST_CAPABILITY:
        needed = ".".join(map(str, OLDEST_CAPABILITY))
        raise KernelsUnavailable(
            f"the triton kernels need compute capability {needed} or newer, and "
            f"{torch.cuda.get_device_name()} has {major}.{minor}"
        )
    return f"sm_{major}{minor}"


def _wide_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x times weight transposed, in a wider dtype: on a GPU as the product itself summed it, unrounded."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x.to(dtype), weight.to(dtype))


def _row_tile(dim: int) -> tuple[int, int]:
    """(rows, elements of a row) of a tile that holds whole rows: several, where they are short."""
    tile = triton.next_power_of_2(dim)
    return max(1, _TILE // tile), tile


def _head_tile(heads: int, dim: int) -> tuple[int, int]:
    """(heads, elements of a head) of a tile for one token."""
    tile = triton.next_power_of_2(dim)
    return max(1, min(_TILE // tile, triton.next_power_of_2(heads))), tile
