// How the attention of a step is cut into tasks.
#pragma once

#include <vector>

#include "kernels.h"

namespace octavo {

// Stages of tasks: the last one attends to what each sequence has for itself, and the ones before it to the chunks that
// several contexts begin with ("shared-prefix" or "cascade" attention: Juravsky et al., arXiv 2402.05099; Ye et al., arXiv
// 2501.01005). There a task takes the queries of all sequences that read the same blocks, so that its tiles are full though
// each of them has few.
struct AttentionPlan {
    std::vector<std::vector<AttentionTask>> stages;
    std::vector<int32_t> sharing;    // for Attention::sharing
};

AttentionPlan plan_attention(const Attention& a);

// Whether the plan of one serves the other in the same step, as it does for all layers of a kind.
static inline bool planned_alike(const Attention& a, const Attention& b) {
    return a.query_start == b.query_start && a.seq_lens == b.seq_lens && a.block_tables == b.block_tables &&
           a.table_stride == b.table_stride && a.cache.block_size == b.cache.block_size && a.heads == b.heads &&
           a.kv_heads == b.kv_heads && a.window == b.window;
}

}  // namespace octavo
