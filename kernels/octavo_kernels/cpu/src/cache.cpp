#include "cache.h"

#include <cfloat>

#include "eight_bits.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// A head's numbers k and v of a slot, of the type that the cache holds, in the order of T.
template <class T, class Stored>
void write_head(const CacheLayout& c, long slot, long head, const Stored* k, const Stored* v) {
    const long block = slot / c.block_size, offset = slot % c.block_size;
    const long group = offset / kGroup, token = offset % kGroup;
    Stored* keys = key_group<Stored>(c, block, head, group) + key_offset<T>(token, 0);
    Stored* values = value_group<Stored>(c, block, head, group) + value_offset<T>(c, token, 0);
    if (sizeof(T) == 2) {
        for (long d = 0; d + 1 < c.dim; d += 2) __builtin_memcpy(keys + d * kGroup, k + d, 2 * sizeof(Stored));
        if (c.dim % 2) keys[(c.dim - 1) * kGroup] = k[c.dim - 1];
        for (long d = 0; d < c.dim; d++) values[d * 2] = v[d];
    } else {
        for (long d = 0; d < c.dim; d++) keys[d * kGroup] = k[d];
        for (long d = 0; d < c.dim; d++) values[d] = v[d];
    }
}

// x over the scale that brings its largest to 127 -> the scale. Whatever is not finite makes the scale so.
template <class T>
float quantise_int8(const T* x, long dim, uint8_t* out) {
    uint32_t largest = 0;
    for (long d = 0; d < dim; d++) {
        const uint32_t magnitude = bits_of(to_float(x[d])) & 0x7fffffff;
        largest = largest < magnitude ? magnitude : largest;
    }
    const float scale = float_of(largest) * (1.0f / 127.0f), inverse = scale >= FLT_MIN ? 1.0f / scale : 0.0f;
    for (long d = 0; d < dim; d++) out[d] = to_int8(to_float(x[d]) * inverse);
    return scale;
}

template <class T>
void write_int8(const CacheLayout& c, long slot, long head, const T* k, const T* v, uint8_t* row) {
    const long block = slot / c.block_size, offset = slot % c.block_size, at = offset % kGroup * sizeof(float);
    const float scales[2] = {quantise_int8(k, c.dim, row), quantise_int8(v, c.dim, row + c.dim)};
    write_head<T>(c, slot, head, row, row + c.dim);
    __builtin_memcpy(key_scales(c, block, head, offset / kGroup) + at, scales, sizeof(float));
    __builtin_memcpy(value_scales(c, block, head, offset / kGroup) + at, scales + 1, sizeof(float));
}

template <class T>
void write_e4m3(const WriteKV& a, long slot, long head, const T* k, const T* v, uint8_t* row) {
    const long dim = a.cache.dim;
    for (long d = 0; d < dim; d++) row[d] = to_e4m3(to_float(k[d]) * a.key_factor);
    for (long d = 0; d < dim; d++) row[dim + d] = to_e4m3(to_float(v[d]) * a.value_factor);
    write_head<T>(a.cache, slot, head, row, row + dim);
}

template <class T>
void write_tokens(const WriteKV& a, long t0, long t1) {
    uint8_t* row = reinterpret_cast<uint8_t*>(thread_scratch(a.cache.padded_dim));
    for (long t = t0; t < t1; t++) {
        if (a.slots[t] < 0) continue;
        for (long h = 0; h < a.kv_heads; h++) {
            const T* k = static_cast<const T*>(a.k) + t * a.k_token + h * a.k_head;
            const T* v = static_cast<const T*>(a.v) + t * a.v_token + h * a.v_head;
            if (a.cache.stored == kInt8) write_int8(a.cache, a.slots[t], h, k, v, row);
            else if (a.cache.stored == kE4M3) write_e4m3(a, a.slots[t], h, k, v, row);
            else write_head<T>(a.cache, a.slots[t], h, k, v);
        }
    }
}

}  // namespace

void write_kv(const WriteKV& a, long t0, long t1) {
    if (a.cache.dtype == kFloat32) write_tokens<float>(a, t0, t1);
    else write_tokens<bf16>(a, t0, t1);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
