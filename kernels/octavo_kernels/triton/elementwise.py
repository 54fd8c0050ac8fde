"""Norms, rotary embedding and gated activations: each reads its input once and writes its result once.

All are bound by memory. A tile is some rows times a whole row, as long as a power of two: reductions stay
inside one program, and neighbouring lanes read neighbours in pieces of 16 bytes. Arithmetic is float32.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(base, row, heads, stride_token, stride_head):
    """Where rows of x [T, H, D] start; a row is one head of one token."""
    token = (row // heads).to(tl.int64)
    return base + token * stride_token + (row % heads) * stride_head


@triton.jit
def _normed(x, weight, eps, DIM: tl.constexpr):
    """x [rows, tile] in float32, zero past DIM -> x / rms(x) * weight."""
    mean = tl.sum(x * x, axis=1) / DIM
    return x * tl.rsqrt(mean + eps)[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    weight,
    out,
    rows,
    heads,
    eps,
    x_token,
    x_head,
    out_token,
    out_head,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a tile of ROWS rows, so that short rows (norms of heads) still fill a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (dim < DIM)[None, :]
    values = tl.load(_rows(x, row, heads, x_token, x_head)[:, None] + dim[None, :], mask=mask, other=0.0)
    w = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    normed = _normed(values.to(tl.float32), w, eps, DIM)
    place = _rows(out, row, heads, out_token, out_head)[:, None] + dim[None, :]
    tl.store(place, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    rows,
    eps,
    x_token,
    residual_token,
    out_token,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The sum goes back to ``residual`` in its dtype, and what is normed is that rounded sum."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (dim < DIM)[None, :]
    added = tl.load(_rows(x, row, 1, x_token, 0)[:, None] + dim[None, :], mask=mask, other=0.0)
    stream = _rows(residual, row, 1, residual_token, 0)[:, None] + dim[None, :]
    before = tl.load(stream, mask=mask, other=0.0)
    total = (before.to(tl.float32) + added.to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(stream, total, mask=mask)
    w = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    normed = _normed(total.to(tl.float32), w, eps, DIM)
    place = _rows(out, row, 1, out_token, 0)[:, None] + dim[None, :]
    tl.store(place, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(
    heads_of_token, stride_head, first, count, cos, sin, HEADS: tl.constexpr, HALF, TILE: tl.constexpr
):
    """Rotate HEADS heads of one token from head ``first`` on, in place."""
    head, dim = first + tl.arange(0, HEADS), tl.arange(0, TILE)
    mask = (head < count)[:, None] & (dim < HALF)[None, :]
    low_place = heads_of_token + head[:, None] * stride_head + dim[None, :]
    low = tl.load(low_place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(low_place + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = heads_of_token.dtype.element_ty
    tl.store(low_place, (low * cos[None, :] - high * sin[None, :]).to(dtype), mask=mask)
    tl.store(low_place + HALF, (high * cos[None, :] + low * sin[None, :]).to(dtype), mask=mask)


@triton.jit
def rotary_kernel(
    q,
    k,
    cos,
    sin,
    positions,
    q_token,
    q_head,
    k_token,
    k_head,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (token, j) rotates the j-th HEADS heads of q and then of k: one launch for both."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    dim = tl.arange(0, TILE)
    angle = tl.load(positions + token) * HALF + dim
    c = tl.load(cos + angle, mask=dim < HALF, other=0.0)
    s = tl.load(sin + angle, mask=dim < HALF, other=0.0)
    q_groups = (Q_HEADS + HEADS - 1) // HEADS
    if group < q_groups:
        _rotate(q + token * q_token, q_head, group * HEADS, Q_HEADS, c, s, HEADS, HALF, TILE)
    else:
        _rotate(k + token * k_token, k_head, (group - q_groups) * HEADS, K_HEADS, c, s, HEADS, HALF, TILE)


@triton.jit
def gated_kernel(pair, out, pair_token, out_token, DIM: tl.constexpr, TILE: tl.constexpr, GELU: tl.constexpr):
    """act(gate) * up of pair [T, 2 DIM] (gate first) -> out [T, DIM].

    Both activations are x sigmoid(t): SiLU with t = x; GELU's tanh form with twice the tanh's argument, since
    (1 + tanh u) / 2 = sigmoid(2u).
    """
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = dim < DIM
    place = pair + token * pair_token + dim
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + DIM, mask=mask, other=0.0).to(tl.float32)
    steep = gate
    if GELU:
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    tl.store(
        out + token * out_token + dim, (gate * tl.sigmoid(steep) * up).to(out.dtype.element_ty), mask=mask
    )
