#include "quantised.h"

#include <utility>

#include "epilogue.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Rows whose sums stay in registers together, and the vectors of columns that they go over at once. Few rows wait for memory,
// which is read faster in order: all columns of a panel at once.
constexpr int kMaxRows = 6;
constexpr int vecs_of(int rows) { return rows <= 2 ? kPanelVecs : 2; }
// Panels that are multiplied together. One row leaves registers free, and more memory is on its way where two panels are
// read at once.
constexpr int panels_of(long rows) { return rows == 1 && kWidth == 16 ? 2 : 1; }
// How far ahead of their use weights are asked for: some lines with each quad, since the requests of a whole tile would be
// more than a core has on their way at a time.
constexpr long kAskBytes = 3072;

inline void ask(const uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1); }

// A vector of columns as integers: in each lane four values of k of one column.
typedef uint16_t Quads __attribute__((vector_size(4 * kWidth)));
typedef int32_t Lanes __attribute__((vector_size(4 * kWidth)));

inline Quads load_quads(const uint8_t* p) {
    Quads v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
inline Quads all_bytes(int byte) { return Quads{} + uint16_t(byte * 0x0101); }

#if defined(__AVX512VNNI__)

inline Vec load_halves(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec to_floats(Lanes v) { return _mm512_cvtepi32_ps((__m512i)v); }
inline Lanes to_lanes(Vec v) { return (Lanes)_mm512_cvtps_epi32(v); }
inline void store_bytes(int8_t* p, Lanes v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8((__m512i)v)); }
constexpr int kSignBit = 0;

// A sum of products of quads, in each lane.
template <int kBits>
struct Dot {
    Lanes lanes;

    template <int Q>
    inline void add(Quads w, Quads x) {
        lanes = (Lanes)_mm512_dpbusd_epi32((__m512i)lanes, (__m512i)w, (__m512i)x);
    }
};

#else

inline Vec load_halves(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec to_floats(Lanes v) { return _mm256_cvtepi32_ps((__m256i)v); }
inline Lanes to_lanes(Vec v) { return (Lanes)_mm256_cvtps_epi32(v); }
inline void store_bytes(int8_t* p, Lanes v) {
    const __m256i lanes = (__m256i)v;
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
// Whole bytes are taken as signed numbers, 128 less, and the sign of a weight moved to the activation.
constexpr int kSignBit = 0x80;

// A sum of products of quads, in each lane. Pairs of products are added up in 16 bits, over as many quads as fit.
template <int kBits>
struct Dot {
    static constexpr int kLargest = kBits == 8 ? 128 : (1 << kBits) - 1, kFit = 32767 / (2 * 127 * kLargest);

    Lanes lanes;
    Quads pairs = {};

    template <int Q>
    inline void add(Quads w, Quads x) {
        __m256i a = (__m256i)w, b = (__m256i)x;
        if (kBits == 8) {
            b = _mm256_sign_epi8(b, a);
            a = _mm256_abs_epi8(a);
        }
        pairs += (Quads)_mm256_maddubs_epi16(a, b);
        if (Q % kFit == kFit - 1) {
            lanes += (Lanes)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
            pairs = Quads{};
        }
    }
};

#endif

// Four values of k, the Q-th of a tile's eight, of the columns from `column` on: see quantised_pack.cpp for where they lie.
template <int kBits, int Q>
inline Quads weights_of(const uint8_t* tile, long column) {
    constexpr long kQuadBytes = 4 * kPanel;
    tile += 4 * column;
    if constexpr (kBits == 8) {
        const Quads bytes = load_quads(tile + Q * kQuadBytes);
        return kSignBit ? bytes ^ all_bytes(kSignBit) : bytes;
    } else {
        const Quads both = load_quads(tile + Q % 4 * kQuadBytes);
        const Quads low = (Q < 4 ? both : both >> 4) & all_bytes(0x0f);
        if constexpr (kBits == 4) {
            return low;
        } else {
            constexpr int kHigh = kBits - 4, kPerPlane = 8 / kHigh, kShift = 4 - kHigh * (Q % kPerPlane);
            Quads high = load_quads(tile + (4 + Q / kPerPlane) * kQuadBytes);
            if constexpr (kShift >= 0) high = high << kShift;
            else high = high >> -kShift;
            return low | (high & all_bytes(((1 << kHigh) - 1) << 4));
        }
    }
}

// One tile (kQuantGroup values of k) of M rows and V vectors of columns, as many of each of P panels. Integer sums are exact,
// and those of the tiles are added in order, whatever M, P and V: a row's result does not depend on the batch it is in.
template <int kBits, bool kMinima, int M, int P, int V>
struct Tile {
    static constexpr int kScales = kBits == 6 ? 2 : 1;    // of a column, each for an equal part of the group
    static constexpr long kValueBytes = kPanel * kQuantGroup * kBits / 8;
    static constexpr long kScaleBytes = kPanel * sizeof(uint16_t);
    static constexpr long kLines = (kValueBytes + kScaleBytes * (kScales + kMinima)) / 64;

    const QuantGroup* x;
    long x_stride;
    const uint8_t* w;       // of the first panel
    long panel_bytes;       // to the next one
    long column;
    bool asks;              // for weights that come later
    Vec (&sums)[M][V];

    const uint8_t* panel(int v) const { return w + v / (V / P) * panel_bytes; }
    long column_of(int v) const { return column + v % (V / P) * kWidth; }
    Vec floats(int v, long offset) const {
        return load_halves(reinterpret_cast<const uint16_t*>(panel(v) + kValueBytes + offset) + column_of(v));
    }

    template <int Q>
    inline void multiply_quad(Dot<kBits> (&dots)[M][V]) const {
        if (asks)
            for (int p = 0; p < P; p++)
                for (long i = kLines * Q / 8; i < kLines * (Q + 1) / 8; i++) ask(w + p * panel_bytes + kAskBytes + i * 64);
        Quads weights[V];
        for (int v = 0; v < V; v++) weights[v] = weights_of<kBits, Q>(panel(v), column_of(v));
        for (int m = 0; m < M; m++) {
            int32_t four;
            __builtin_memcpy(&four, x[m * x_stride].values + 4 * Q, sizeof four);
            const Quads values = (Quads)(Lanes{} + four);
            for (int v = 0; v < V; v++) dots[m][v].template add<Q>(weights[v], values);
        }
    }

    template <int kPart, int... Q>
    inline void multiply_part(std::integer_sequence<int, Q...>) {
        Dot<kBits> dots[M][V];
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) dots[m][v].lanes = Lanes{} + x[m * x_stride].start[kPart];
        (multiply_quad<kPart * 8 / kScales + Q>(dots), ...);
        for (int v = 0; v < V; v++) {
            const Vec scale = floats(v, kPart * kScaleBytes);
            for (int m = 0; m < M; m++)
                sums[m][v] = fma(to_floats(dots[m][v].lanes), mul(scale, set1(x[m * x_stride].scale)), sums[m][v]);
        }
    }

    inline void multiply() {
        multiply_part<0>(std::make_integer_sequence<int, 8 / kScales>());
        if constexpr (kScales == 2) multiply_part<1>(std::make_integer_sequence<int, 4>());
        if constexpr (kMinima)
            for (int v = 0; v < V; v++) {
                const Vec minimum = floats(v, kScales * kScaleBytes);
                for (int m = 0; m < M; m++) sums[m][v] = fma(minimum, set1(x[m * x_stride].sum), sums[m][v]);
            }
    }
};

// out: [P][M][kPanel].
template <int kBits, bool kMinima, int M, int P>
void multiply(const QuantGroup* x, long tiles, const uint8_t* w, long tile_bytes, bool asks, float* out) {
    constexpr int kVecs = vecs_of(M), V = P * kVecs;
    for (long column = 0; column < kPanel; column += kVecs * kWidth) {
        Vec sums[M][V];
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) sums[m][v] = zero();
        const uint8_t* tile = w;
        for (long t = 0; t < tiles; t++, tile += tile_bytes)
            Tile<kBits, kMinima, M, P, V>{x + t, tiles, tile, tiles * tile_bytes, column, asks, sums}.multiply();
        asks = false;
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) store(out + (v / kVecs * M + m) * kPanel + column + v % kVecs * kWidth, sums[m][v]);
    }
}

using Multiply = void (*)(const QuantGroup*, long, const uint8_t*, long, bool, float*);

// For each number of rows: of one panel, and of as many as panels_of() that number.
struct ByRows {
    Multiply one[kMaxRows], together[kMaxRows];
};

template <int kBits, bool kMinima, int... M>
const ByRows& by_rows(std::integer_sequence<int, M...>) {
    static constexpr ByRows kTable{{multiply<kBits, kMinima, M + 1, 1>...},
                                   {multiply<kBits, kMinima, M + 1, panels_of(M + 1)>...}};
    return kTable;
}

const ByRows& multiply_of(const Weight& w) {
    constexpr auto rows = std::make_integer_sequence<int, kMaxRows>();
    switch (w.bits) {
        case 4: return w.minima ? by_rows<4, true>(rows) : by_rows<4, false>(rows);
        case 5: return w.minima ? by_rows<5, true>(rows) : by_rows<5, false>(rows);
        case 6: return by_rows<6, false>(rows);
        default: return by_rows<8, false>(rows);
    }
}

}  // namespace

void quantised_matmul(const Matmul& a, long p0, long p1, long r0, long r1) {
    const ByRows& multiply = multiply_of(a.weight);
    const QuantGroup* x = static_cast<const QuantGroup*>(a.x);
    const long tiles = a.weight.k / kQuantGroup, tile_bytes = a.weight.tile_bytes();
    const long rows = r1 - r0, blocks = ceil_div(rows, kMaxRows), together = panels_of(rows);
    alignas(64) float sums[kMaxRows * kPanel];    // of one panel; two panels of one row fit too
    const uint8_t* w = static_cast<const uint8_t*>(a.weight.data) + p0 * tiles * tile_bytes;
    for (long i = 0; i < kAskBytes; i += 64) ask(w + i);
    for (long p = p0; p < p1;) {
        const long panels = smaller(together, p1 - p);
        for (long b = 0; b < blocks; b++) {
            const long first = r0 + rows * b / blocks, count = r0 + rows * (b + 1) / blocks - first;
            const auto multiply_rows = (panels == 1 ? multiply.one : multiply.together)[count - 1];
            multiply_rows(x + first * tiles, tiles, w, tile_bytes, b == 0, sums);
            for (long i = 0; i < panels; i++) finish(a, sums + i * count * kPanel, p + i, first, count);
        }
        p += panels;
        w += panels * tiles * tile_bytes;
    }
}

void quantise(const Matmul& a, QuantGroup* out, long r0, long r1) {
    const bool halves = a.weight.scales() == 2;
    const int32_t offset = a.weight.bits == 8 && kSignBit ? kSignBit - a.weight.zero : -a.weight.zero;
    for (long r = r0; r < r1; r++) {
        const bf16* x = static_cast<const bf16*>(a.x) + r * a.x_stride;
        for (long k = 0; k < a.weight.k; k += kQuantGroup, x += kQuantGroup, out++) {
            Vec values[kPanelVecs], most = zero(), poison = zero();
            for (int v = 0; v < kPanelVecs; v++) {
                values[v] = load(x + v * kWidth);
                most = max(most, absolute(values[v]));
                poison = fma(values[v], zero(), poison);
            }
            const float magnitude = largest(most);
            const Vec inverse = set1(magnitude > 0.0f ? 127.0f / magnitude : 0.0f);
            int32_t part[2] = {};
            for (int v = 0; v < kPanelVecs; v++) {
                const Lanes rounded = to_lanes(mul(values[v], inverse));
                store_bytes(out->values + v * kWidth, rounded);
                part[v * 2 / kPanelVecs] += int32_t(sum(to_floats(rounded)));
            }
            out->scale = magnitude / 127.0f + sum(poison);    // what is no number makes the sums none
            out->sum = out->scale * float(part[0] + part[1]);
            out->start[0] = offset * (halves ? part[0] : part[0] + part[1]);
            out->start[1] = offset * part[1];
        }
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
