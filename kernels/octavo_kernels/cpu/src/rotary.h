#pragma once

#include "kernels.h"

namespace octavo {
namespace OCTAVO_ISA {

void rotary(const Rotary& a, long token_begin, long token_end);

}  // namespace OCTAVO_ISA
}  // namespace octavo
