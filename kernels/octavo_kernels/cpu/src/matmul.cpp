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
constexpr int kMaxRows = kWidth == 16 ? 12 : 6;
constexpr int kWholeRows = kWidth == 16 ? 12 : 2;
// How far ahead of their use weights that are read once are asked for. In runs of a whole tile: asked for line by line,
// between the products, they come at half the rate.
constexpr long kAskBytes = 8192;
constexpr long kTaskRows = 256;          // rows of one task,
constexpr long kWideValues = 1 << 16;    // or as many as hold so many values of float32 x: what stays in the L2 cache

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
#if defined(__AVX512BF16__)
    inline void add(const Pairs (&columns)[V], const bf16* x, long stride) {
        for (int m = 0; m < M; m++) {
            const Pairs value = set_pair(x + m * stride);
            for (int v = 0; v < V; v++) of[m][v] = fma(columns[v], value, of[m][v]);
        }
    }
#endif
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

#if defined(__AVX512BF16__)
template <int M, int V>
inline void multiply_tile(const bf16* x, long stride, const bf16* w, long, Sums<M, V>& sums) {
#pragma GCC unroll 4
    for (long i = 0; i < kTileK; i += 2, w += 2 * kHalfPanel) {
        Pairs columns[V];
        for (int v = 0; v < V; v++) columns[v] = load_pairs(columns_of(w, v));
        sums.add(columns, x + i, stride);
    }
}
#endif

template <int M, class X, class W>
void multiply(const X* x, long stride, const W* w, long k, Ahead ahead, float* sums) {
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

template <class X, class W, int... M>
void multiply_rows(long rows, const X* x, long stride, const W* w, long k, Ahead ahead, float* sums,
                   std::integer_sequence<int, M...>) {
    using Multiply = void (*)(const X*, long, const W*, long, Ahead, float*);
    static constexpr Multiply kByRows[] = {multiply<M + 1, X, W>...};
    kByRows[rows - 1](x, stride, w, k, ahead, sums);
}

// Panels that are read once are asked for a little ahead of their use. Where rows come in several blocks, the first panel
// is too; each further one while that before it is multiplied, a share with each block, so that memory never waits.
template <class X, class W>
void panel_matmul(const Matmul& a, long p0, long p1, long r0, long r1) {
    const X* x = static_cast<const X*>(a.x);
    const long stride = a.x_stride, rows = r1 - r0, blocks = ceil_div(rows, kMaxRows);
    const long passes = ceil_div(rows, blocks) <= kWholeRows ? blocks : blocks * kPanelVecs / kHalfVecs;
    const long elements = a.weight.panel_elements(), tile_lines = kTileK * kPanel * sizeof(W) / kLine;
    const W* weights = static_cast<const W*>(a.weight.data);
    const char* end = reinterpret_cast<const char*>(weights + p1 * elements);
    alignas(64) float sums[kMaxRows * kPanel];
    Ahead{reinterpret_cast<const char*>(weights + p0 * elements), end, kAskBytes / kLine}.ask();
    for (long p = p0; p < p1; p++)
        for (long b = 0; b < blocks; b++) {
            const W* w = weights + p * elements;
            const long first = r0 + rows * b / blocks, count = r0 + rows * (b + 1) / blocks - first;
            Ahead ahead{reinterpret_cast<const char*>(w) + kAskBytes, end, tile_lines};
            if (passes > 1 && (p > p0 || b > 0))
                ahead = {reinterpret_cast<const char*>(w + elements + elements * b / blocks), end, ceil_div(tile_lines, passes)};
            multiply_rows(count, x + first * stride, stride, w, a.weight.k, ahead, sums,
                          std::make_integer_sequence<int, kMaxRows>());
            finish(a, sums, p, first, count);
        }
}

}  // namespace

void matmul(const Matmul& a, long p0, long p1, long r0, long r1) {
    if (a.weight.dtype == kFloat32) return panel_matmul<float, float>(a, p0, p1, r0, r1);
#if defined(__AVX512BF16__)
    panel_matmul<bf16, bf16>(a, p0, p1, r0, r1);
#else
    panel_matmul<float, bf16>(a, p0, p1, r0, r1);
#endif
}

TaskSize task_size(const Matmul& a) {
    long most = kTaskRows;
    // Twice as many quantised values: one takes less than half the bytes of a float.
    if (a.x_form == kGroups) most = smaller(kTaskRows, 2 * kWideValues / a.weight.k);
    else if (a.x_form == kWide || a.weight.dtype == kFloat32) most = kWideValues / a.weight.k;
    return {ceil_div(a.m, ceil_div(a.m, larger(1, most))), 1, a.weight.panels()};
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
