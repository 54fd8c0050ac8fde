#include "cache.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

template <class T>
void write_head(const WriteKV& a, long slot, long head, const T* k, const T* v) {
    const CacheLayout& c = a.cache;
    const long block = slot / c.block_size, offset = slot % c.block_size;
    const long group = offset / kGroup, token = offset % kGroup;
    T* keys = key_group<T>(c, block, head, group) + key_offset<T>(token, 0);
    T* values = value_group<T>(c, block, head, group) + value_offset<T>(c, token, 0);
    if (sizeof(T) == 2) {
        for (long d = 0; d + 1 < c.dim; d += 2) __builtin_memcpy(keys + d * kGroup, k + d, 2 * sizeof(T));
        if (c.dim % 2) keys[(c.dim - 1) * kGroup] = k[c.dim - 1];
        for (long d = 0; d < c.dim; d++) values[d * 2] = v[d];
    } else {
        for (long d = 0; d < c.dim; d++) keys[d * kGroup] = k[d];
        for (long d = 0; d < c.dim; d++) values[d] = v[d];
    }
}

template <class T>
void write_tokens(const WriteKV& a, long t0, long t1) {
    for (long t = t0; t < t1; t++) {
        if (a.slots[t] < 0) continue;
        for (long h = 0; h < a.kv_heads; h++)
            write_head(a, a.slots[t], h, static_cast<const T*>(a.k) + t * a.k_token + h * a.k_head,
                       static_cast<const T*>(a.v) + t * a.v_token + h * a.v_head);
    }
}

}  // namespace

void write_kv(const WriteKV& a, long t0, long t1) {
    if (a.cache.dtype == kFloat32) write_tokens<float>(a, t0, t1);
    else write_tokens<bf16>(a, t0, t1);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
