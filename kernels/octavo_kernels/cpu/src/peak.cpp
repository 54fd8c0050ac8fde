#include "peak.h"

#include "simd.h"

#if defined(__AMX_BF16__)
#include "amx_tiles.h"
#endif

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// Sums that do not wait for each other: two units begin a product each clock and end it four or five later.
constexpr int kSums = 12;

// `values` is a vector of float32, or of pairs of bfloat16. The empty assembly hides what is in it, and uses the sums, so
// that the compiler leaves the products where they are.
template <class Values>
void multiply(Values values, long steps) {
    Vec sums[kSums];
    for (Vec& sum : sums) sum = zero();
    __asm__ volatile("" : "+x"(values));
    for (long s = 0; s < steps; s++)
#pragma GCC unroll 12
        for (int i = 0; i < kSums; i++) sums[i] = fma(values, values, sums[i]);
    for (Vec& sum : sums) __asm__ volatile("" : : "x"(sum));
}

#if defined(__AMX_BF16__)
// Two tiles of rows by two of columns.
void multiply_tiles(long steps) {
    TileConfig config;
    for (int t = 0; t < 8; t++) config.set(t, 16, 64);
    config.load();    // which clears the tiles
    for (long s = 0; s < steps; s++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}
#endif

}  // namespace

long multiply_registers(int dtype, long steps) {
#if defined(__AMX_BF16__)
    if (dtype == kBFloat16) {
        multiply_tiles(steps);
        return steps * 4 * 16 * 16 * kTileK * 2;
    }
#elif defined(__AVX512BF16__)
    if (dtype == kBFloat16) {
        multiply((Pairs)_mm512_setzero_si512(), steps);
        return steps * kSums * kWidth * 4;
    }
#endif
    multiply(zero(), steps);
    return steps * kSums * kWidth * 2;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
