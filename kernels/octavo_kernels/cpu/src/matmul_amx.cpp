#include "matmul_amx.h"

#include "amx_tiles.h"
#include "epilogue.h"
#include "matmul.h"

namespace octavo {
namespace amx {
namespace {

constexpr long kTileRows = 16;
constexpr long kTileBytes = 1024;
constexpr long kPanelTileBytes = 2 * kTileBytes;    // both halves of a panel, 32 values of k
// While rows are few, the weights stream from memory: how far ahead of use they are asked for.
constexpr long kPrefetchBytes = 2048;
constexpr long kStreamRows = 32;
// Rows that share one pass over a panel, and tiles of k in one pass: a panel's part and its sums stay in the L1 cache.
constexpr long kBlockRows = 256;
constexpr long kBlockTiles = 12;

inline void prefetch_tiles(const char* w) {
#pragma GCC unroll 32
    for (int line = 0; line < kPanelTileBytes / 64; line++)
        _mm_prefetch(w + kPrefetchBytes + line * 64, _MM_HINT_T0);
}

// Ask for the lines of the output that a block will write, so that they come while its products are computed.
void prefetch_output(const Matmul& a, long panel, long row, long rows) {
    const long columns = a.weight.paired ? kHalfPanel : kPanel, size = a.out_dtype == kFloat32 ? 4 : 2;
    const char* out = static_cast<const char*>(a.out) + (row * a.out_stride + panel * columns) * size;
    for (long r = 0; r < rows; r++, out += a.out_stride * size)
        for (long byte = 0; byte < columns * size; byte += 64) __builtin_prefetch(out + byte, 1);
}

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 the two halves of a panel.
void configure(long upper_rows, long lower_rows) {
    TileConfig config;
    for (int t : {0, 1, 4}) config.set(t, upper_rows, 64);
    for (int t : {2, 3, 5}) config.set(t, lower_rows, 64);
    for (int t : {6, 7}) config.set(t, kTileRows, 64);
    config.load();
}

// At most 16 rows. One sum for all of k, as in a block: a row's result does not depend on how many there are.
void multiply_few(const char* x, long stride, const char* w, long tiles, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    for (long t = 0; t < tiles; t++, x += 64, w += kPanelTileBytes) {
        prefetch_tiles(w);
        _tile_loadd(4, x, stride);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + kTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + kHalfPanel, kPanel * 4);
}

// 17 to 32 rows: two tiles of rows by the two halves of the panel. Where `ahead` is given, so many lines of it (the next
// panel) are asked for with each tile of k; else the panel itself, a little ahead of its use.
void multiply_block(const char* x, long stride, const char* w, long tiles, bool first, float* sums, const char* ahead,
                    long ahead_lines) {
    const char* lower = x + kTileRows * stride;
    float* lower_sums = sums + kTileRows * kPanel;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, kPanel * 4);
        _tile_loadd(1, sums + kHalfPanel, kPanel * 4);
        _tile_loadd(2, lower_sums, kPanel * 4);
        _tile_loadd(3, lower_sums + kHalfPanel, kPanel * 4);
    }
    for (long t = 0; t < tiles; t++, x += 64, lower += 64, w += kPanelTileBytes) {
        if (ahead) {
            for (long line = 0; line < ahead_lines; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        } else {
            prefetch_tiles(w);
        }
        _tile_loadd(4, x, stride);
        _tile_loadd(6, w, 64);
        _tile_loadd(5, lower, stride);
        _tile_loadd(7, w + kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + kHalfPanel, kPanel * 4);
    _tile_stored(2, lower_sums, kPanel * 4);
    _tile_stored(3, lower_sums + kHalfPanel, kPanel * 4);
}

// One panel by up to kBlockRows rows. `row` counts from the start of the output.
void multiply_panel(const Matmul& a, long panel, long row, long rows, float* sums) {
    const long stride = a.x_stride * 2, tiles = ceil_div(a.weight.k, kTileK);
    const char* x = static_cast<const char*>(a.x) + row * stride;
    const char* w = static_cast<const char*>(a.weight.data) + panel * a.weight.panel_elements() * 2;
    const long parts = rows <= kStreamRows ? 1 : ceil_div(tiles, kBlockTiles);
    const long part_tiles = ceil_div(tiles, parts);
    const long full = rows / (2 * kTileRows), rest = rows % (2 * kTileRows);
    if (full > 0) configure(kTileRows, kTileRows);
    const char* ahead = full > 1 ? w + a.weight.panel_elements() * 2 : nullptr;
    const long ahead_lines = full > 1 ? ceil_div(kPanelTileBytes / 64, full) : 0;
    for (long t = 0; full > 0 && t < tiles; t += part_tiles) {
        const long count = smaller(part_tiles, tiles - t);
        for (long b = 0; b < full; b++) {
            const char* block = x + b * 2 * kTileRows * stride + t * 64;
            float* block_sums = sums + b * 2 * kTileRows * kPanel;
            if (t + part_tiles >= tiles) prefetch_output(a, panel, row + b * 2 * kTileRows, 2 * kTileRows);
            multiply_block(block, stride, w + t * kPanelTileBytes, count, t == 0, block_sums, ahead, ahead_lines);
            if (ahead) ahead += count * ahead_lines * 64;
        }
    }
    if (rest > 0) {
        x += full * 2 * kTileRows * stride;
        float* rest_sums = sums + full * 2 * kTileRows * kPanel;
        if (rest <= kTileRows) {
            configure(rest, rest);
            multiply_few(x, stride, w, tiles, rest_sums);
        } else {
            configure(kTileRows, rest - kTileRows);
            multiply_block(x, stride, w, tiles, true, rest_sums, nullptr, 0);
        }
    }
    finish(a, sums, panel, row, rows);
}

}  // namespace

void tile_matmul(const Matmul& a, long p0, long p1, long r0, long r1) {
    if (a.weight.dtype == kFloat32) return matmul(a, p0, p1, r0, r1);
    alignas(64) float sums[kBlockRows * kPanel];
    for (long r = r0; r < r1; r += kBlockRows)
        for (long p = p0; p < p1; p++) multiply_panel(a, p, r, smaller(kBlockRows, r1 - r), sums);
    _tile_release();
}

}  // namespace amx
}  // namespace octavo
