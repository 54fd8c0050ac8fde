#include "matmul.h"

#include <utility>

#include "epilogue.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kHalfVecs = kHalfPanel / kWidth;
constexpr long kLine = 64;
// Rows whose sums stay in registers together, and up to how many of them with all columns of a panel; more take one half
// of the panel after the other.
constexpr int kMaxRows = kWidth == 16 ? 8 : 6;
constexpr int kWholeRows = kWidth == 16 ? 8 : 2;

// Weights to ask for while others are multiplied: so many cache lines with each kTileK values of k.
struct Ahead {
    const char *next, *end;
    long lines;

    inline void ask() {
        for (long i = 0; i < lines && next < end; i++, next += kLine) _mm_prefetch(next, _MM_HINT_T0);
    }
};

// Sums of M rows with V vectors of columns. Each runs over k in order in one accumulator, whatever M and V: a row's result
// does not depend on the batch it is in.
template <int M, int V>
struct Sums {
    Vec of[M][V];

    inline void clear() {
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) of[m][v] = zero();
    }
    inline void add(const Vec (&columns)[V], const float* x, long stride) {
        for (int m = 0; m < M; m++) {
            const Vec value = set1(x[m * stride]);
            for (int v = 0; v < V; v++) of[m][v] = fma(columns[v], value, of[m][v]);
        }
    }
    inline void save(float* sums) const {
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) store(sums + m * kPanel + v * kWidth, of[m][v]);
    }
};

// Where vector v of a panel's columns begins.
inline const float* columns_of(const float* panel, int v) { return panel + v * kWidth; }
inline const bf16* columns_of(const bf16* panel, int v) {
    return panel + v / kHalfVecs * kTileK * kHalfPanel + v % kHalfVecs * kWidth * 2;
}

// The next `count` <= kTileK values of k.
template <int M, int V>
inline void multiply_tile(const float* x, long stride, const float* w, long count, Sums<M, V>& sums) {
    for (long i = 0; i < count; i++, w += kPanel) {
        Vec columns[V];
        for (int v = 0; v < V; v++) columns[v] = load(columns_of(w, v));
        sums.add(columns, x + i, stride);
    }
}

// kTileK values of k, behind the last zeros. Both values of a pair are taken from memory on their own: in registers there
// is room for one.
template <int M, int V>
inline void multiply_tile(const float* x, long stride, const bf16* w, long, Sums<M, V>& sums) {
    for (long i = 0; i < kTileK; i += 2, w += 2 * kHalfPanel) {
        Vec columns[V];
        for (int v = 0; v < V; v++) columns[v] = load_first(columns_of(w, v));
        sums.add(columns, x + i, stride);
        for (int v = 0; v < V; v++) columns[v] = load_second(columns_of(w, v));
        sums.add(columns, x + i + 1, stride);
    }
}

template <int M, class W>
void multiply(const float* x, long stride, const W* w, long k, Ahead ahead, float* sums) {
    constexpr int kVecs = M <= kWholeRows ? kPanelVecs : kHalfVecs;
    for (int v = 0; v < kPanelVecs; v += kVecs) {
        const W* tile = columns_of(w, v);
        Sums<M, kVecs> part;
        part.clear();
        for (long i = 0; i < k; i += kTileK, tile += kTileK * kPanel) {
            ahead.ask();
            multiply_tile(x + i, stride, tile, smaller(kTileK, k - i), part);
        }
        part.save(sums + v * kWidth);
    }
}

template <class W, int... M>
void multiply_rows(long rows, const float* x, long stride, const W* w, long k, Ahead ahead, float* sums,
                   std::integer_sequence<int, M...>) {
    using Multiply = void (*)(const float*, long, const W*, long, Ahead, float*);
    static constexpr Multiply kByRows[] = {multiply<M + 1, W>...};
    kByRows[rows - 1](x, stride, w, k, ahead, sums);
}

// Panels that are read once are asked for a little ahead of their use. Where rows come in several blocks, the first panel
// is too; each further one while that before it is multiplied, a share with each block, so that memory never waits.
template <class W>
void wide_matmul(const Matmul& a, long p0, long p1, long r0, long r1) {
    const float* x = static_cast<const float*>(a.x);
    const long stride = a.x_stride, rows = r1 - r0, blocks = ceil_div(rows, kMaxRows);
    const long passes = rows <= kWholeRows ? 1 : blocks * kPanelVecs / kHalfVecs;
    const long elements = a.weight.panel_elements(), tile_lines = kTileK * kPanel * sizeof(W) / kLine;
    const W* weights = static_cast<const W*>(a.weight.data);
    const char* end = reinterpret_cast<const char*>(weights + p1 * elements);
    alignas(64) float sums[kMaxRows * kPanel];
    for (long p = p0; p < p1; p++)
        for (long b = 0; b < blocks; b++) {
            const W* w = weights + p * elements;
            const long first = r0 + rows * b / blocks, count = r0 + rows * (b + 1) / blocks - first;
            Ahead ahead{reinterpret_cast<const char*>(w) + kPrefetchBytes, end, tile_lines};
            if (passes > 1 && (p > p0 || b > 0))
                ahead = {reinterpret_cast<const char*>(w + elements + elements * b / blocks), end, ceil_div(tile_lines, passes)};
            multiply_rows(count, x + first * stride, stride, w, a.weight.k, ahead, sums,
                          std::make_integer_sequence<int, kMaxRows>());
            finish(a, sums, p, first, count);
        }
}

#if defined(__AVX512F__)

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0); }

// Products of bfloat16 pairs, summed in float32 by vdpbf16ps. x holds whole tiles of k.
template <int M, bool kStream>
void multiply_pairs(const bf16* x, long stride, const bf16* w, long k, float* sums) {
    __m512 acc[M][2];
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = zero();
    for (long i = 0; i < k; i += kTileK, w += kTileK * kPanel) {
#pragma GCC unroll 4
        for (long pair = 0; pair < kTileK / 2; pair++) {
            const bf16* row = w + pair * kHalfPanel * 2;
            if (kStream) {
                prefetch(row);
                prefetch(row + kTileK * kHalfPanel);
            }
            const __m512bh left = (__m512bh)_mm512_loadu_si512(row);
            const __m512bh right = (__m512bh)_mm512_loadu_si512(row + kTileK * kHalfPanel);
            for (int m = 0; m < M; m++) {
                int values;
                __builtin_memcpy(&values, x + m * stride + i + 2 * pair, sizeof values);
                const __m512bh value = (__m512bh)_mm512_set1_epi32(values);
                acc[m][0] = _mm512_dpbf16_ps(acc[m][0], left, value);
                acc[m][1] = _mm512_dpbf16_ps(acc[m][1], right, value);
            }
        }
    }
    for (int m = 0; m < M; m++) {
        store(sums + m * kPanel, acc[m][0]);
        store(sums + m * kPanel + 16, acc[m][1]);
    }
}

template <bool kStream>
void multiply_pair_rows(long rows, const bf16* x, long stride, const bf16* w, long k, float* sums) {
    switch (rows) {
        case 1: return multiply_pairs<1, kStream>(x, stride, w, k, sums);
        case 2: return multiply_pairs<2, kStream>(x, stride, w, k, sums);
        case 3: return multiply_pairs<3, kStream>(x, stride, w, k, sums);
        case 4: return multiply_pairs<4, kStream>(x, stride, w, k, sums);
        case 5: return multiply_pairs<5, kStream>(x, stride, w, k, sums);
        case 6: return multiply_pairs<6, kStream>(x, stride, w, k, sums);
        case 7: return multiply_pairs<7, kStream>(x, stride, w, k, sums);
        default: return multiply_pairs<8, kStream>(x, stride, w, k, sums);
    }
}

void pair_matmul(const Matmul& a, long p0, long p1, long r0, long r1) {
    alignas(64) float sums[8 * kPanel];
    for (long p = p0; p < p1; p++) {
        const bf16* w = static_cast<const bf16*>(a.weight.data) + p * a.weight.panel_elements();
        for (long r = r0; r < r1; r += 8) {
            const bf16* x = static_cast<const bf16*>(a.x) + r * a.x_stride;
            const long rows = smaller(8, r1 - r);
            if (r == r0 && r1 - r0 <= kStreamRows) multiply_pair_rows<true>(rows, x, a.x_stride, w, a.weight.k, sums);
            else multiply_pair_rows<false>(rows, x, a.x_stride, w, a.weight.k, sums);
            finish(a, sums, p, r, rows);
        }
    }
}

#endif

}  // namespace

void matmul(const Matmul& a, long p0, long p1, long r0, long r1) {
    if (a.weight.dtype == kFloat32) return wide_matmul<float>(a, p0, p1, r0, r1);
#if defined(__AVX512F__)
    if (a.x_form == kRows) return pair_matmul(a, p0, p1, r0, r1);
#endif
    wide_matmul<bf16>(a, p0, p1, r0, r1);
}

void widen(const bf16* x, long x_stride, long k, float* out, long out_stride, long rows) {
    for (long r = 0; r < rows; r++, x += x_stride, out += out_stride) {
        long i = 0;
        for (; i + kWidth <= k; i += kWidth) store(out + i, load(x + i));
        for (; i < out_stride; i++) out[i] = i < k ? to_float(x[i]) : 0.0f;
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
