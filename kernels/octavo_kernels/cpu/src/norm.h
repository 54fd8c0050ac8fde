#pragma once

#include "kernels.h"

namespace octavo {
namespace OCTAVO_ISA {

// Rows [row_begin, row_end) of an RMS norm, a row being one head of one token.
void norm(const Norm& a, long row_begin, long row_end);

}  // namespace OCTAVO_ISA
}  // namespace octavo
