#pragma once

#include "kernels.h"

namespace octavo {
namespace OCTAVO_ISA {

// Rows [row_begin, row_end) of the sum over ranks, added in float32 in their order and rounded once.
void sum_ranks(const Sum& a, long row_begin, long row_end);

}  // namespace OCTAVO_ISA
}  // namespace octavo
