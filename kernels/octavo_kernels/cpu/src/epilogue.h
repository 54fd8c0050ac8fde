// From the float32 sums of a panel to the output: bias or gated activation, rounding, and the ragged last panel.
#pragma once

#include "activation.h"
#include "kernels.h"

namespace octavo {
namespace OCTAVO_ISA {

template <class Out>
static inline void finish_vec(Out* out, Vec v, long columns) {
    if (columns >= kWidth) store(out, v);
    else if (columns > 0) store_some(out, v, columns);
}

template <class T>
static inline Vec bias_vec(const T* bias, long columns) {
    if (columns >= kWidth) return load(bias);
    return columns > 0 ? load_some(bias, columns) : zero();
}

// Whole vectors of a gated pair: the loop that prefill spends its time in.
template <int kActivation, class Out>
static void finish_pairs(const float* sums, Out* out, long out_stride, long rows) {
    for (long r = 0; r < rows; r++, sums += kPanel, out += out_stride)
        for (long i = 0; i < kHalfPanel; i += kWidth) {
            const Vec gate = load(sums + i);
            const Vec gated = activate(out, gate, kActivation);
            store(out + i, mul(gated, load(sums + kHalfPanel + i)));
        }
}

template <class Out>
static void finish_plain(const float* sums, Out* out, long out_stride, long rows) {
    for (long r = 0; r < rows; r++, sums += kPanel, out += out_stride)
        for (long i = 0; i < kPanel; i += kWidth) store(out + i, load(sums + i));
}

template <class Out, class T>
static void finish_rows(const Matmul& a, const float* sums, long panel, long row, long rows) {
    const long wide = a.weight.paired ? kHalfPanel : kPanel;
    const long column = panel * wide;
    const long columns = smaller(wide, a.weight.n - column);
    Out* out = static_cast<Out*>(a.out) + row * a.out_stride + column;
    if (columns == wide && !a.bias) {
        if (!a.weight.paired) return finish_plain(sums, out, a.out_stride, rows);
        if (a.activation == kSilu) return finish_pairs<kSilu>(sums, out, a.out_stride, rows);
        return finish_pairs<kGeluTanh>(sums, out, a.out_stride, rows);
    }
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + column : nullptr;
    for (long r = 0; r < rows; r++, sums += kPanel, out += a.out_stride)
        for (long i = 0; i < wide; i += kWidth) {
            Vec v = load(sums + i);
            if (a.weight.paired) v = mul(activate(out, v, a.activation), load(sums + kHalfPanel + i));
            else if (bias) v = add(v, bias_vec(bias + i, columns - i));
            finish_vec(out + i, v, columns - i);
        }
}

// sums: [rows][kPanel]. Rows `row` to `row + rows` of the output.
static inline void finish(const Matmul& a, const float* sums, long panel, long row, long rows) {
    if (a.weight.dtype == kFloat32) finish_rows<float, float>(a, sums, panel, row, rows);
    else if (a.out_dtype == kFloat32) finish_rows<float, bf16>(a, sums, panel, row, rows);
    else finish_rows<bf16, bf16>(a, sums, panel, row, rows);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
