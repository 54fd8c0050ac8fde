// The two products of attention on vector registers, in float32: tokens side by side for the scores, dimensions side by
// side for the values, every row of the tile against each vector that is loaded.
#pragma once

#include "attention.h"

namespace octavo {
namespace OCTAVO_ISA {

// Rows whose sums stay in registers together; more than kSliceRows of them take half a slice of 32 dimensions at a time.
constexpr int kAttentionRows = kWidth == 16 ? 8 : 6;
constexpr int kSliceRows = kWidth == 16 ? 8 : 3;
template <int M>
constexpr int kSliceVecs = M <= kSliceRows ? kPanelVecs : kPanelVecs / 2;

// Memory must not rest while the cores compute, nor lose the thread at the end of a page: the values of a chunk are asked
// for while its keys are scored, the keys of the next chunk during the softmax and while the values are weighed. (Also keys
// two groups on: those of a run's first chunk have not been asked for.)
struct AskAhead {
    const char *keys, *values;

    inline void next() {
        _mm_prefetch(keys, _MM_HINT_T0);
        _mm_prefetch(values, _MM_HINT_T0);
        keys += 64;
        values += 64;
    }
};

template <int M>
static inline void score_group(const float* q, long stride, const float* keys, long dim, AskAhead ahead,
                               float* scores) {
    Vec acc[M][kGroupVecs];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kGroupVecs; v++) acc[m][v] = zero();
    for (long d = 0; d < dim; d++, keys += kGroup) {
        ahead.next();
        for (int v = 0; v < kGroupVecs; v++) {
            const Vec column = load(keys + v * kWidth);
            for (int m = 0; m < M; m++) acc[m][v] = fma(column, set1(q[m * stride + d]), acc[m][v]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kGroupVecs; v++) store(scores + m * kChunk + v * kWidth, acc[m][v]);
}

template <int M>
static inline void score_group(const float* q, long stride, const bf16* keys, long dim, AskAhead ahead,
                               float* scores) {
    Vec acc[M][kGroupVecs];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kGroupVecs; v++) acc[m][v] = zero();
    const auto step = [&](const Vec (&column)[kGroupVecs], const float* x) {
        for (int m = 0; m < M; m++)
            for (int v = 0; v < kGroupVecs; v++) acc[m][v] = fma(column[v], set1(x[m * stride]), acc[m][v]);
    };
    for (long d = 0; d < dim; d += 2, keys += 2 * kGroup) {
        ahead.next();
        Vec column[kGroupVecs];
        for (int v = 0; v < kGroupVecs; v++) column[v] = load_first(keys + v * kWidth * 2);
        step(column, q + d);
        for (int v = 0; v < kGroupVecs; v++) column[v] = load_second(keys + v * kWidth * 2);
        step(column, q + d + 1);
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kGroupVecs; v++) store(scores + m * kChunk + v * kWidth, acc[m][v]);
}

// kSliceVecs vectors of dimensions of the values, weighted; `slice` is the first of them.
template <int M>
static inline void weigh_slice(const Tile<float>& t, long slice, const float* p, float* out) {
    constexpr int kVecs = kSliceVecs<M>;
    Vec acc[M][kVecs];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kVecs; v++) acc[m][v] = zero();
    for (long g = 0; g < t.groups; g++) {
        const float* values = t.values[g] + slice;
        const float* next = t.next_keys[g] + slice;
        for (long token = g * kGroup; token < (g + 1) * kGroup; token++, values += t.padded_dim, next += t.padded_dim) {
            ask(next, kVecs * kWidth);
            for (int v = 0; v < kVecs; v++) {
                const Vec row = load(values + v * kWidth);
                for (int m = 0; m < M; m++) acc[m][v] = fma(row, set1(p[m * kChunk + token]), acc[m][v]);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kVecs; v++) store(out + m * t.padded_dim + slice + v * kWidth, acc[m][v]);
}

template <int M>
static inline void weigh_slice(const Tile<bf16>& t, long slice, const float* p, float* out) {
    constexpr int kVecs = kSliceVecs<M>;
    Vec acc[M][kVecs];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kVecs; v++) acc[m][v] = zero();
    const auto step = [&](const Vec (&row)[kVecs], long token) {
        for (int m = 0; m < M; m++)
            for (int v = 0; v < kVecs; v++) acc[m][v] = fma(row[v], set1(p[m * kChunk + token]), acc[m][v]);
    };
    for (long g = 0; g < t.groups; g++) {
        const bf16* values = t.values[g] + 2 * slice;
        const bf16* next = t.next_keys[g] + 2 * slice;
        for (long token = g * kGroup; token < (g + 1) * kGroup; token += 2) {
            ask(next, 2 * kVecs * kWidth);
            Vec row[kVecs];
            for (int v = 0; v < kVecs; v++) row[v] = load_first(values + v * kWidth * 2);
            step(row, token);
            for (int v = 0; v < kVecs; v++) row[v] = load_second(values + v * kWidth * 2);
            step(row, token + 1);
            values += 2 * t.padded_dim;
            next += 2 * t.padded_dim;
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kVecs; v++) store(out + m * t.padded_dim + slice + v * kWidth, acc[m][v]);
}

template <template <int> class Step, int M, class T>
static void rest_of_rows(const Tile<T>& t, long row) {
    if (t.rows - row == M) Step<M>::run(t, row);
    else if constexpr (M > 1) rest_of_rows<Step, M - 1>(t, row);
}

// Runs Step<M> over the rows of a tile, M = kMost at a time and then what is left.
template <template <int> class Step, int kMost, class T>
static void by_rows(const Tile<T>& t) {
    long row = 0;
    for (; row + kMost <= t.rows; row += kMost) Step<kMost>::run(t, row);
    rest_of_rows<Step, kMost - 1>(t, row);
}

template <class T>
struct VectorProducts {
    using Query = float;

    template <int M>
    static void score_rows(const Tile<T>& t, long row) {
        for (long g = 0; g < t.groups; g++) {
            const long next = row == 0 ? smaller(g + 2, t.groups - 1) : g;
            const AskAhead ahead{reinterpret_cast<const char*>(t.keys[next]), reinterpret_cast<const char*>(t.values[g])};
            score_group<M>(t.queries + row * t.padded_dim, t.padded_dim, t.keys[g], t.dim, ahead,
                           t.scores + row * kChunk + g * kGroup);
        }
    }

    template <int M>
    static void weigh_rows(const Tile<T>& t, long row) {
        for (long slice = 0; slice < t.padded_dim; slice += kSliceVecs<M> * kWidth)
            weigh_slice<M>(t, slice, t.probabilities + row * kChunk, t.chunk.values + row * t.padded_dim);
    }

    template <int M>
    struct Score {
        static void run(const Tile<T>& t, long row) { score_rows<M>(t, row); }
    };
    template <int M>
    struct Weigh {
        static void run(const Tile<T>& t, long row) { weigh_rows<M>(t, row); }
    };

    static void score(const Tile<T>& t) { by_rows<Score, kAttentionRows>(t); }
    static void weigh(const Tile<T>& t) { by_rows<Weigh, kAttentionRows>(t); }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
