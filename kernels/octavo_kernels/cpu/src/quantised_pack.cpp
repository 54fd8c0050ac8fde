// Where quantised weights lie. A panel is a row of tiles: kQuantGroup values of k of its kPanel columns. A tile holds, for
// each four values of k ("quad", 8 of them), 32 columns x 4 bytes. Of 8 bits: the 8 quads. Of fewer: 4 quads of nibbles, the
// low halves of the bytes being quads 0 to 3, the high ones 4 to 7; then planes of the fifth bit (or fifth and sixth), quad
// q's at bit q (at 2 * (q % 4) of plane q / 4). Scales follow, float16 [parts of the group][32], then minima, if any, [32].
#include <string.h>

#include "kernels.h"

namespace octavo {
namespace {

constexpr long kQuadBytes = 4 * kPanel;

float half_to_float(uint16_t half) {
    const int exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
    float value;
    if (exponent == 0x1f) value = fraction ? __builtin_nanf("") : __builtin_inff();
    else value = __builtin_ldexpf(float(exponent ? fraction | 0x400 : fraction), (exponent ? exponent : 1) - 25);
    return half & 0x8000 ? -value : value;
}

bf16 round_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return {0x7fc0};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// A quad of one column, a value in each byte.
void put(uint8_t* tile, int bits, long column, long quad, uint32_t values) {
    uint32_t* at = reinterpret_cast<uint32_t*>(tile) + column;
    if (bits == 8) {
        at[quad * kPanel] = values;
        return;
    }
    constexpr uint32_t nibbles = 0x0f0f0f0f;
    at[quad % 4 * kPanel] |= (values & nibbles) << (quad < 4 ? 0 : 4);
    const int high = bits - 4;
    if (high == 0) return;
    const long quads = 8 / high;
    at[(4 + quad / quads) * kPanel] |= (values >> 4 & nibbles) << quad % quads * high;
}

uint8_t get(const uint8_t* tile, int bits, long column, long k) {
    const long quad = k / 4;
    const uint8_t* at = tile + column * 4 + k % 4;
    if (bits == 8) return at[quad * kQuadBytes];
    const uint8_t low = at[quad % 4 * kQuadBytes] >> (quad < 4 ? 0 : 4) & 0xf;
    const int high = bits - 4;
    if (high == 0) return low;
    const long quads = 8 / high;
    const uint8_t plane = at[(4 + quad / quads) * kQuadBytes];
    return uint8_t(low | (plane >> quad % quads * high & ((1 << high) - 1)) << 4);
}

}  // namespace

void pack_quantised(const PackQuantised& a, long p0, long p1) {
    const Weight& w = a.weight;
    const long tiles = w.k / kQuantGroup, scales = w.scales();
    for (long p = p0; p < p1; p++) {
        uint8_t* panel = static_cast<uint8_t*>(a.out) + p * w.panel_bytes();
        memset(panel, 0, w.panel_bytes());
        for (long column = 0; column < kPanel; column++) {
            const long half = column / kHalfPanel, lane = column % kHalfPanel;
            const long row = w.paired ? p * kHalfPanel + lane : p * kPanel + column;
            if (row >= w.n) continue;
            const Quants& from = w.paired && half ? a.second : a.first;
            uint8_t* tile = panel;
            for (long t = 0; t < tiles; t++, tile += w.tile_bytes()) {
                const uint8_t* values = from.values + row * w.k + t * kQuantGroup;
                for (long quad = 0; quad < kQuantGroup / 4; quad++) {
                    uint32_t four;
                    memcpy(&four, values + quad * 4, sizeof four);
                    put(tile, w.bits, column, quad, four);
                }
                uint16_t* floats = reinterpret_cast<uint16_t*>(tile + w.quant_bytes()) + column;
                for (long s = 0; s < scales; s++) floats[s * kPanel] = from.scales[(row * tiles + t) * scales + s];
                if (w.minima) floats[scales * kPanel] = from.minima[row * tiles + t];
            }
        }
    }
}

void look_up_quantised(const Lookup& a, long i0, long i1) {
    const Weight& w = a.weight;
    const long scales = w.scales(), part = kQuantGroup / scales;
    for (long i = i0; i < i1; i++) {
        const long column = a.rows[i] % kPanel;
        const uint8_t* tile = static_cast<const uint8_t*>(w.data) + a.rows[i] / kPanel * w.panel_bytes();
        bf16* out = static_cast<bf16*>(a.out) + i * a.out_stride;
        for (long k = 0; k < w.k; k += kQuantGroup, tile += w.tile_bytes()) {
            const uint16_t* floats = reinterpret_cast<const uint16_t*>(tile + w.quant_bytes()) + column;
            const float minimum = w.minima ? half_to_float(floats[scales * kPanel]) : 0.0f;
            for (long s = 0; s < scales; s++) {
                const float scale = half_to_float(floats[s * kPanel]);
                for (long j = s * part; j < (s + 1) * part; j++)
                    out[k + j] = round_to_bf16(float(get(tile, w.bits, column, j) - w.zero) * scale + minimum);
            }
        }
    }
}

}  // namespace octavo
