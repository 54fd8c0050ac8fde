// Vectors of float32 in the widest registers of the instruction set a file is compiled for, and the functions of them
// that the kernels need. Everything lives in a namespace of that instruction set (OCTAVO_ISA), so that the linker never
// takes one set's code for another's.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace octavo {
namespace OCTAVO_ISA {

#if defined(__AVX512F__)

using Vec = __m512;
constexpr long kWidth = 16;

static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec set1(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// 1 / x to about 1 ulp: an estimate of 14 bits and one step of Newton's method, a third of a division's time.
static inline Vec reciprocal(Vec x) {
    const Vec estimate = _mm512_rcp14_ps(x);
    return mul(estimate, _mm512_fnmadd_ps(x, estimate, set1(2.0f)));
}
static inline Vec absolute(Vec a) { return _mm512_abs_ps(a); }
static inline Vec with_sign(Vec magnitude, Vec sign) {
    const __m512 bit = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, bit));
}
static inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
static inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
// Bits of the lanes where a >= b, or where they are not equal (or not numbers).
static inline uint32_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline uint32_t unequal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
// x where it is at least `bound`, zero elsewhere.
static inline Vec if_at_least(Vec x, Vec bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_GE_OQ), x);
}
static inline Vec load(const bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
static inline void store(bf16* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
static inline void store_both(bf16* p, Vec first, Vec second) {    // in the time of one
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
// Of pairs of bfloat16, the first of each, or the second.
static inline Vec load_first(const bf16* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
static inline Vec load_second(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))));
}
#if defined(__AVX512BF16__)
// Pairs of bfloat16, multiplied with pairs and added in float32 (vdpbf16ps).
using Pairs = __m512bh;
static inline Pairs load_pairs(const bf16* p) { return (Pairs)_mm512_loadu_si512(p); }
static inline Pairs set_pair(const bf16* p) {
    int both;
    __builtin_memcpy(&both, p, sizeof both);
    return (Pairs)_mm512_set1_epi32(both);
}
static inline Vec fma(Pairs a, Pairs b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }
#endif
// e^x to about 1 ulp; 0 below the range of normal numbers (so also for -infinity).
static inline Vec exp(Vec x) {
    const __mmask16 vanishes = _mm512_cmp_ps_mask(x, set1(-87.33f), _CMP_LT_OQ);
    x = min(set1(88.7f), x);    // in this order a NaN stays one
    const Vec n = _mm512_roundscale_ps(mul(x, set1(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Vec r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), vanishes, zero());
}

// 2^x to 3e-6, far closer than a bfloat16 keeps it, where `counts` has a bit, else 0. What would be less than a normal number
// is the least of them.
static inline Vec coarse_exp2(Vec x, __mmask16 counts) {
    x = max(set1(-126.0f), x);    // in this order a NaN stays one
    const Vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);    // x less its floor
    Vec p = set1(1.353416778e-2f);
    p = fma(p, r, set1(5.201146007e-2f));
    p = fma(p, r, set1(2.414427549e-1f));
    p = fma(p, r, set1(6.930038333e-1f));
    p = fma(p, r, set1(1.000002623f));
    return _mm512_maskz_scalef_ps(counts, p, x);    // times 2 to the floor of x
}
// e^x alike; 0 below the range of normal numbers.
static inline Vec coarse_exp(Vec x) {
    return coarse_exp2(mul(x, set1(1.44269504f)), _mm512_cmp_ps_mask(x, set1(-87.33f), _CMP_NLT_UQ));
}

#else

using Vec = __m256;
constexpr long kWidth = 8;

static inline Vec zero() { return _mm256_setzero_ps(); }
static inline Vec set1(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec reciprocal(Vec x) { return div(set1(1.0f), x); }
static inline Vec absolute(Vec a) { return _mm256_andnot_ps(set1(-0.0f), a); }
static inline Vec with_sign(Vec magnitude, Vec sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, set1(-0.0f)));
}
static inline float sum(Vec v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float largest(Vec v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline uint32_t at_least(Vec a, Vec b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); }
static inline uint32_t unequal(Vec a, Vec b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ))); }
static inline Vec if_at_least(Vec x, Vec bound) { return _mm256_and_ps(x, _mm256_cmp_ps(x, bound, _CMP_GE_OQ)); }
static inline Vec load(const bf16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
// Round to the nearest, ties to even; a NaN stays one.
static inline void store(bf16* p, Vec v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
static inline Vec load_first(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
static inline Vec load_second(const bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000))));
}
static inline Vec exp(Vec x) {
    const Vec vanishes = _mm256_cmp_ps(x, set1(-87.33f), _CMP_LT_OQ);
    x = max(set1(-87.33f), min(set1(88.37f), x));    // in this order a NaN stays one
    const Vec n = _mm256_round_ps(mul(x, set1(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Vec r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(vanishes, mul(p, _mm256_castsi256_ps(power)));
}

static inline Vec coarse_exp(Vec x) { return exp(x); }

#endif

// e^x as exactly as a type keeps it.
static inline Vec exp_as(const float*, Vec x) { return exp(x); }
static inline Vec exp_as(const bf16*, Vec x) { return coarse_exp(x); }

constexpr long kPanelVecs = kPanel / kWidth;    // vectors across a panel, or across 32 head dimensions
constexpr long kGroupVecs = kGroup / kWidth;    // vectors across a group of tokens, or a half panel

static inline Vec tanh(Vec x) {
    const Vec e = exp(mul(absolute(x), set1(-2.0f)));
    return with_sign(div(sub(set1(1.0f), e), add(set1(1.0f), e)), x);
}

// The first `count` (<= kWidth) values of p, zero after them.
template <class T>
static inline Vec load_some(const T* p, long count) {
    alignas(64) float values[kWidth] = {};
    for (long i = 0; i < count; i++) values[i] = to_float(p[i]);
    return load(values);
}
static inline void store_some(float* p, Vec v, long count) {
    alignas(64) float values[kWidth];
    store(values, v);
    for (long i = 0; i < count; i++) p[i] = values[i];
}
static inline void store_some(bf16* p, Vec v, long count) {
    alignas(64) bf16 values[kWidth];
    store(values, v);
    for (long i = 0; i < count; i++) p[i] = values[i];
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
