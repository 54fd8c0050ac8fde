// How fast this instruction set multiplies when nothing but the multiplying units holds it up.
#pragma once

#include "kernels.h"

namespace octavo {
namespace OCTAVO_ISA {

// Multiply and add in registers `steps` times, by the instructions for a dtype. Returns the number of floating-point operations.
long multiply_registers(int dtype, long steps);

}  // namespace OCTAVO_ISA
}  // namespace octavo
