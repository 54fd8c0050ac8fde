#pragma once

#include "kernels.h"

namespace octavo {
namespace amx {

// Attention on AMX tiles; float32 goes to the vector registers.
void tile_attend(const Attention& a, const AttentionTask* tasks, long count);

}  // namespace amx
}  // namespace octavo
