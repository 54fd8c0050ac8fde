"""Attention over paged keys and values: decode split over the context, and mixed batches in one launch.

The query heads that share a KV head are rows of one tile, so each key and value is read once for all of them
and both products (scores, and probabilities times values) are matrix products. A tile of the context is
TOKENS positions in order; each position's block comes from the sequence's table, so any block size fits any
tile. Only what some row sees is loaded: loops begin at a window's first position and end at a row's own.

Softmax runs in base 2 over tiles, with each row's maximum (``peak``) and sum (``total``) so far, as in
FlashAttention (Dao et al., 2022); splits of a context are joined as in Flash-Decoding (2023). No atomics: a
result is the same in every run. Compute is float32 but for the operands of products, which are of DOT.
"""

import triton
import triton.language as tl

from octavo_kernels.triton.kv_cache import from_e4m3

# Below every score, but finite: LOWEST - LOWEST is 0 where -inf - -inf is not a number.
LOWEST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _operand(x, dtype: tl.constexpr, FP8: tl.constexpr, FP8_HARDWARE: tl.constexpr):
    """What the cache holds, as an operand of a product."""
    if FP8:
        return from_e4m3(x, FP8_HARDWARE).to(dtype)
    return x.to(dtype)


@triton.jit
def _scores(q, k, scale, key_scales, SOFTCAP: tl.constexpr, INT8: tl.constexpr):
    """q [rows, D], k [tokens, D] -> scores [rows, tokens] times log2(e), so that exp2 serves as exp."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if INT8:
        scores = scores * key_scales[None, :]
    if SOFTCAP > 0:
        # tanh(u) = 1 - 2 / (exp(2u) + 1), which at both ends is right even where exp is 0 or infinite.
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / SOFTCAP)) + 1.0))
    return scores * LOG2_E


@triton.jit
def _attend(
    state,
    q,
    position,
    cache,
    scales,
    table,
    begin,
    end,
    scale,
    block_stride,
    value_stride,
    token_stride,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
    FP8_HARDWARE: tl.constexpr,
    INT8: tl.constexpr,
    CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Take in positions [begin, end) of the context: state (result, total, peak) of the rows -> state.

    ``cache`` points to the head's keys in block 0, ``scales`` to theirs in int8, ``position`` [rows] are the
    rows' own. WHOLE: the span is whole tiles. Without CAUSAL every row sees all of it.
    """
    result, total, peak = state
    token, dim = tl.arange(0, TOKENS), tl.arange(0, TILE)
    for start in range(begin, end, TOKENS):
        at = start + token
        inside = at < end
        if WHOLE:
            block = tl.load(table + at // BLOCK_SIZE)
        else:
            block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0)
        row = cache + block.to(tl.int64) * block_stride + (at % BLOCK_SIZE) * token_stride
        place = row[:, None] + dim[None, :]
        if WHOLE and DIM == TILE:
            k = tl.load(place)
            v = tl.load(place + value_stride)
        else:
            mask = inside[:, None] & (dim < DIM)[None, :]
            k = tl.load(place, mask=mask, other=0)
            v = tl.load(place + value_stride, mask=mask, other=0)
        key_scales, value_scales = 1.0, 1.0
        if INT8:
            at_scales = scales + block.to(tl.int64) * (block_stride // 4) + at % BLOCK_SIZE
            key_scales = tl.load(at_scales, mask=inside, other=0.0)
            value_scales = tl.load(at_scales + value_stride // 4, mask=inside, other=0.0)
        scores = _scores(q, _operand(k, q.dtype, FP8, FP8_HARDWARE), scale, key_scales, SOFTCAP, INT8)
        if CAUSAL:
            seen = inside[None, :] & (at[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        elif not WHOLE:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = _operand(v, q.dtype, FP8, FP8_HARDWARE)
        if INT8:
            weights = weights * value_scales[None, :]
        result = tl.dot(weights.to(q.dtype), v, result * shrink[:, None], input_precision="ieee")
        peak = higher
    return result, total, peak


@triton.jit
def _nothing_seen(ROWS: tl.constexpr, TILE: tl.constexpr):
    result = tl.zeros([ROWS, TILE], tl.float32)
    return result, tl.zeros([ROWS], tl.float32), tl.full([ROWS], LOWEST, tl.float32)


@triton.jit
def _split_size(span, SPLITS: tl.constexpr, SHORTEST: tl.constexpr, TOKENS: tl.constexpr):
    """Tokens of one split: a function of the sequence alone, so a result does not depend on the batch."""
    tiles = tl.cdiv(tl.cdiv(span, SPLITS), TOKENS)
    return tl.maximum(tiles * TOKENS, SHORTEST)


@triton.jit
def decode_kernel(
    q,
    cache,
    scales,
    out,
    partial,
    stats,
    tables,
    seq_lens,
    scale,
    value_scale,
    q_token,
    q_head,
    out_token,
    out_head,
    table_stride,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    parts,
    DOT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
    FP8_HARDWARE: tl.constexpr,
    INT8: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Program (sequence, KV head, split): one query of GROUP heads over one part of its context.

    Splits come last in the grid: those that are empty, past the ends of short sequences, start after all the
    work is under way. In int8 ``scales`` points to a cache's first; its strides are a quarter of the cache's,
    but for a token's, which is 1. DIRECT: contexts have one split at most, and the result goes to ``out``;
    else, before its division by total, to ``partial`` [B, H, parts, DIM], and (peak, total) to ``stats``
    [B, H, parts, 2].
    """
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + sequence)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    size = _split_size(length - first, SPLITS, SHORTEST, TOKENS)
    begin = first + split * size
    if (split > 0) & (begin >= length):
        return
    end = tl.minimum(begin + size, length)
    row, dim = tl.arange(0, ROWS), tl.arange(0, TILE)
    head = kv_head * GROUP + row
    mask = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    query = tl.load(q + sequence * q_token + head[:, None] * q_head + dim[None, :], mask=mask, other=0.0).to(
        DOT
    )
    result, total, peak = _attend(
        _nothing_seen(ROWS, TILE),
        query,
        row,  # every position of the span is seen, whatever the row's own
        cache + kv_head * head_stride,
        scales + kv_head * (head_stride // 4),
        tables + sequence * table_stride,
        begin,
        end,
        scale,
        block_stride,
        value_stride,
        token_stride,
        DIM,
        TILE,
        TOKENS,
        BLOCK_SIZE,
        WINDOW,
        SOFTCAP,
        FP8,
        FP8_HARDWARE,
        INT8,
        CAUSAL=False,
        WHOLE=False,
    )
    if DIRECT:
        total = tl.where(total > 0, total, 1.0)  # a row of padding, without a context, gets zeros
        place = out + sequence * out_token + head[:, None] * out_head + dim[None, :]
        tl.store(place, (result / total[:, None] * value_scale).to(out.dtype.element_ty), mask=mask)
    else:
        part = (sequence * tl.num_programs(1) * GROUP + head) * parts + split
        tl.store(partial + part[:, None] * DIM + dim[None, :], result, mask=mask)
        tl.store(stats + part * 2, peak, mask=row < GROUP)
        tl.store(stats + part * 2 + 1, total, mask=row < GROUP)


@triton.jit
def combine_kernel(
    partial,
    stats,
    out,
    seq_lens,
    value_scale,
    out_token,
    out_head,
    parts,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (sequence, head): the sum of its splits, each scaled to the highest peak, over their total."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(seq_lens + sequence)
    span = tl.minimum(length, WINDOW) if WINDOW > 0 else length
    count = tl.maximum(tl.cdiv(span, _split_size(span, SPLITS, SHORTEST, TOKENS)), 1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, TILE)
    used = split < count
    part = (sequence * tl.num_programs(1) + head) * parts + split
    peak = tl.load(stats + part * 2, mask=used, other=LOWEST)
    weight = tl.where(used, tl.exp2(peak - tl.max(peak, axis=0)), 0.0)
    total = tl.sum(weight * tl.load(stats + part * 2 + 1, mask=used, other=0.0), axis=0)
    mask = used[:, None] & (dim < DIM)[None, :]
    results = tl.load(partial + part[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    result = tl.sum(results * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0) * value_scale
    tl.store(
        out + sequence * out_token + head * out_head + dim, result.to(out.dtype.element_ty), mask=dim < DIM
    )


@triton.jit
def _sequence_of(tile, query_start, sequences, QUERIES: tl.constexpr):
    """The sequence that owns a tile of queries, by bisection.

    Sequence b owns the tiles from query_start[b] // QUERIES + b on, up to the next one's: never too few for
    its queries, at most one too many, and the number of tokens alone tells the host how many there are.
    """
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["sequences"])
def mixed_kernel(
    q,
    cache,
    scales,
    out,
    tables,
    query_start,
    seq_lens,
    sequences,
    scale,
    value_scale,
    q_token,
    q_head,
    out_token,
    out_head,
    table_stride,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    DOT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
    FP8_HARDWARE: tl.constexpr,
    INT8: tl.constexpr,
):
    """Program (tile, KV head): QUERIES consecutive queries of one sequence, in the GROUP heads of a KV head.

    The context of a tile has up to three parts: what the window of the first queries reaches and that of the
    last does not, what all queries see (no mask at all: most of a long prompt), and the diagonal.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(tile, query_start, sequences, QUERIES)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    earlier = (tile - (start // QUERIES + sequence)) * QUERIES
    if earlier >= count:
        return
    context = tl.load(seq_lens + sequence) - count + earlier  # tokens before the tile's first query
    own = tl.minimum(count - earlier, QUERIES)
    row, dim = tl.arange(0, ROWS), tl.arange(0, TILE)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    position = context + query
    mask = (query < own)[:, None] & (dim < DIM)[None, :]
    token = (start + earlier + query).to(tl.int64)
    place = q + token[:, None] * q_token + head[:, None] * q_head + dim[None, :]
    values = tl.load(place, mask=mask, other=0.0).to(DOT)

    keys = cache + kv_head * head_stride
    scales = scales + kv_head * (head_stride // 4)
    table = tables + sequence.to(tl.int64) * table_stride
    end = context + own
    state = _nothing_seen(ROWS, TILE)
    whole = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW + 1, 0)
        edge = tl.maximum(end - WINDOW - begin, 0)
        whole = tl.minimum(begin + tl.cdiv(edge, TOKENS) * TOKENS, end)
        state = _attend(
            state, values, position, keys, scales, table, begin, whole, scale, block_stride, value_stride,
            token_stride, DIM, TILE, TOKENS, BLOCK_SIZE, WINDOW, SOFTCAP, FP8, FP8_HARDWARE, INT8,
            CAUSAL=True, WHOLE=False,
        )  # fmt: skip
    diagonal = whole + tl.maximum(context + 1 - whole, 0) // TOKENS * TOKENS
    state = _attend(
        state, values, position, keys, scales, table, whole, diagonal, scale, block_stride, value_stride,
        token_stride, DIM, TILE, TOKENS, BLOCK_SIZE, WINDOW, SOFTCAP, FP8, FP8_HARDWARE, INT8,
        CAUSAL=False, WHOLE=True,
    )  # fmt: skip
    result, total, _ = _attend(
        state, values, position, keys, scales, table, diagonal, end, scale, block_stride, value_stride,
        token_stride, DIM, TILE, TOKENS, BLOCK_SIZE, WINDOW, SOFTCAP, FP8, FP8_HARDWARE, INT8,
        CAUSAL=True, WHOLE=False,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    place = out + token[:, None] * out_token + head[:, None] * out_head + dim[None, :]
    tl.store(place, (result / total[:, None] * value_scale).to(out.dtype.element_ty), mask=mask)
