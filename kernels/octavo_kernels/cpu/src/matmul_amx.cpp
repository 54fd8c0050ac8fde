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
constexpr long kBlockRows = 2 * kTileRows;
constexpr long kBlockSums = kBlockRows * kPanel;
// While rows are few, the weights stream from memory: how far ahead of their use they are asked for, so that memory is at
// work while a panel is finished too. To the L2 cache: the L1 cache keeps few requests under way, and the tiles' own loads
// would wait behind these.
constexpr long kPrefetchBytes = 8192;
// A block of many rows is multiplied part after part of k: its part of x stays in the L1 cache while the panels of the task
// pass, which are loaded past that cache.
constexpr long kPartTiles = 18;
// The panels and the rows of a task stay in the L2 cache while the blocks pass. With fewer panels than the least, a block's
// x would be brought to the L1 cache for too little work.
constexpr long kLeastPanels = 3;
constexpr long kTaskPanelBytes = 300 << 10;
constexpr long kTaskRowBytes = 800 << 10;

inline void prefetch_tiles(const char* w) {
#pragma GCC unroll 32
    for (int line = 0; line < kPanelTileBytes / 64; line++)
        _mm_prefetch(w + kPrefetchBytes + line * 64, _MM_HINT_T1);
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

// Weights that are wanted later, asked for a share with each tile of k.
struct Ahead {
    const char* next;
    long lines, share;

    void ask() {
        for (long i = 0; i < share && lines > 0; i++, lines--, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    }
};

// The sums of a block, finished a few rows at a time while the tiles multiply the next: the vector units have nothing
// else to do then.
struct Unfinished {
    const Matmul& product;
    const float* sums = nullptr;
    long panel = 0, row = 0, rows = 0;

    void finish_rows(long count) {
        count = smaller(count, rows);
        if (count == 0) return;
        finish(product, sums, panel, row, count);
        sums += count * kPanel;
        row += count;
        rows -= count;
    }
};

// 17 to 32 rows: two tiles of rows by the two halves of the panel. Begins with zeros, or goes on with the sums. Asks for the
// lines of the output (or null) that the block is going to be written to.
void multiply_block(const char* x, long stride, const char* w, long tiles, bool first, float* sums, Ahead& ahead,
                    Unfinished& before, const char* out, long out_stride) {
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
    const long finished = ceil_div(before.rows, tiles), asked = ceil_div(kBlockRows, tiles);
    for (long t = 0; t < tiles; t++, x += 64, lower += 64, w += kPanelTileBytes) {
        if (ahead.share > 0) ahead.ask();
        else prefetch_tiles(w);
        if (out)
            for (long i = 0; i < asked; i++, out += out_stride) _mm_prefetch(out, _MM_HINT_T0);
        _tile_loadd(4, x, stride);
        _tile_stream_loadd(6, w, 64);
        _tile_loadd(5, lower, stride);
        _tile_stream_loadd(7, w + kTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        before.finish_rows(finished);
    }
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + kHalfPanel, kPanel * 4);
    _tile_stored(2, lower_sums, kPanel * 4);
    _tile_stored(3, lower_sums + kHalfPanel, kPanel * 4);
}

struct Operands {
    const char* x;        // of the first row
    const char* w;        // of the first panel
    long stride, tiles, panel_bytes;

    Operands(const Matmul& a, long panel, long row)
        : x(static_cast<const char*>(a.x) + row * a.x_stride * 2),
          w(static_cast<const char*>(a.weight.data) + panel * a.weight.panel_bytes()),
          stride(a.x_stride * 2),
          tiles(ceil_div(a.weight.k, kTileK)),
          panel_bytes(a.weight.panel_bytes()) {}
};

// At most 32 rows: each panel is read once.
void multiply_stream(const Matmul& a, long p0, long p1, long row, long rows) {
    Operands at(a, p0, row);
    alignas(64) float sums[kBlockSums];
    Ahead nothing{nullptr, 0, 0};
    Unfinished none{a};
    if (rows <= kTileRows) configure(rows, rows);
    else configure(kTileRows, rows - kTileRows);
    for (long p = p0; p < p1; p++, at.w += at.panel_bytes) {
        if (rows <= kTileRows) multiply_few(at.x, at.stride, at.w, at.tiles, sums);
        else multiply_block(at.x, at.stride, at.w, at.tiles, true, sums, nothing, none, nullptr, 0);
        finish(a, sums, p, row, rows);
    }
}

// Many rows, a multiple of 32.
void multiply_blocks(const Matmul& a, long p0, long p1, long r0, long r1) {
    const Operands at(a, p0, r0);
    const long parts = ceil_div(at.tiles, kPartTiles);
    const long panels = a.weight.panels();
    const long next = smaller(p0 + a.next_panels, panels), next_end = smaller(p1 + a.next_panels, panels);
    Ahead ahead{at.w + (next - p0) * at.panel_bytes, (next_end - next) * at.panel_bytes / 64,
                ceil_div(kPanelTileBytes / 64 * kBlockRows, r1 - r0)};
    const long size = a.out_dtype == kFloat32 ? 4 : 2, wide = a.weight.paired ? kHalfPanel : kPanel;
    Unfinished before{a};
    float* sums = thread_scratch((parts > 1 ? p1 - p0 : 1) * kBlockSums);
    configure(kTileRows, kTileRows);
    for (long row = r0; row < r1; row += kBlockRows)
        for (long part = 0; part < parts; part++) {
            const long begin = at.tiles * part / parts, end = at.tiles * (part + 1) / parts;
            const char* x = at.x + (row - r0) * at.stride + begin * 64;
            const char* w = at.w + begin * kPanelTileBytes;
            for (long p = p0; p < p1; p++, w += at.panel_bytes) {
                // Sums that wait for the next part have a place for each panel. Others share one: the sums before them are
                // finished by the time that they are stored.
                float* block = sums + (parts > 1 ? p - p0 : 0) * kBlockSums;
                const char* out = static_cast<const char*>(a.out) + (row * a.out_stride + p * wide) * size;
                multiply_block(x, at.stride, w, end - begin, part == 0, block, ahead, before,
                               part == parts - 1 ? out : nullptr, a.out_stride * size);
                if (part == parts - 1) {
                    before.sums = block;
                    before.panel = p;
                    before.row = row;
                    before.rows = kBlockRows;
                }
            }
        }
    before.finish_rows(kBlockRows);
}

}  // namespace

void tile_matmul(const Matmul& a, long p0, long p1, long r0, long r1) {
    if (a.weight.dtype == kFloat32) return matmul(a, p0, p1, r0, r1);
    const long whole = (r1 - r0) / kBlockRows * kBlockRows;
    if (whole > kBlockRows) {
        multiply_blocks(a, p0, p1, r0, r0 + whole);
        r0 += whole;
    }
    for (; r0 < r1; r0 += kBlockRows) multiply_stream(a, p0, p1, r0, smaller(kBlockRows, r1 - r0));
    _tile_release();
}

TaskSize tile_task_size(const Matmul& a) {
    if (a.weight.dtype != kBFloat16 || a.m <= kBlockRows) return task_size(a);
    const long most = larger(1, kTaskRowBytes / (a.weight.k * 2) / kBlockRows) * kBlockRows;
    const long rows = round_up(ceil_div(a.m, ceil_div(a.m, most)), kBlockRows);
    return {rows, kLeastPanels, larger(kLeastPanels, kTaskPanelBytes / a.weight.panel_bytes())};
}

long tile_chain_rows(const Matmul& a) {
    if (a.weight.dtype != kBFloat16) return 0;
    return kTaskRowBytes / (a.weight.k * 2) / kBlockRows * kBlockRows;
}

}  // namespace amx
}  // namespace octavo
