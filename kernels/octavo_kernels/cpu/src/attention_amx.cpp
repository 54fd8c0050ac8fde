#include "attention_amx.h"

#include "amx_tiles.h"
#include "attention.h"

namespace octavo {
namespace amx {
namespace {

// Tiles 0 to 3 hold sums of two tiles of rows by two of columns.
void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

void store_sums(float* upper, float* lower, long columns, bool both) {
    _tile_stored(0, upper, columns * 4);
    _tile_stored(1, upper + 16, columns * 4);
    if (!both) return;
    _tile_stored(2, lower, columns * 4);
    _tile_stored(3, lower + 16, columns * 4);
}

// Tiles 4 and 5 hold rows of pairs, 6 and 7 columns of as many.
void configure(long rows, long pairs) {
    TileConfig config;
    const long few = smaller(16, rows);    // a product takes as long as it has rows
    for (int i : {0, 1}) config.set(i, few, 64);
    for (int i : {2, 3}) config.set(i, 16, 64);
    config.set(4, few, pairs * 4);
    config.set(5, 16, pairs * 4);
    for (int i : {6, 7}) config.set(i, pairs, 64);
    config.load();
}

struct TileProducts {
    using Query = bf16;

    // Sums: 16 rows by 16 tokens; queries: 16 rows by 32 dimensions; keys: 16 pairs of dimensions by 16 tokens.
    static void score(const Tile<bf16>& t) {
        configure(t.rows, 16);
        const bf16* queries = reinterpret_cast<const bf16*>(t.queries);
        for (long row = 0; row < t.rows; row += 32) {
            const bool both = row + 16 < t.rows;
            const bf16* upper = queries + row * t.padded_dim;
            const bf16* lower = upper + 16 * t.padded_dim;
            for (long g = 0; g < t.groups; g += 2) {
                const bf16* left = t.keys[g];
                const bf16* right = t.keys[g + 1 < t.groups ? g + 1 : g];
                const bf16* left_values = t.values[g];
                const bf16* right_values = t.values[g + 1 < t.groups ? g + 1 : g];
                if (row == 0 && t.unasked)
                    for (long i = g + 2; i < smaller(g + 4, t.groups); i++) ask(t.keys[i], kGroup * t.padded_dim);
                clear_sums();
                for (long d = 0; d < t.padded_dim; d += 32) {
                    if (row == 0)    // the values that belong to these keys
                        for (const bf16* values : {left_values, right_values}) ask(values + d * kGroup, 32 * kGroup);
                    _tile_loadd(4, upper + d, t.padded_dim * 2);
                    _tile_loadd(6, left + d * kGroup, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, right + d * kGroup, 64);
                    _tile_dpbf16ps(1, 4, 7);
                    if (!both) continue;
                    _tile_loadd(5, lower + d, t.padded_dim * 2);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                float* scores = t.scores + row * kChunk + g * kGroup;
                store_sums(scores, scores + 16 * kChunk, kChunk, both);
            }
        }
    }

    // Sums: 16 rows by 16 dimensions; probabilities: 16 rows by 16 tokens; values: 8 pairs of tokens by 16 dimensions, loaded
    // past the L1 cache. Never two groups at once, though many rows would pay for laying them side by side: a product of 16
    // pairs is not, bit for bit, two of 8.
    static void weigh(const Tile<bf16>& t) {
        configure(t.rows, 8);
        const bf16* probabilities = reinterpret_cast<const bf16*>(t.probabilities);
        for (long row = 0; row < t.rows; row += 32) {
            const bool both = row + 16 < t.rows;
            for (long d = 0; d < t.padded_dim; d += 32) {
                clear_sums();
                for (long g = 0; g < t.groups; g++) {
                    if (row == 0 && g >= t.early_groups()) ask(t.next_keys[g] + d * kGroup, 32 * kGroup);
                    const bf16* upper = probabilities + row * kChunk + g * kGroup;
                    const bf16* values = t.values[g] + 2 * d;
                    _tile_loadd(4, upper, kChunk * 2);
                    _tile_stream_loadd(6, values, t.padded_dim * 4);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_stream_loadd(7, values + 32, t.padded_dim * 4);
                    _tile_dpbf16ps(1, 4, 7);
                    if (!both) continue;
                    _tile_loadd(5, upper + 16 * kChunk, kChunk * 2);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                float* out = t.chunk.values + row * t.padded_dim + d;
                store_sums(out, out + 16 * t.padded_dim, t.padded_dim, both);
            }
        }
    }
};

}  // namespace

void tile_attend(const Attention& a, const AttentionTask* tasks, long count) {
    if (a.cache.dtype != kBFloat16) return attend(a, tasks, count);
    attend_tiles<bf16, TileProducts>(a, tasks, count);
    _tile_release();
}

}  // namespace amx
}  // namespace octavo
