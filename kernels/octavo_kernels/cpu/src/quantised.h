// Matrix product of weights kept as integers with scales, and activations quantised to 8 bits in groups.
#pragma once

#include "kernels.h"

namespace octavo {
namespace OCTAVO_ISA {

// The rows [r0, r1) of a product's x, bfloat16, as groups: out[(r - r0) * k / kQuantGroup].
void quantise(const Matmul& a, QuantGroup* out, long r0, long r1);
void quantised_matmul(const Matmul& a, long panel_begin, long panel_end, long row_begin, long row_end);

}  // namespace OCTAVO_ISA
}  // namespace octavo
