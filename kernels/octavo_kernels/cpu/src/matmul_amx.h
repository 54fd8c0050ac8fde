#pragma once

#include "kernels.h"

namespace octavo {
namespace amx {

// A product of bfloat16 on AMX tiles; one of float32 on the vector registers.
void tile_matmul(const Matmul& a, long panel_begin, long panel_end, long row_begin, long row_end);
TaskSize tile_task_size(const Matmul& a);
long tile_chain_rows(const Matmul& a);

}  // namespace amx
}  // namespace octavo
