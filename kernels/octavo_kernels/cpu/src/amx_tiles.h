// Configuration of the eight AMX tile registers of this thread.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

namespace octavo {
namespace amx {

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, long tile_rows, long bytes) {
        rows[tile] = uint8_t(tile_rows);
        row_bytes[tile] = uint16_t(bytes);
    }
    void load() const {
        // GCC tells the optimiser that ldtilecfg reads only the first eight bytes; this keeps the stores to the others.
        __asm__ volatile("" : : "r"(this) : "memory");
        _tile_loadconfig(this);
    }
};

}  // namespace amx
}  // namespace octavo
