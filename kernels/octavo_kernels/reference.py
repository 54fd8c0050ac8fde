"""The reference backend: every operation in plain torch, written to be read; the others agree with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels.ops import FP8, SCALE_BYTES, AttentionBatch, PackedWeight, as_bytes, quantise_int8
from octavo_kernels.quantised import QuantisedWeight, quantise_activations, stack

_ROWS_DRAWN = 16
"""Rows drawn from together: with a vocabulary of 262,144 a tensor of theirs in float64 takes 32 MiB."""
_ROWS_DRAWN_ON_GPU = 64
"""There so many keep it busy: each group of rows takes some thirty launches."""


class ReferenceOps:
    """Plain torch on any device. Norms, activations, softmax are float32 inside, rounded once at the end."""

    name = "reference"
    isa = "torch"
    replays_any_size = True
    dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16})

    def set_num_threads(self, n: int) -> None:
        torch.set_num_threads(n)

    def record(self, forward: Callable[[], None]) -> None:
        return None

    def pack(self, weight: Tensor | QuantisedWeight, dtype: torch.dtype) -> PackedWeight:
        n, k = weight.shape
        if isinstance(weight, QuantisedWeight):
            return PackedWeight((n, k), dtype, weight)
        return PackedWeight((n, k), dtype, weight.to(dtype).contiguous())

    def matmul(
        self,
        x: Tensor,
        w: PackedWeight,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        y = _linear(x, w, bias)
        return _deliver(y, out, out_dtype or x.dtype)

    def lookup(self, w: PackedWeight, rows: Tensor, out: Tensor) -> Tensor:
        if isinstance(w.data, QuantisedWeight):
            return out.copy_(w.data.rearranged(rows).dequantised())
        return torch.index_select(w.data, 0, rows, out=out)

    def pack_gate_up(
        self, gate: Tensor | QuantisedWeight, up: Tensor | QuantisedWeight, dtype: torch.dtype
    ) -> PackedWeight:
        if gate.shape != up.shape:
            raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape")
        i, k = gate.shape
        if isinstance(gate, QuantisedWeight) and isinstance(up, QuantisedWeight):
            return PackedWeight((i, k), dtype, stack([gate, up]), paired=True)
        if isinstance(gate, QuantisedWeight) or isinstance(up, QuantisedWeight):
            raise TypeError("gate and up are both quantised, or neither is")
        return PackedWeight((i, k), dtype, torch.cat([gate, up]).to(dtype).contiguous(), paired=True)

    def gate_up(
        self, x: Tensor, w: PackedWeight, activation: str = "silu", out: Tensor | None = None
    ) -> Tensor:
        gate, up = _linear(x, w).float().chunk(2, dim=-1)
        if activation == "silu":
            act = F.silu(gate)
        elif activation == "gelu_tanh":
            act = F.gelu(gate, approximate="tanh")
        else:
            raise ValueError(f"activation {activation!r} is not one of silu, gelu_tanh")
        return _deliver(act * up, out, x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps)
        return _deliver(h * weight.float(), out, x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps, out)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        for t in (q, k):
            low, high = t.float().chunk(2, dim=-1)
            t.copy_(torch.cat([low * c - high * s, high * c + low * s], dim=-1))

    def kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
    ) -> tuple[int, ...]:
        scale = SCALE_BYTES if dtype == torch.int8 else 0
        return (num_blocks, kv_heads, 2, block_size, head_dim + scale)

    def copy_blocks(self, cache: Tensor, src: Tensor, dst: Tensor) -> None:
        pages = as_bytes(cache)
        pages[dst] = pages[src]

    def write_kv(
        self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, kv_scale: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        block_size = cache.shape[3]
        kept = slots >= 0
        slots = slots[kept]
        block, offset = slots // block_size, slots % block_size
        for part, (x, scale) in enumerate(zip((k[kept], v[kept]), kv_scale, strict=True)):
            pages = as_bytes(cache)
            if cache.dtype == FP8:
                x = _as_fp8(x, scale).view(torch.uint8)
            elif cache.dtype == torch.int8:
                pages, page_scales = int8_pages(cache, x.shape[-1])
                x, own = quantise_int8(x)
                page_scales[block, :, part, offset] = own
            pages[block, :, part, offset] = x

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
        y = torch.empty_like(q) if out is None else out
        starts = batch.query_start.tolist()
        for row, seq_len in enumerate(batch.seq_lens.tolist()):
            queries = slice(starts[row], starts[row + 1])
            if seq_len == 0:
                y[queries] = 0
                continue
            blocks = batch.block_tables[row, : -(-seq_len // batch.block_size)].long()
            pages = as_bytes(cache)[blocks].view(cache.dtype)
            if cache.dtype == torch.int8:
                pages, scales = int8_pages(pages, q.shape[-1])
                pages = pages * scales[..., None]
            elif cache.dtype == FP8:
                pages = pages.float() * torch.tensor(kv_scale, device=q.device)[:, None, None]
            y[queries] = _attend(q[queries], pages.float(), seq_len, scale, window, softcap)
        return y

    def sample(self, logits: Tensor, draws: Tensor | None = None) -> Tensor:
        peaks, tokens = logits.max(dim=1)
        if draws is not None:
            random = draws[:, 0].nonzero()[:, 0]
            for rows in random.split(_ROWS_DRAWN if logits.is_cpu else _ROWS_DRAWN_ON_GPU):
                own = draws[rows]
                rows = _sent(rows, logits.device)
                tokens[rows] = _draw(logits[rows], peaks[rows, None], own)
        return torch.where(peaks.isfinite(), tokens, -1)


def _draw(logits: Tensor, peaks: Tensor, draws: Tensor) -> Tensor:
    """A random token for each row: logits [R, V], peaks [R, 1], draws [R, 5] on the CPU -> [R]."""
    vocabulary = logits.shape[1]
    cut = bool(((draws[:, 1] > 0) | (draws[:, 2] < 1)).any())
    temperature, top_k, top_p, min_p, number = _sent(draws, logits.device).split(1, dim=1)
    weights = ((logits - peaks) * temperature.reciprocal().float()).exp()
    weights = weights.masked_fill(weights < min_p.float(), 0).double()
    if cut:
        order = logits.sort(dim=1, descending=True, stable=True).indices
        kept = torch.where(top_k > 0, top_k, vocabulary)
        ranked = weights.gather(1, order)
        ranked.masked_fill_(torch.arange(vocabulary, device=logits.device) >= kept, 0)
        mass = ranked.cumsum(dim=1)
        enough = mass >= top_p * mass[:, -1:]
        ranked[:, 1:].masked_fill_(enough[:, :-1], 0)
        weights.scatter_(1, order, ranked)
    mass = weights.cumsum(dim=1)
    total = mass[:, -1:].contiguous()
    drawn = torch.searchsorted(mass, number * total, right=True)
    last = torch.searchsorted(mass, total)
    return torch.minimum(drawn, last)[:, 0]


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """x of the CPU, on ``device``: from page-locked memory, or the host would wait for the device's work."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def int8_pages(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of an int8 cache: integers [blocks, Hkv, 2, block_size, D], scales [blocks, Hkv, 2, block_size].

    In memory the integers of all tokens of a page come first, for reads that are aligned.
    """
    block_size = cache.shape[3]
    pages = cache.flatten(3)
    numbers, scales = pages.split((block_size * head_dim, block_size * SCALE_BYTES), dim=-1)
    return numbers.unflatten(-1, (block_size, head_dim)), scales.view(torch.float32)


def _attend(
    q: Tensor, pages: Tensor, seq_len: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention of one sequence: q [n, H, D] over its pages in order -> [n, H, D].

    pages are float32 [blocks, Hkv, 2, block_size, D].
    """
    n, heads, dim = q.shape
    kv_heads = pages.shape[1]
    context = pages.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :seq_len]
    keys, values = context.repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("nhd,hpd->hnp", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(seq_len, device=q.device)
    own = positions[seq_len - n :, None]
    seen = positions <= own
    if window is not None:
        seen &= positions > own - window
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnp,hpd->nhd", probabilities, values).to(q.dtype)


def _as_fp8(x: Tensor, scale: float) -> Tensor:
    x, largest = x.float() * (1.0 / scale), torch.finfo(FP8).max
    return torch.where(x.isfinite(), x.clamp(-largest, largest), torch.nan).to(FP8)


def _linear(x: Tensor, w: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """The product in x.dtype; with a quantised weight in float32."""
    if not isinstance(w.data, QuantisedWeight):
        return F.linear(x, w.data, bias)
    return F.linear(quantise_activations(x), w.data.dequantised(), None if bias is None else bias.float())


def _deliver(value: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if out is None else out.copy_(value)
