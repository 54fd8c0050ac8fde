// What an operation needs to know, and the table of functions that one instruction set offers.
#pragma once

#include "common.h"

namespace octavo {

// A weight packed by pack_panels(). float32: [panel][k][32 columns]; bfloat16: [panel][k / 32][half][k pair][16 columns][2],
// k padded with zeros to a multiple of 32. Quantised: see quantised_pack.cpp; such a weight is (value - zero) * scale +
// minimum, multiplies bfloat16, and has k in multiples of 32. Columns past n are zero.
struct Weight {
    const void* data;
    long n;        // columns of the product: rows of the weight, or of gate alone in a pair
    long k;
    int dtype;
    int paired;    // gate and up interleaved by half panels
    int bits;      // of a quantised value: 4, 5, 6 or 8
    int zero;      // the value that stands for 0 (before the minimum)
    int minima;    // whether there are any; of 4 and 5 bits only

    long panels() const { return paired ? ceil_div(n, kHalfPanel) : ceil_div(n, kPanel); }
    long panel_elements() const { return kPanel * (dtype == kBFloat16 ? round_up(k, kTileK) : k); }
    long panel_bytes() const {
        return dtype == kQuantised ? k / kQuantGroup * tile_bytes() : panel_elements() * (dtype == kFloat32 ? 4 : 2);
    }
    // Of a quantised weight: scales of a column in a tile, bytes of a tile's values, bytes of a tile.
    long scales() const { return bits == 6 ? 2 : 1; }
    long quant_bytes() const { return kPanel * kQuantGroup * bits / 8; }
    long tile_bytes() const { return quant_bytes() + kPanel * 2 * (scales() + (minima ? 1 : 0)); }
};

struct Pack {
    const void* first;     // [n, k] row-major; gate in a pair
    const void* second;    // up, in a pair
    void* out;
    Weight weight;
};

// A quantised matrix, row-major: values [n, k], float16 scales [n, k / 32 * scales()] and minima [n, k / 32] (or null).
struct Quants {
    const uint8_t* values;
    const uint16_t* scales;
    const uint16_t* minima;
};

struct PackQuantised {
    Quants first;     // gate in a pair
    Quants second;    // up, in a pair
    void* out;
    Weight weight;
};

// Rows of a packed weight that is no pair, as they were before they were packed; of a quantised one, as bfloat16.
struct Lookup {
    Weight weight;
    const int64_t* rows;
    void* out;             // [rows, k]
    long out_stride;       // elements
};

// How a kernel wants its activations. All but kRows of float32 have k padded with zeros to a multiple of 32.
enum XForm : int {
    kRows,     // [m, k] in the weight's dtype
    kWide,     // [m, k] as float32, of a bfloat16 product
    kGroups,   // [m, k / 32] as QuantGroup, of a quantised product
};

// kQuantGroup activations: values * scale.
struct QuantGroup {
    int8_t values[kQuantGroup];
    float scale;
    float sum;           // of values * scale: what a weight's minimum is multiplied by
    int32_t start[2];    // -zero times the sum of the values, or of those of each half where each has its scale
};

struct Matmul {
    const void* x;
    long x_stride;         // elements
    XForm x_form;
    long m;
    Weight weight;
    const void* bias;      // [n] in the weight's dtype, or null
    int activation;        // of gate, in a pair
    void* out;             // [m, n]
    long out_stride;
    int out_dtype;
    long next_panels;      // from the first panel of a task to that of the task that its thread is likely to take next
};

// How a product is cut into tasks.
struct TaskSize {
    long rows;
    long least_panels, most_panels;    // where there are as many
};

struct Norm {
    const void* x;         // [rows / heads, heads, dim]
    void* residual;        // null, or [rows, dim] contiguous rows: becomes x + residual, and its norm is taken
    const void* weight;
    void* out;
    long heads, dim;
    long x_token, x_head, residual_token, out_token, out_head;    // strides in elements
    float eps;
    int dtype;
    long tokens;
};

struct Rotary {
    void* q;
    void* k;
    long q_token, q_head, k_token, k_head;
    long heads, kv_heads, dim;
    const float* cos;      // [positions, dim / 2]
    const float* sin;
    const int64_t* positions;
    int dtype;
    long tokens;
};

// Where a KV head's keys and values of one block lie: keys first, then values, each in groups of 16 tokens.
// Keys: float32 [group][dim][16 tokens], bfloat16 [group][dim / 2][16][2].
// Values: float32 [group][16][dim], bfloat16 [group][8 token pairs][dim][2].
// Numbers of 8 bits lie in the order of the dtype in which they are multiplied. Behind those of int8 follow float32 scales,
// one a token: of the keys [group][16], then of the values.
struct CacheLayout {
    void* data;
    long block_stride, head_stride;    // elements
    long block_size, dim, padded_dim;
    int dtype;     // of queries, keys and values
    int stored;    // Stored: how the cache holds the last two

    long groups() const { return ceil_div(block_size, kGroup); }
    long group_elements() const { return kGroup * padded_dim; }
};

struct WriteKV {
    CacheLayout cache;
    const void* k;
    const void* v;
    long k_token, k_head, v_token, v_head;
    long kv_heads;
    float key_factor, value_factor;    // what e4m3 holds is multiplied by these
    const int64_t* slots;
    long tokens;
};

struct Attention {
    const void* q;
    void* out;
    long q_token, q_head, out_token, out_head;
    CacheLayout cache;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* block_tables;
    long table_stride;
    long heads, kv_heads;
    float scale;           // of scores
    float value_scale;     // of results
    long window;           // 0: none
    float softcap;         // 0: none
    long sequences;
    long tile_tokens;      // the most queries of a task, for which a slot of partials has room
    float* partials;       // [slot][rows up to a multiple of 16][2 + padded_dim], for tasks that are cut by their context
    const int32_t* sharing;    // [places]: rows in q of the queries whose contexts may begin with the same blocks
    long places;
    float* prefixes;       // what they made of shared blocks: maxima, sums, values, each [kv_heads][places][heads / kv_heads]
};

// Some queries, all heads of one KV head: rows = tokens * (heads / kv_heads), and the softmax blocks [chunk_begin, chunk_end)
// of their context. They are [first, first + tokens) of a sequence, or stand at [sharing, sharing + tokens) and read this
// sequence's blocks.
struct AttentionTask {
    int32_t sequence, kv_head, first, tokens, chunk_begin, chunk_end;
    int32_t partial;       // first slot of partials, one per chunk; -1: merge the chunks itself
    int32_t sharing;       // place of its first query; -1: it shares nothing
    bool prefix;           // of several contexts: what it makes is kept for the tasks that go on from there
};

// Of a task's i-th query: its row in q.
static inline long query_row(const Attention& a, const AttentionTask& task, long i) {
    return task.sharing < 0 ? a.query_start[task.sequence] + task.first + i : a.sharing[task.sharing + i];
}

// The range of softmax blocks that the queries of a task see.
static inline void chunk_range(const Attention& a, AttentionTask& task) {
    const long length = a.query_start[task.sequence + 1] - a.query_start[task.sequence];
    const long position = a.seq_lens[task.sequence] - length + task.first;
    const long begin = a.window > 0 ? larger(0, position - a.window + 1) : 0;
    task.chunk_begin = int32_t(begin / kChunk);
    task.chunk_end = int32_t(ceil_div(position + task.tokens, kChunk));
}

// How one row is drawn from, as Ops.sample says.
struct Draw {
    double temperature, top_k, top_p, min_p, number;
};

struct Sample {
    const float* logits;    // [rows, vocabulary]
    long row_stride;        // elements
    long vocabulary;
    const Draw* draws;      // [rows]; null: all are greedy
    int64_t* tokens;        // [rows]
};

struct Candidate {
    float logit;
    int32_t token;
};

// Rows of which each rank has a part, to be added up.
struct Sum {
    const void* x;         // [rows, n] of rank 0; rank r's begin r * rank_stride elements later
    long rank_stride, ranks;
    void* out;             // [rows, n]
    long out_stride, n;
    int dtype;
};

struct Kernels {
    const char* name;
    // Panels [panel_begin, panel_end) of rows [row_begin, row_end).
    void (*matmul)(const Matmul&, long panel_begin, long panel_end, long row_begin, long row_end);
    XForm (*x_form)(const Matmul&);    // that matmul wants for this product
    TaskSize (*task_size)(const Matmul&);    // for x in that form
    // The most rows of this product of which one thread may take all panels, to go on with them to the next operation. 0: none.
    long (*chain_rows)(const Matmul&);
    void (*widen)(const bf16* x, long x_stride, long k, float* out, long out_stride, long rows);
    void (*quantised_matmul)(const Matmul&, long panel_begin, long panel_end, long row_begin, long row_end);
    void (*quantise)(const Matmul&, QuantGroup* out, long row_begin, long row_end);
    void (*norm)(const Norm&, long row_begin, long row_end);
    void (*rotary)(const Rotary&, long token_begin, long token_end);
    void (*write_kv)(const WriteKV&, long token_begin, long token_end);
    void (*attend)(const Attention&, const AttentionTask* tasks, long count);
    // Merge the partial results of a split task, which covered chunks task.chunk_begin to task.chunk_end.
    void (*merge)(const Attention&, const AttentionTask&);
    void (*sample)(const Sample&, long row_begin, long row_end);
    void (*sum_ranks)(const Sum&, long row_begin, long row_end);
    long (*multiply_registers)(int dtype, long steps);    // see peak.h
};

void pack_panels(const Pack&, long panel_begin, long panel_end);
void look_up_rows(const Lookup&, long row_begin, long row_end);
void pack_quantised(const PackQuantised&, long panel_begin, long panel_end);
void look_up_quantised(const Lookup&, long row_begin, long row_end);
float nth_largest(float* values, long count, long n);    // n from 1; the values come out in another order
void sort_candidates(Candidate*, long count);            // the largest first, equal ones by token
float* thread_scratch(size_t floats);    // 64-byte aligned, kept by the calling thread until it asks for more

}  // namespace octavo
