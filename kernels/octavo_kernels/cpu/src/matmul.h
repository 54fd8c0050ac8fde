// Matrix product on vector registers: float32, bfloat16 pairs, or float32 activations against bfloat16 weights.
#pragma once

#include "kernels.h"

namespace octavo {
namespace OCTAVO_ISA {

void matmul(const Matmul& a, long panel_begin, long panel_end, long row_begin, long row_end);
TaskSize task_size(const Matmul& a);
// Rows of bfloat16 as float32, zero from k to out_stride.
void widen(const bf16* x, long x_stride, long k, float* out, long out_stride, long rows);

}  // namespace OCTAVO_ISA
}  // namespace octavo
