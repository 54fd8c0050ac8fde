// Activations of gated feed-forward layers, on vectors of float32.
#pragma once

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

// x / (1 + e^-x)
static inline Vec silu(Vec x) { return mul(x, reciprocal(add(set1(1.0f), exp(sub(zero(), x))))); }

// GELU in its tanh form, 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + e^-2u).
static inline Vec gelu_tanh(Vec x) {
    const Vec cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    return mul(x, reciprocal(add(set1(1.0f), exp(mul(cubic, set1(-2.0f * 0.7978845608f))))));
}

static inline Vec activate(Vec x, int activation) { return activation == kSilu ? silu(x) : gelu_tanh(x); }

}  // namespace OCTAVO_ISA
}  // namespace octavo
