"""Writing keys and values to their pages, and the 8-bit floats that they may be kept in.

A cache is [blocks, Hkv, 2, block_size, D], as the reference's: the keys of one head and block are one piece
of memory, and so are the values, which is how an attention tile reads them. In int8 a piece ends with its
tokens' scales. Offsets of blocks are int64, since pools exceed 2^31 elements.

float8 e4m3 (4 bits of exponent, 3 of mantissa, up to 448, no infinities) is handled as bytes: sm_80 and
gfx942 have no such type. Encoding is the same arithmetic everywhere and rounds to nearest even, as torch
does. Decoding is by the hardware's conversion where there is one.
"""

import triton
import triton.language as tl


@triton.jit
def to_e4m3(x):
    """float32 -> bytes of e4m3, saturating at 448; what is not finite becomes NaN."""
    whole = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Normal numbers: round off 20 of 23 bits of mantissa, to even; take 120 = 127 - 7 off the exponent.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the unit is 2^-9, the last place of numbers about 2^14: adding 2^14 rounds to it.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    number = tl.where(size < 0.015625, small, normal)
    number = tl.where((whole & 0x7FFFFFFF) >= 0x7F800000, 0x7F, number)
    return (number | ((whole >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(bits, HARDWARE: tl.constexpr):
    """Bytes of e4m3 -> float16, exactly."""
    if HARDWARE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # The bits moved to float16's places mean the number over 2^8: the biases are 7 and 15. Also if subnormal.
    wide = bits.to(tl.int16)
    size = wide & 0x7F
    nan = ((size + 1) & 0x80) * 0xFC  # bits of float16's NaN for 0x7F; a comparison takes registers
    return (((wide & 0x80) << 8) | (size << 7) | nan).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def to_int8(x):
    """float32 [rows, D] -> int8 and the rows' scales, as ``octavo_kernels.ops.quantise_int8``."""
    scale = tl.max(tl.abs(x), axis=1) * (1.0 / 127.0)
    least = 1.1754943508222875e-38  # of normal numbers
    inverse = tl.where(scale >= least, tl.div_rn(1.0, tl.maximum(scale, least)), 0.0)
    # To the nearest, ties to even, of |x| < 2^22: that added, the last place is 1.
    numbers = (x * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return numbers, scale


@triton.jit
def _stored(x, inverse_scale, dtype: tl.constexpr, FP8: tl.constexpr):
    if FP8:
        return to_e4m3(x.to(tl.float32) * inverse_scale)
    return x.to(dtype)


@triton.jit
def write_kv_kernel(
    k,
    v,
    cache,
    scales,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    inverse_k_scale,
    inverse_v_scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
    INT8: tl.constexpr,
):
    """Program (token, j) writes keys and values of the j-th HEADS heads of one token.

    ``scales`` is an int8 cache's first one (see ``attention.decode_kernel``); else anything.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head, dim = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, TILE)
    mask = (head < KV_HEADS)[:, None] & (dim < DIM)[None, :]
    keys = tl.load(k + token * k_token + head[:, None] * k_head + dim[None, :], mask=mask, other=0.0)
    values = tl.load(v + token * v_token + head[:, None] * v_head + dim[None, :], mask=mask, other=0.0)
    page = cache + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
    place = page + head[:, None] * head_stride + dim[None, :]
    if INT8:
        numbers, key_scales = to_int8(keys.to(tl.float32))
        tl.store(place, numbers, mask=mask)
        numbers, value_scales = to_int8(values.to(tl.float32))
        tl.store(place + value_stride, numbers, mask=mask)
        first = scales + (slot // BLOCK_SIZE) * (block_stride // 4) + slot % BLOCK_SIZE
        place = first + head * (head_stride // 4)
        tl.store(place, key_scales, mask=head < KV_HEADS)
        tl.store(place + value_stride // 4, value_scales, mask=head < KV_HEADS)
    else:
        dtype: tl.constexpr = cache.dtype.element_ty
        tl.store(place, _stored(keys, inverse_k_scale, dtype, FP8), mask=mask)
        tl.store(place + value_stride, _stored(values, inverse_v_scale, dtype, FP8), mask=mask)
