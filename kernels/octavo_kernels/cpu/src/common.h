// Types and constants that every translation unit shares. No function here may be compiled into code that differs by
// instruction set and then be merged by the linker, so what is not trivially inlined is static.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

struct bf16 {
    uint16_t bits;
};

enum DType : int { kFloat32 = 0, kBFloat16 = 1, kQuantised = 2 };    // the last of weights only
enum Stored : int { kPlain = 0, kE4M3 = 1, kInt8 = 2 };    // numbers of a KV cache: as they are multiplied, or in 8 bits
enum Activation : int { kNone = 0, kSilu = 1, kGeluTanh = 2 };

constexpr long kPanel = 32;       // columns of a packed weight that are computed together: two AMX tiles
constexpr long kHalfPanel = 16;   // one AMX tile; in a gate/up pair, gate is the first half and up the second
constexpr long kTileK = 32;       // bf16 values of K in one AMX tile
constexpr long kQuantGroup = 32;  // values of k that share a scale in quantised activations, and most weights
constexpr long kGroup = 16;       // tokens of a KV page that lie side by side
constexpr long kDimStep = 32;     // head dimensions are padded to a multiple of this in the cache
constexpr long kChunk = 128;      // context tokens in one softmax block; a multiple of kGroup

static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long larger(long a, long b) { return a > b ? a : b; }
static inline long ceil_div(long a, long b) { return (a + b - 1) / b; }
static inline long round_up(long a, long b) { return ceil_div(a, b) * b; }

static inline float to_float(bf16 value) {
    union { uint32_t u; float f; } bits{uint32_t(value.bits) << 16};
    return bits.f;
}
static inline float to_float(float value) { return value; }

}  // namespace octavo
