#pragma once

#include "kernels.h"

namespace octavo {
namespace OCTAVO_ISA {

// The tokens of rows [row_begin, row_end).
void sample(const Sample& a, long row_begin, long row_end);

}  // namespace OCTAVO_ISA
}  // namespace octavo
