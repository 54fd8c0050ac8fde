// The softmax of one row of attention's scores over a chunk of its context.
#pragma once

#include <utility>

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

static const float kMinusInfinity = -__builtin_inff();

// The columns [begin, end) of a chunk that a row sees, and whether it sees all from the chunk's first token on: that depends
// on the row's position alone, and not on where its tile begins.
struct Seen {
    long begin, end;
    bool from_start;
};

// Scores of one row to probabilities relative to the row's maximum. The scales (or null) are those of each column's key, and
// of its value.
template <class P>
static void softmax_any_row(float* scores, long columns, Seen seen, float scale, float softcap, const float* key_scales,
                            const float* value_scales, P* out, float& maximum, float& sum_out) {
    const long begin = seen.begin, end = seen.end;
    const bool none = begin >= end;
    const long first = none ? columns : begin / kWidth * kWidth, last = none ? columns : round_up(end, kWidth);
    for (long i = 0; i < first; i++) out[i] = P{};
    for (long i = last; i < columns; i++) out[i] = P{};
    maximum = kMinusInfinity;
    sum_out = 0.0f;
    if (none) return;
    if (key_scales)
        for (long i = first; i < last; i += kWidth) store(scores + i, mul(load(scores + i), load(key_scales + i)));
    if (softcap > 0.0f) {
        const Vec inner = set1(scale / softcap), cap = set1(softcap);
        for (long i = first; i < last; i += kWidth) store(scores + i, mul(tanh(mul(load(scores + i), inner)), cap));
        scale = 1.0f;
    }
    for (long i = first; i < begin; i++) scores[i] = kMinusInfinity;
    for (long i = end; i < last; i++) scores[i] = kMinusInfinity;
    Vec top = load(scores + first);
    for (long i = first + kWidth; i < last; i += kWidth) top = max(top, load(scores + i));
    maximum = largest(top) * scale;
    const Vec factor = set1(scale), shift = set1(-maximum);
    Vec total = zero();
    for (long i = first; i < last; i += kWidth) {
        const Vec p = exp_as(out, fma(load(scores + i), factor, shift));
        total = add(total, p);
        store(out + i, value_scales ? mul(p, load(value_scales + i)) : p);
    }
    sum_out = sum(total);
}

#if defined(__AVX512F__)
// The same of a row that sees columns [0, end), which lie in N vectors, with no scales: the scores stay in registers.
template <int N>
static inline void softmax_vectors(const float* scores, long end, float scale, bf16* out, float& maximum, float& sum_out) {
    const __mmask16 last = __mmask16(0xffff >> (N * kWidth - end));
    Vec x[N];
    for (int i = 0; i < N; i++) x[i] = load(scores + i * kWidth);
    x[N - 1] = _mm512_mask_mov_ps(set1(kMinusInfinity), last, x[N - 1]);
    Vec tops[2] = {x[0], x[N - 1]};
    for (int i = 1; i < N - 1; i++) tops[i % 2] = max(tops[i % 2], x[i]);
    const float top = largest(max(tops[0], tops[1]));
    maximum = top * scale;
    const float doublings = scale * 1.44269504f;    // e^x is 2 to the power of x times this
    const Vec factor = set1(doublings), shift = set1(-top * doublings);
    Vec totals[2] = {zero(), zero()};
    for (int i = 0; i < N; i++) {
        const Vec p = coarse_exp2(fma(x[i], factor, shift), i == N - 1 ? last : __mmask16(0xffff));
        totals[i % 2] = add(totals[i % 2], p);
        store(out + i * kWidth, p);
    }
    sum_out = sum(add(totals[0], totals[1]));
}

template <int... N>
static inline void softmax_by_vectors(const float* scores, long end, float scale, bf16* out, float& maximum, float& sum_out,
                                      std::integer_sequence<int, N...>) {
    using Row = void (*)(const float*, long, float, bf16*, float&, float&);
    static constexpr Row kRows[] = {softmax_vectors<N + 1>...};
    kRows[(end - 1) / kWidth](scores, end, scale, out, maximum, sum_out);
}
#endif

// Which of the two a row takes is the same whatever rows share its tile.
template <class P>
static inline void softmax_row(float* scores, long columns, Seen seen, float scale, float softcap, const float* key_scales,
                               const float* value_scales, P* out, float& maximum, float& sum_out) {
#if defined(__AVX512F__)
    if constexpr (sizeof(P) == sizeof(bf16))
        if (seen.from_start && seen.end > 0 && softcap == 0.0f && !key_scales) {
            softmax_by_vectors(scores, seen.end, scale, out, maximum, sum_out,
                               std::make_integer_sequence<int, kChunk / kWidth>());
            for (long i = round_up(seen.end, kWidth); i < columns; i += kWidth) store(out + i, zero());
            return;
        }
#endif
    softmax_any_row(scores, columns, seen, scale, softcap, key_scales, value_scales, out, maximum, sum_out);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
