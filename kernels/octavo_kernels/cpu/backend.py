"""The operations of :class:`octavo_kernels.ops.Ops` on the C++ library, in float32 and bfloat16.

Called about nine times a layer and step, so each operation does little but collect pointers and strides. A
wrong shape or device would read memory that is not there; the one check made per call is of the dtypes.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.cpu.library import Arena, Quants, Weight, open_library, usable_cpus
from octavo_kernels.ops import FP8, SCALE_BYTES, AttentionBatch, PackedWeight, Replay, as_bytes
from octavo_kernels.quantised import QuantisedWeight

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Of activations (octavo::DType)."""
_QUANTISED = 2
_STORED = {torch.float32: 0, torch.bfloat16: 0, FP8: 1, torch.int8: 2}
"""How a cache holds its numbers (octavo::Stored)."""
_ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
_PAGE_TOKENS = 16
"""Tokens of a page come in groups of so many (kGroup)."""
_DIM_STEP = 32
"""Head dimensions in a page are padded to a multiple of this (kDimStep)."""
_BRIEF_ROWS = 32
"""Products of up to so many rows are short enough to keep Python's lock."""


@dataclass(slots=True)
class _Packed:
    struct: Weight
    address: int
    """Of the struct."""
    memory: mmap.mmap


class _Program:
    """Recorded operations. They hold addresses: whoever recorded them keeps the buffers."""

    def __init__(
        self, address: int, replay: Callable[[int, int, int], None], forget: Callable[[int], None]
    ) -> None:
        self._address, self._replay = address, replay
        weakref.finalize(self, forget, address)

    def __call__(self, tokens: int, sequences: int) -> None:
        self._replay(self._address, tokens, sequences)


class CpuOps:
    """C++ kernels: AMX, AVX-512 with bfloat16, or AVX2. They bring their own threads; keep torch's at one."""

    name = "cpu"
    dtypes = frozenset(DTYPES)
    replays_any_size = True

    def __init__(self) -> None:
        library = open_library()
        self.isa = library.isa
        self._arena = Arena()
        self._recording = False
        self._brief, self._long = library.brief, library.long
        self._matmul = library.brief.matmul
        self._rms_norm = library.brief.rms_norm
        self._add_rms_norm = library.brief.add_rms_norm
        self._rotary = library.brief.rotary
        self._write_kv = library.brief.write_kv
        self.set_num_threads(usable_cpus())

    def set_num_threads(self, n: int) -> None:
        self._brief.set_threads(n)

    def record(self, forward: Callable[[], None]) -> Replay:
        self._brief.start_recording()
        self._recording = True
        try:
            forward()
        finally:
            self._recording = False
            program = _Program(self._brief.end_recording(), self._long.replay, self._brief.forget)
        return program

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where a result goes that was given no place."""
        if self._recording:
            raise ValueError("an operation that is recorded needs a place for its result (out)")
        return torch.empty(shape, dtype=dtype)

    def pack(self, weight: Tensor | QuantisedWeight, dtype: torch.dtype) -> PackedWeight:
        if isinstance(weight, QuantisedWeight):
            return self._pack_quantised(weight, None, dtype)
        return self._pack(weight, None, dtype)

    def pack_gate_up(
        self, gate: Tensor | QuantisedWeight, up: Tensor | QuantisedWeight, dtype: torch.dtype
    ) -> PackedWeight:
        if gate.shape != up.shape:
            raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape")
        if isinstance(gate, QuantisedWeight) and isinstance(up, QuantisedWeight):
            return self._pack_quantised(gate, up, dtype)
        if isinstance(gate, QuantisedWeight) or isinstance(up, QuantisedWeight):
            raise TypeError("gate and up are both quantised, or neither is")
        return self._pack(gate, up, dtype)

    def _pack(self, first: Tensor, second: Tensor | None, dtype: torch.dtype) -> PackedWeight:
        if dtype not in DTYPES:
            raise ValueError(f"the C++ kernels hold weights as float32 or bfloat16, not {dtype}")
        n, k = first.shape
        sources = [t.to(dtype).contiguous() for t in (first, second) if t is not None]
        struct = Weight(None, n, k, DTYPES[dtype], int(second is not None))
        address = ctypes.addressof(struct)
        struct.data, memory = self._arena.take(self._brief.packed_bytes(address))
        self._long.pack(address, sources[0].data_ptr(), sources[-1].data_ptr())
        return PackedWeight((n, k), dtype, _Packed(struct, address, memory), second is not None)

    def _pack_quantised(
        self, first: QuantisedWeight, second: QuantisedWeight | None, dtype: torch.dtype
    ) -> PackedWeight:
        if dtype is not torch.bfloat16:
            raise ValueError(f"the C++ kernels multiply quantised weights with bfloat16, not {dtype}")
        if second is not None and second.layout != first.layout:
            raise ValueError(f"gate and up differ in layout: {first.layout} and {second.layout}")
        n, k = first.shape
        struct = Weight(None, n, k, _QUANTISED, int(second is not None), *first.layout)
        address = ctypes.addressof(struct)
        struct.data, memory = self._arena.take(self._brief.packed_bytes(address))
        parts = [_quants(first), _quants(second or first)]
        self._long.pack_quantised(address, *(ctypes.addressof(quants) for quants, _ in parts))
        return PackedWeight((n, k), dtype, _Packed(struct, address, memory), second is not None)

    def matmul(
        self,
        x: Tensor,
        w: PackedWeight,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if x.dtype is not w.dtype:
            raise TypeError(f"x is {x.dtype}, the weight {w.dtype}")
        m = x.shape[0]
        if out is None:
            out = self._new((m, w.shape[0]), out_dtype or x.dtype)
        product = self._matmul if m <= _BRIEF_ROWS else self._long.matmul
        product(
            x.data_ptr(),
            x.stride(0),
            m,
            w.data.address,
            None if bias is None else bias.data_ptr(),
            0,
            out.data_ptr(),
            out.stride(0),
            DTYPES[out.dtype],
        )
        return out

    def lookup(self, w: PackedWeight, rows: Tensor, out: Tensor) -> Tensor:
        if out.dtype is not w.dtype:
            raise TypeError(f"out is {out.dtype}, the weight {w.dtype}")
        count = rows.shape[0]
        functions = self._brief if count <= _BRIEF_ROWS else self._long
        functions.lookup(w.data.address, rows.data_ptr(), count, out.data_ptr(), out.stride(0))
        return out

    def gate_up(
        self, x: Tensor, w: PackedWeight, activation: str = "silu", out: Tensor | None = None
    ) -> Tensor:
        if x.dtype is not w.dtype:
            raise TypeError(f"x is {x.dtype}, the weight {w.dtype}")
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
        m = x.shape[0]
        if out is None:
            out = self._new((m, w.shape[0]), x.dtype)
        product = self._matmul if m <= _BRIEF_ROWS else self._long.matmul
        product(
            x.data_ptr(),
            x.stride(0),
            m,
            w.data.address,
            None,
            _ACTIVATIONS[activation],
            out.data_ptr(),
            out.stride(0),
            DTYPES[x.dtype],
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        dtype = x.dtype
        if weight.dtype is not dtype:
            raise TypeError(f"x is {dtype}, the norm's weight {weight.dtype}")
        if out is None:
            out = self._new(x.shape, dtype)
        if x.dim() == 3:
            tokens, heads, dim = x.shape
            x_head, out_head = x.stride(1), out.stride(1)
        else:
            tokens, dim = x.shape
            heads, x_head, out_head = 1, 0, 0
        self._rms_norm(
            x.data_ptr(),
            x.stride(0),
            x_head,
            weight.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            out_head,
            tokens,
            heads,
            dim,
            eps,
            DTYPES[dtype],
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        dtype = x.dtype
        if weight.dtype is not dtype or residual.dtype is not dtype:
            raise TypeError(f"x is {dtype}, the residual {residual.dtype}, the norm's weight {weight.dtype}")
        tokens, dim = x.shape
        if out is None:
            out = self._new((tokens, dim), dtype)
        self._add_rms_norm(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            tokens,
            dim,
            eps,
            DTYPES[dtype],
        )
        return out

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        tokens, heads, dim = q.shape
        self._rotary(
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            heads,
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            k.shape[1],
            dim,
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            tokens,
            DTYPES[q.dtype],
        )

    def kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
    ) -> tuple[int, ...]:
        """[num_blocks, kv_heads, block_size, elements per token]: a head's page fills the last two.

        Block sizes that are no multiple of 16 work, but take the room of one that is, and a slow path.
        """
        token = -(-head_dim // _DIM_STEP) * _DIM_STEP + (SCALE_BYTES if dtype == torch.int8 else 0)
        page = -(-block_size // _PAGE_TOKENS) * _PAGE_TOKENS * 2 * token
        return (num_blocks, kv_heads, block_size, -(-page // block_size))

    def copy_blocks(self, cache: Tensor, src: Tensor, dst: Tensor) -> None:
        pages = as_bytes(cache)
        pages[dst] = pages[src]

    def write_kv(
        self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, kv_scale: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        _check_cache(k, cache)
        tokens, kv_heads, dim = k.shape
        _, _, block_size, token_elements = cache.shape
        self._write_kv(
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            kv_heads,
            tokens,
            dim,
            cache.data_ptr(),
            block_size,
            token_elements,
            slots.data_ptr(),
            1.0 / kv_scale[0],
            1.0 / kv_scale[1],
            DTYPES[k.dtype],
            _STORED[cache.dtype],
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
        _check_cache(q, cache)
        _, heads, dim = q.shape
        value_scale = 1.0
        if cache.dtype == FP8:
            scale, value_scale = scale * kv_scale[0], kv_scale[1]
        if out is None:
            out = self._new(q.shape, q.dtype)
        tables = batch.block_tables
        _, kv_heads, block_size, token_elements = cache.shape
        (self._brief if batch.max_query_len <= _BRIEF_ROWS else self._long).attention(
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            cache.data_ptr(),
            block_size,
            token_elements,
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            tables.shape[0],
            heads,
            kv_heads,
            dim,
            scale,
            value_scale,
            window or 0,
            softcap or 0.0,
            DTYPES[q.dtype],
            _STORED[cache.dtype],
        )
        return out

    def sample(self, logits: Tensor, draws: Tensor | None = None) -> Tensor:
        if logits.dtype is not torch.float32 or (draws is not None and draws.dtype is not torch.float64):
            raise TypeError(f"logits are {logits.dtype}, draws {draws.dtype if draws is not None else None}")
        rows, vocabulary = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        (self._brief if rows <= _BRIEF_ROWS else self._long).sample(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            vocabulary,
            None if draws is None else draws.data_ptr(),
            tokens.data_ptr(),
        )
        return tokens


def _check_cache(x: Tensor, cache: Tensor) -> None:
    if cache.dtype is not x.dtype and cache.dtype not in (FP8, torch.int8):
        raise TypeError(f"the cache is {cache.dtype}, queries, keys and values are {x.dtype}")


def _quants(weight: QuantisedWeight) -> tuple[Quants, list[Tensor]]:
    """The C++ view of a weight, and the tensors that it points into."""
    tensors = [weight.values.contiguous(), weight.scales.contiguous()]
    if weight.minima is not None:
        tensors.append(weight.minima.contiguous())
    return Quants(*(t.data_ptr() for t in tensors)), tensors
