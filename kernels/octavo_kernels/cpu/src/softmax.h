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

// What scores are multiplied by, their cap (0: none), and the scales (or null) of each column's key, and of its value.
struct Scaling {
    float scale, softcap;
    const float *keys, *values;
};

// A tile's rows take two passes: the first finds the largest score of every row, the second makes probabilities relative to
// it. Row by row, the probabilities would have to wait for the end of the search each time.

static inline float any_row_top(float* scores, Seen seen, const Scaling& by) {
    const long begin = seen.begin, end = seen.end, first = begin / kWidth * kWidth, last = round_up(end, kWidth);
    if (begin >= end) return kMinusInfinity;
    if (by.keys)
        for (long i = first; i < last; i += kWidth) store(scores + i, mul(load(scores + i), load(by.keys + i)));
    if (by.softcap > 0.0f) {
        const Vec inner = set1(by.scale / by.softcap), cap = set1(by.softcap);
        for (long i = first; i < last; i += kWidth) store(scores + i, mul(tanh(mul(load(scores + i), inner)), cap));
    }
    for (long i = first; i < begin; i++) scores[i] = kMinusInfinity;
    for (long i = end; i < last; i++) scores[i] = kMinusInfinity;
    Vec top = load(scores + first);
    for (long i = first + kWidth; i < last; i += kWidth) top = max(top, load(scores + i));
    return largest(top);
}

template <class P>
static void any_row(const float* scores, long columns, Seen seen, const Scaling& by, P* out, float& maximum, float& sum_out) {
    const bool none = seen.begin >= seen.end;
    const long first = none ? columns : seen.begin / kWidth * kWidth, last = none ? columns : round_up(seen.end, kWidth);
    for (long i = 0; i < first; i++) out[i] = P{};
    for (long i = last; i < columns; i++) out[i] = P{};
    sum_out = 0.0f;
    if (none) return;
    const float scale = by.softcap > 0.0f ? 1.0f : by.scale;
    maximum *= scale;
    const Vec factor = set1(scale), shift = set1(-maximum);
    Vec total = zero();
    for (long i = first; i < last; i += kWidth) {
        const Vec p = exp_as(out, fma(load(scores + i), factor, shift));
        total = add(total, p);
        store(out + i, by.values ? mul(p, load(by.values + i)) : p);
    }
    sum_out = sum(total);
}

#if defined(__AVX512F__)
// The same of a row that sees columns [0, end), which lie in N vectors, with no scales or cap.
template <int N>
struct VectorRow {
    static __mmask16 last(long end) { return __mmask16(0xffff >> (N * kWidth - end)); }

    static float top(const float* scores, long end) {
        const Vec tail = _mm512_mask_mov_ps(set1(kMinusInfinity), last(end), load(scores + (N - 1) * kWidth));
        Vec tops[2] = {N > 1 ? load(scores) : tail, tail};
        for (int i = 1; i < N - 1; i++) tops[i % 2] = max(tops[i % 2], load(scores + i * kWidth));
        return largest(max(tops[0], tops[1]));
    }

    static void probabilities(const float* scores, long end, float scale, bf16* out, float& maximum, float& sum_out) {
        const float doublings = scale * 1.44269504f;    // e^x is 2 to the power of x times this
        const Vec factor = set1(doublings), shift = set1(-maximum * doublings);
        maximum *= scale;
        Vec totals[2] = {zero(), zero()}, even = zero();
        for (int i = 0; i < N; i++) {
            const __mmask16 counts = i == N - 1 ? last(end) : __mmask16(0xffff);
            const Vec p = coarse_exp2(fma(load(scores + i * kWidth), factor, shift), counts);
            totals[i % 2] = add(totals[i % 2], p);
            if (i % 2) store_both(out + (i - 1) * kWidth, even, p);
            else if (i == N - 1) store(out + i * kWidth, p);
            even = p;
        }
        sum_out = sum(add(totals[0], totals[1]));
    }
};

// VectorRow<N> of as many vectors as hold columns [0, end).
template <int... N>
static inline float vectors_top(const float* scores, long end, std::integer_sequence<int, N...>) {
    static constexpr decltype(&VectorRow<1>::top) kRows[] = {VectorRow<N + 1>::top...};
    return kRows[(end - 1) / kWidth](scores, end);
}
template <int... N>
static inline void vectors_row(const float* scores, long end, float scale, bf16* out, float& maximum, float& sum_out,
                               std::integer_sequence<int, N...>) {
    static constexpr decltype(&VectorRow<1>::probabilities) kRows[] = {VectorRow<N + 1>::probabilities...};
    kRows[(end - 1) / kWidth](scores, end, scale, out, maximum, sum_out);
}
using ChunkVectors = std::make_integer_sequence<int, kChunk / kWidth>;

// Whether VectorRow serves a row: the same whatever rows share its tile.
template <class P>
static inline bool by_vectors(Seen seen, const Scaling& by) {
    return sizeof(P) == sizeof(bf16) && seen.from_start && seen.end > 0 && by.softcap == 0.0f && !by.keys;
}
#endif

// The first pass over a row of scores: the largest, not yet scaled.
template <class P>
static inline float row_top(float* scores, Seen seen, const Scaling& by) {
#if defined(__AVX512F__)
    if (by_vectors<P>(seen, by)) return vectors_top(scores, seen.end, ChunkVectors());
#endif
    return any_row_top(scores, seen, by);
}

// The second: to probabilities relative to the maximum, which comes as row_top found it and is scaled here.
template <class P>
static inline void row_probabilities(const float* scores, long columns, Seen seen, const Scaling& by, P* out, float& maximum,
                                     float& sum_out) {
#if defined(__AVX512F__)
    if constexpr (sizeof(P) == sizeof(bf16))
        if (by_vectors<P>(seen, by)) {
            vectors_row(scores, seen.end, by.scale, out, maximum, sum_out, ChunkVectors());
            for (long i = round_up(seen.end, kWidth); i < columns; i += kWidth) store(out + i, zero());
            return;
        }
#endif
    any_row(scores, columns, seen, by, out, maximum, sum_out);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
