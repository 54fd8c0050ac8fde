// Numbers of the KV cache in 8 bits: float8 e4m3 (4 bits of exponent, 3 of mantissa, up to 448, no infinities) and int8. Both
// are bfloat16 exactly. What is scalar here is free of branches, for the compiler to make vectors of.
#pragma once

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// To the nearest, ties to even; saturates at 448. What is not finite becomes NaN, so that no cache hides a broken row.
static inline uint8_t to_e4m3(float x) {
    const uint32_t whole = bits_of(x) & 0x7fffffff;
    const float magnitude = float_of(whole), size = magnitude < 448.0f ? magnitude : 448.0f;
    const uint32_t bits = bits_of(size);
    // Normal numbers: round off 20 of 23 bits of mantissa; take 120 = 127 - 7 off the exponent.
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    // Below 2^-6 the unit is 2^-9, the last place of numbers about 2^14: adding 2^14 rounds to it.
    const uint32_t small = bits_of(size + 16384.0f) - bits_of(16384.0f);
    const uint32_t nan = whole >= 0x7f800000 ? 0x7f : 0;
    return uint8_t((size < 0.015625f ? small : normal) | nan | (bits_of(x) >> 24 & 0x80));
}

// To the nearest, ties to even, of |x| < 2^22: that added, the last place is 1.
static inline uint8_t to_int8(float x) { return uint8_t(bits_of(x + 12582912.0f)); }

// `count` numbers, a multiple of 32, as they are multiplied.
static inline void widen_int8(const uint8_t* from, float* to, long count) {
    for (long i = 0; i < count; i++) to[i] = float(int8_t(from[i]));
}

// Of bfloat16 both take the bits: e4m3's moved into their places with 120 added to the exponent, the 8 that are 0 or
// subnormal looked up, and the one that is no number replaced.
constexpr uint16_t kNan = 0x7fc0;
alignas(64) constexpr uint16_t kSubnormals[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

#if defined(__AVX512F__)

static inline void widen_e4m3(const uint8_t* from, bf16* to, long count) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kSubnormals)));
    const __m512i size = _mm512_set1_epi16(0x7f), bias = _mm512_set1_epi16(120 << 7), sign = _mm512_set1_epi16(short(0x8000));
    for (long i = 0; i < count; i += 32) {
        const __m512i numbers = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
        const __m512i magnitude = _mm512_and_si512(numbers, size);
        const __mmask32 small = _mm512_testn_epi16_mask(numbers, _mm512_set1_epi16(0x78));
        __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), bias);
        bits = _mm512_mask_permutexvar_epi16(bits, small, magnitude, table);
        bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(magnitude, size), _mm512_set1_epi16(kNan));
        bits = _mm512_or_si512(bits, _mm512_and_si512(_mm512_slli_epi16(numbers, 8), sign));
        _mm512_storeu_si512(to + i, bits);
    }
}
static inline void widen_int8(const uint8_t* from, bf16* to, long count) {
    for (long i = 0; i < count; i += 16) {
        const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        store(to + i, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers)));
    }
}

#else

static inline void widen_e4m3(const uint8_t* from, bf16* to, long count) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kSubnormals)));
    const __m256i size = _mm256_set1_epi16(0x7f), bias = _mm256_set1_epi16(120 << 7), sign = _mm256_set1_epi16(short(0x8000));
    for (long i = 0; i < count; i += 16) {
        const __m256i numbers = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
        const __m256i magnitude = _mm256_and_si256(numbers, size);
        const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), bias);
        // Bytes 2 m and 2 m + 1 of the table.
        const __m256i doubled = _mm256_mullo_epi16(magnitude, _mm256_set1_epi16(0x202));
        const __m256i places = _mm256_add_epi16(doubled, _mm256_set1_epi16(0x100));
        const __m256i small = _mm256_shuffle_epi8(table, places);
        __m256i bits = _mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(7)));
        const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, size), _mm256_set1_epi16(kNan));
        bits = _mm256_or_si256(_mm256_or_si256(bits, nan), _mm256_and_si256(_mm256_slli_epi16(numbers, 8), sign));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), bits);
    }
}
static inline void widen_int8(const uint8_t* from, bf16* to, long count) {
    const auto bits = [](const uint8_t* p) {
        const __m256i numbers = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(numbers)), 16);
    };
    for (long i = 0; i < count; i += 16) {
        const __m256i both = _mm256_packus_epi32(bits(from + i), bits(from + i + 8));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_permute4x64_epi64(both, 0xd8));
    }
}

#endif

// By way of bfloat16, which holds each of them exactly.
static inline void widen_e4m3(const uint8_t* from, float* to, long count) {
    alignas(64) bf16 part[32];
    for (long i = 0; i < count; i += 32) {
        widen_e4m3(from + i, part, 32);
        for (long j = 0; j < 32; j += kWidth) store(to + i + j, load(part + j));
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
