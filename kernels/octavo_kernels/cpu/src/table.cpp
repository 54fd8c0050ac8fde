// The functions of one instruction set. This file, like every operation's, is compiled once for each set.
#include "attention.h"
#include "cache.h"
#include "matmul.h"
#include "norm.h"
#include "peak.h"
#include "quantised.h"
#include "rotary.h"
#include "sampling.h"
#include "sum.h"

#if defined(__AMX_BF16__)
#include "attention_amx.h"
#include "matmul_amx.h"
#endif

#define OCTAVO_TEXT_(x) #x
#define OCTAVO_TEXT(x) OCTAVO_TEXT_(x)

namespace octavo {
namespace OCTAVO_ISA {
namespace {

XForm x_form(const Matmul& a) {
    if (a.weight.dtype == kQuantised) return kGroups;
    const bool wide = a.weight.dtype == kBFloat16 && kWidth == 8;
    return wide ? kWide : kRows;
}

#if defined(__AMX_BF16__)
const Kernels table{OCTAVO_TEXT(OCTAVO_ISA), amx::tile_matmul, x_form, amx::tile_task_size, amx::tile_chain_rows, widen,
                    quantised_matmul, quantise, norm, rotary, write_kv, amx::tile_attend, merge, sample,
                    sum_ranks, multiply_registers};
#else
long no_chain(const Matmul&) { return 0; }

const Kernels table{OCTAVO_TEXT(OCTAVO_ISA), matmul, x_form, task_size, no_chain, widen, quantised_matmul, quantise, norm,
                    rotary, write_kv, attend, merge, sample, sum_ranks, multiply_registers};
#endif

}  // namespace

const Kernels* kernels() { return &table; }

}  // namespace OCTAVO_ISA
}  // namespace octavo
