#include "rotary.h"

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// One head: the pair (i, i + dim / 2) turns by the angle i of the token's position.
template <class T>
void turn(T* x, const float* cos, const float* sin, long half) {
    long i = 0;
    for (; i + kWidth <= half; i += kWidth) {
        const Vec low = load(x + i), high = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, sub(mul(low, c), mul(high, s)));
        store(x + half + i, add(mul(high, c), mul(low, s)));
    }
    if (i < half) {
        const long rest = half - i;
        const Vec low = load_some(x + i, rest), high = load_some(x + half + i, rest);
        const Vec c = load_some(cos + i, rest), s = load_some(sin + i, rest);
        store_some(x + i, sub(mul(low, c), mul(high, s)), rest);
        store_some(x + half + i, add(mul(high, c), mul(low, s)), rest);
    }
}

template <class T>
void turn_tokens(const Rotary& a, long t0, long t1) {
    const long half = a.dim / 2;
    for (long t = t0; t < t1; t++) {
        const float* cos = a.cos + a.positions[t] * half;
        const float* sin = a.sin + a.positions[t] * half;
        for (long h = 0; h < a.heads; h++) turn(static_cast<T*>(a.q) + t * a.q_token + h * a.q_head, cos, sin, half);
        for (long h = 0; h < a.kv_heads; h++) turn(static_cast<T*>(a.k) + t * a.k_token + h * a.k_head, cos, sin, half);
    }
}

}  // namespace

void rotary(const Rotary& a, long t0, long t1) {
    if (a.dtype == kFloat32) turn_tokens<float>(a, t0, t1);
    else turn_tokens<bf16>(a, t0, t1);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
