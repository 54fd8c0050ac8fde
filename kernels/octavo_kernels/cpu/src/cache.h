// Reading and writing the pages of the KV cache (see CacheLayout).
#pragma once

#include "kernels.h"

namespace octavo {

// Start of the keys and of the values of one group of tokens; values lie behind all keys of the page.
template <class T>
static inline T* key_group(const CacheLayout& c, long block, long kv_head, long group) {
    return static_cast<T*>(c.data) + block * c.block_stride + kv_head * c.head_stride + group * c.group_elements();
}
template <class T>
static inline T* value_group(const CacheLayout& c, long block, long kv_head, long group) {
    return key_group<T>(c, block, kv_head, c.groups() + group);
}

// The float32 scales of a group of int8, which may lie anywhere.
static inline char* key_scales(const CacheLayout& c, long block, long kv_head, long group) {
    return key_group<char>(c, block, kv_head, 2 * c.groups()) + group * kGroup * sizeof(float);
}
static inline char* value_scales(const CacheLayout& c, long block, long kv_head, long group) {
    return key_scales(c, block, kv_head, c.groups() + group);
}

// Offset of a token's value of dimension d inside its group: pairs of dimensions (keys) or tokens (values) lie side by
// side in bfloat16, one after the other in float32.
template <class T>
static inline long key_offset(long token, long d) {
    return sizeof(T) == 2 ? (d / 2 * kGroup + token) * 2 + d % 2 : d * kGroup + token;
}
template <class T>
static inline long value_offset(const CacheLayout& c, long token, long d) {
    return sizeof(T) == 2 ? (token / 2 * c.padded_dim + d) * 2 + token % 2 : token * c.padded_dim + d;
}

namespace OCTAVO_ISA {

void write_kv(const WriteKV& a, long token_begin, long token_end);

}  // namespace OCTAVO_ISA
}  // namespace octavo
