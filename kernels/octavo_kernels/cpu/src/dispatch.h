// Which instruction set this machine gets.
#pragma once

#include "kernels.h"

namespace octavo {

// The kernels of "amx", "avx512" or "avx2"; for null, of the best set that the CPU and the kernel support. Null where
// the set is not supported here.
const Kernels* choose_kernels(const char* isa);

}  // namespace octavo
