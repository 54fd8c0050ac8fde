#include "attention.h"

#include "attention_pairs.h"

namespace octavo {
namespace OCTAVO_ISA {

void attend(const Attention& a, const AttentionTask* tasks, long count) {
    if (a.cache.dtype == kFloat32) attend_tiles<float, VectorProducts<float>>(a, tasks, count);
#if defined(__AVX512BF16__)
    else attend_tiles<bf16, PairProducts>(a, tasks, count);
#else
    else attend_tiles<bf16, VectorProducts<bf16>>(a, tasks, count);
#endif
}

void merge(const Attention& a, const AttentionTask& task) {
    const long rows = task.tokens * (a.heads / a.kv_heads), padded_dim = a.cache.padded_dim;
    const long padded_rows = round_up(rows, kRowPad);
    float* at = thread_scratch(padded_rows * (2 + padded_dim));
    const Softmax running = carve(at, padded_rows, padded_dim);
    begin_rows(a, task, running);
    for (long chunk = task.chunk_begin; chunk < task.chunk_end; chunk++)
        merge_rows(partial_slot(a, task.partial + chunk - task.chunk_begin), running, rows, padded_dim);
    if (a.cache.dtype == kFloat32) write_rows<float>(a, task, running);
    else write_rows<bf16>(a, task, running);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
