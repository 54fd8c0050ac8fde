// The two products of attention on pairs of bfloat16 (vdpbf16ps), summed in float32: what the cache holds is multiplied as it
// lies there, pairs of dimensions for the scores, pairs of tokens for the values.
#pragma once

#include "attention_vector.h"

namespace octavo {
namespace OCTAVO_ISA {

#if defined(__AVX512BF16__)

struct PairProducts {
    using Query = bf16;

    // Rows whose sums stay in registers, by two or four groups of tokens, or vectors of dimensions.
    static constexpr int kRows = 8;

    template <int M, int G>
    static inline void score_groups(const Tile<bf16>& t, long row, long group, const bf16* queries) {
        Vec acc[M][G];
        for (int m = 0; m < M; m++)
            for (int g = 0; g < G; g++) acc[m][g] = zero();
        const char *keys[G], *soon[G], *values[G];
        for (int g = 0; g < G; g++) {
            const long ahead = row == 0 ? smaller(group + g + G, t.groups - 1) : group + g;
            keys[g] = reinterpret_cast<const char*>(t.keys[group + g]);
            soon[g] = reinterpret_cast<const char*>(t.keys[ahead]);
            values[g] = reinterpret_cast<const char*>(t.values[group + g]);
        }
        const bf16* q = queries + row * t.padded_dim;
        for (long d = 0; d < t.padded_dim; d += 2) {
            const long at = d * kGroup * sizeof(bf16);
            for (int g = 0; g < G; g++) {
                _mm_prefetch(soon[g] + at, _MM_HINT_T0);
                _mm_prefetch(values[g] + at, _MM_HINT_T0);
                const Pairs column = load_pairs(reinterpret_cast<const bf16*>(keys[g] + at));
                for (int m = 0; m < M; m++) acc[m][g] = fma(column, set_pair(q + m * t.padded_dim + d), acc[m][g]);
            }
        }
        for (int m = 0; m < M; m++)
            for (int g = 0; g < G; g++) store(t.scores + (row + m) * kChunk + (group + g) * kGroup, acc[m][g]);
    }

    template <int M>
    static void score_rows(const Tile<bf16>& t, long row) {
        constexpr int kGroups = M <= 4 ? 4 : 2;
        const bf16* queries = reinterpret_cast<const bf16*>(t.queries);
        long group = 0;
        for (; group + kGroups <= t.groups; group += kGroups) score_groups<M, kGroups>(t, row, group, queries);
        for (; group < t.groups; group++) score_groups<M, 1>(t, row, group, queries);
    }

    template <int M, int V>
    static inline void weigh_slice(const Tile<bf16>& t, long row, long slice) {
        Vec acc[M][V];
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) acc[m][v] = zero();
        const bf16* p = reinterpret_cast<const bf16*>(t.probabilities) + row * kChunk;
        for (long g = 0; g < t.groups; g++, p += kGroup) {
            const bf16* values = t.values[g] + 2 * slice;
            const bf16* next = t.next_keys[g] + 2 * slice;
            for (long token = 0; token < kGroup; token += 2, values += 2 * t.padded_dim, next += 2 * t.padded_dim) {
                for (int v = 0; v < V; v++) {
                    _mm_prefetch(reinterpret_cast<const char*>(next + v * 2 * kWidth), _MM_HINT_T0);
                    const Pairs column = load_pairs(values + v * 2 * kWidth);
                    for (int m = 0; m < M; m++) acc[m][v] = fma(column, set_pair(p + m * kChunk + token), acc[m][v]);
                }
            }
        }
        float* out = t.chunk.values + row * t.padded_dim + slice;
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) store(out + m * t.padded_dim + v * kWidth, acc[m][v]);
    }

    template <int M>
    static void weigh_rows(const Tile<bf16>& t, long row) {
        constexpr int kVecs = M <= 4 ? 4 : 2;
        long slice = 0;
        for (; slice + kVecs * kWidth <= t.padded_dim; slice += kVecs * kWidth) weigh_slice<M, kVecs>(t, row, slice);
        for (; slice < t.padded_dim; slice += 2 * kWidth) weigh_slice<M, 2>(t, row, slice);
    }

    template <int M>
    struct Score {
        static void run(const Tile<bf16>& t, long row) { score_rows<M>(t, row); }
    };
    template <int M>
    struct Weigh {
        static void run(const Tile<bf16>& t, long row) { weigh_rows<M>(t, row); }
    };

    static void score(const Tile<bf16>& t) { by_rows<Score, kRows>(t); }
    static void weigh(const Tile<bf16>& t) { by_rows<Weigh, kRows>(t); }
};

#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
