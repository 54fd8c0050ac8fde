// Activations of gated feed-forward layers, on vectors of float32, for outputs of a type.
#pragma once

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

// x / (1 + e^u), as exactly as Out keeps it. The bound keeps the sum finite.
template <class Out>
static inline Vec damp(const Out* as, Vec x, Vec u) {
    return mul(x, reciprocal(add(set1(1.0f), exp_as(as, min(set1(88.0f), u)))));    // in this order a NaN stays one
}

// x / (1 + e^-x)
template <class Out>
static inline Vec silu(const Out* as, Vec x) {
    return damp(as, x, sub(zero(), x));
}

// GELU in its tanh form, 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + e^-2u).
template <class Out>
static inline Vec gelu_tanh(const Out* as, Vec x) {
    const Vec cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    return damp(as, x, mul(cubic, set1(-2.0f * 0.7978845608f)));
}

template <class Out>
static inline Vec activate(const Out* as, Vec x, int activation) {
    return activation == kSilu ? silu(as, x) : gelu_tanh(as, x);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
