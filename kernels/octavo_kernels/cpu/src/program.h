// A recorded step: operations on given buffers, noted once and run again for other numbers of rows. What CUDA graphs are on
// a GPU.
#pragma once

#include <variant>
#include <vector>

#include "communicator.h"
#include "kernels.h"

namespace octavo {

using Operation = std::variant<Matmul, Norm, Rotary, WriteKV, Attention, AllReduce>;
using Program = std::vector<Operation>;

// Between the two, operations are noted instead of run.
void start_recording();
Program* end_recording();

void perform(const Operation&);
void replay(const Program&, long tokens, long sequences);

}  // namespace octavo
