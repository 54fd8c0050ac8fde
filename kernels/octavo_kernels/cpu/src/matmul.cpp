#include "matmul.h"

#include "epilogue.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Rows whose sums stay in registers together.
constexpr int kFewRows = kWidth == 16 ? 8 : 3;

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T0); }

// Each sum runs over k in order in one accumulator, whatever the number of rows: a row's result in float32 does not
// depend on the batch it is in.
template <int M, bool kStream>
void multiply(const float* x, long stride, const float* w, long k, float* sums) {
    Vec acc[M][kPanelVecs];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kPanelVecs; v++) acc[m][v] = zero();
    for (long i = 0; i < k; i++, w += kPanel) {
        if (kStream) {
            prefetch(w);
            prefetch(w + 16);
        }
        Vec column[kPanelVecs];
        for (int v = 0; v < kPanelVecs; v++) column[v] = load(w + v * kWidth);
        for (int m = 0; m < M; m++) {
            const Vec value = set1(x[m * stride + i]);
            for (int v = 0; v < kPanelVecs; v++) acc[m][v] = fma(column[v], value, acc[m][v]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kPanelVecs; v++) store(sums + m * kPanel + v * kWidth, acc[m][v]);
}

template <int M, bool kStream>
void multiply(const float* x, long stride, const bf16* w, long k, float* sums) {
    constexpr int kChains = M <= 2 ? 2 : 1;    // few rows have too few independent sums to hide the latency of fma
    constexpr int kTileVecs = kHalfPanel / kWidth;
    Vec acc[M][kPanelVecs][kChains];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kPanelVecs; v++)
            for (int c = 0; c < kChains; c++) acc[m][v][c] = zero();
    for (long i = 0; i < k; i += kTileK, w += kTileK * kPanel) {
#pragma GCC unroll 4
        for (long pair = 0; pair < kTileK / 2; pair++) {
            const bf16* row = w + pair * kHalfPanel * 2;
            if (kStream) {
                prefetch(row);
                prefetch(row + kTileK * kHalfPanel);
            }
            Vec first[kPanelVecs], second[kPanelVecs];
            for (int v = 0; v < kPanelVecs; v++) {
                const bf16* tile = row + (v / kTileVecs) * kTileK * kHalfPanel;
                load_pairs(tile + (v % kTileVecs) * kWidth * 2, first[v], second[v]);
            }
            for (int m = 0; m < M; m++) {
                const Vec even = set1(x[m * stride + i + 2 * pair]);
                const Vec odd = set1(x[m * stride + i + 2 * pair + 1]);
                for (int v = 0; v < kPanelVecs; v++) {
                    acc[m][v][0] = fma(first[v], even, acc[m][v][0]);
                    acc[m][v][kChains - 1] = fma(second[v], odd, acc[m][v][kChains - 1]);
                }
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < kPanelVecs; v++) {
            const Vec total = kChains == 2 ? add(acc[m][v][0], acc[m][v][1]) : acc[m][v][0];
            store(sums + m * kPanel + v * kWidth, total);
        }
}

template <class W, bool kStream>
void multiply_rows(long rows, const float* x, long stride, const W* w, long k, float* sums) {
    switch (rows) {
        case 1: return multiply<1, kStream>(x, stride, w, k, sums);
        case 2: return multiply<2, kStream>(x, stride, w, k, sums);
#if defined(__AVX512F__)
        case 3: return multiply<3, kStream>(x, stride, w, k, sums);
        case 4: return multiply<4, kStream>(x, stride, w, k, sums);
        case 5: return multiply<5, kStream>(x, stride, w, k, sums);
        case 6: return multiply<6, kStream>(x, stride, w, k, sums);
        case 7: return multiply<7, kStream>(x, stride, w, k, sums);
#endif
        default: return multiply<kFewRows, kStream>(x, stride, w, k, sums);
    }
}

template <class W>
void wide_matmul(const Matmul& a, long p0, long p1, long r0, long r1) {
    const float* x = static_cast<const float*>(a.x);
    const long stride = a.x_stride;
    alignas(64) float sums[kFewRows * kPanel];
    for (long p = p0; p < p1; p++) {
        const W* w = static_cast<const W*>(a.weight.data) + p * a.weight.panel_elements();
        for (long r = r0; r < r1; r += kFewRows) {
            const long rows = smaller(kFewRows, r1 - r);
            if (r == r0 && r1 - r0 <= kStreamRows) multiply_rows<W, true>(rows, x + r * stride, stride, w, a.weight.k, sums);
            else multiply_rows<W, false>(rows, x + r * stride, stride, w, a.weight.k, sums);
            finish(a, sums, p, r, rows);
        }
    }
}

#if defined(__AVX512F__)

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
