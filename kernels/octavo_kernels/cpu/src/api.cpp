// The C interface that Python calls, and the division of each operation into tasks. Pointers are raw, strides count
// elements, and nothing is checked: the caller does that once, when a model is built.
#include <string.h>

#include <atomic>
#include <vector>

#include "dispatch.h"
#include "thread_pool.h"

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

namespace octavo {
namespace {

const Kernels* active = nullptr;

constexpr long kTasksPerThread = 4;      // so that a thread that is held up leaves the rest to others
constexpr long kMatmulRows = 256;        // rows of one matmul task,
constexpr long kWideValues = 1 << 16;    // or as many as hold so many values of float32 x: what stays in the L2 cache
constexpr long kElementsPerTask = 1 << 15;    // of element-wise work: some microseconds
constexpr long kAttentionRows = 96;    // query rows (tokens times heads a KV head) of one attention task
constexpr size_t kPartialFloats = size_t(16) << 20;    // partial results of attention kept at once

thread_local std::vector<float> wide;        // x as float32
thread_local std::vector<bf16> narrow;       // x with k rounded up
thread_local std::vector<float> partials;
thread_local std::vector<AttentionTask> tasks;

// body(begin, end) over [0, count), in pieces of at least `grain`.
template <class Body>
void parallel(long count, long grain, const Body& body) {
    const long pieces = smaller(ceil_div(count, larger(grain, 1)), pool_threads() * kTasksPerThread);
    if (pieces <= 1) return body(0, count);
    struct Job {
        const Body& body;
        long count, pieces;
    } job{body, count, pieces};
    run_tasks(
        pieces,
        [](const void* data, long i) {
            const Job& j = *static_cast<const Job*>(data);
            j.body(j.count * i / j.pieces, j.count * (i + 1) / j.pieces);
        },
        &job);
}

// Bring x into the form that the kernel wants.
void prepare_x(Matmul& a) {
    a.x_form = active->x_form(a);
    const long k = a.weight.k, whole = round_up(k, kTileK), m = a.m, stride = a.x_stride;
    const bf16* x = static_cast<const bf16*>(a.x);
    if (a.x_form == kWide) {
        if (long(wide.size()) < m * whole) wide.resize(m * whole);
        float* out = wide.data();
        parallel(m, kElementsPerTask / whole, [=](long r0, long r1) {
            active->widen(x + r0 * stride, stride, k, out + r0 * whole, whole, r1 - r0);
        });
        a.x = out;
        a.x_stride = whole;
    } else if (a.weight.dtype == kBFloat16 && k != whole) {
        narrow.assign(m * whole, bf16{0});
        for (long r = 0; r < m; r++) memcpy(&narrow[r * whole], x + r * stride, k * sizeof(bf16));
        a.x = narrow.data();
        a.x_stride = whole;
    }
}

// A cache is [blocks][kv_heads][block_size][token_elements], the page of one head filling the last two.
CacheLayout layout_of(void* data, long kv_heads, long block_size, long token_elements, long dim, int dtype) {
    const long head_stride = block_size * token_elements;
    return {data, kv_heads * head_stride, head_stride, block_size, dim, round_up(dim, kDimStep), dtype};
}

// Tiles of queries by KV heads; where these are too few to occupy the threads, also pieces of the context.
void plan_attention(const Attention& a, long sequences, std::vector<AttentionTask>& plan) {
    plan.clear();
    for (long s = 0; s < sequences; s++) {
        const long length = a.query_start[s + 1] - a.query_start[s];
        for (long first = 0; first < length; first += a.tile_tokens)
            for (long head = 0; head < a.kv_heads; head++) {
                AttentionTask task{int32_t(s), int32_t(head), int32_t(first),
                                   int32_t(smaller(a.tile_tokens, length - first)), 0, 0, -1};
                chunk_range(a, task);
                plan.push_back(task);
            }
    }
}

void attend_tasks(const Attention& a, const std::vector<AttentionTask>& plan) {
    struct Job {
        const Attention& attention;
        const AttentionTask* tasks;
    } job{a, plan.data()};
    run_tasks(
        long(plan.size()),
        [](const void* data, long i) {
            const Job& j = *static_cast<const Job*>(data);
            active->attend(j.attention, j.tasks[i]);
        },
        &job);
}

// In rounds, so that what the chunks of long contexts leave behind stays within bounds.
void attend_split(Attention& a, const std::vector<AttentionTask>& whole) {
    const size_t slot = round_up(a.tile_tokens * (a.heads / a.kv_heads), 16) * (2 + a.cache.padded_dim);
    std::vector<AttentionTask> merged, pieces;
    for (size_t next = 0; next < whole.size(); merged.clear(), pieces.clear()) {
        while (next < whole.size()) {
            AttentionTask task = whole[next];
            const size_t chunks = task.chunk_end - task.chunk_begin;
            if (!merged.empty() && (pieces.size() + chunks) * slot > kPartialFloats) break;
            task.partial = int32_t(pieces.size());
            for (int32_t chunk = task.chunk_begin; chunk < task.chunk_end; chunk++) {
                AttentionTask piece = task;
                piece.partial = int32_t(pieces.size());
                piece.chunk_begin = chunk;
                piece.chunk_end = chunk + 1;
                pieces.push_back(piece);
            }
            merged.push_back(task);
            next++;
        }
        if (partials.size() < pieces.size() * slot) partials.resize(pieces.size() * slot);
        a.partials = partials.data();
        attend_tasks(a, pieces);
        for (const AttentionTask& task : merged) active->merge(a, task);
    }
}

void norm_rows(const Norm& a, long rows) {
    parallel(rows, kElementsPerTask / a.dim, [&a](long r0, long r1) { active->norm(a, r0, r1); });
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// Changes with the functions below, so that Python does not call into a library that was built from other sources.
OCTAVO_API int octavo_interface() { return 2; }

// Choose the instruction set: by name, or the best for null. Returns its name, null where it is not supported.
OCTAVO_API const char* octavo_start(const char* isa) {
    const Kernels* chosen = choose_kernels(isa);
    if (!chosen) return nullptr;
    active = chosen;
    return active->name;
}

OCTAVO_API void octavo_set_threads(int threads) { set_pool_threads(threads); }

OCTAVO_API long octavo_packed_bytes(const Weight* w) {
    return w->panels() * w->panel_elements() * (w->dtype == kFloat32 ? 4 : 2);
}

OCTAVO_API void octavo_pack(const Weight* w, const void* first, const void* second) {
    const Pack a{first, second, const_cast<void*>(w->data), *w};
    parallel(w->panels(), kElementsPerTask / w->panel_elements(), [&a](long p0, long p1) { pack_panels(a, p0, p1); });
}

OCTAVO_API void octavo_lookup(const Weight* w, const int64_t* rows, long count, void* out, long out_stride) {
    const Lookup a{*w, rows, out, out_stride};
    parallel(count, kElementsPerTask / w->k, [&a](long i0, long i1) { look_up_rows(a, i0, i1); });
}

OCTAVO_API void octavo_matmul(const void* x, long x_stride, long m, const Weight* w, const void* bias, int activation,
                              void* out, long out_stride, int out_dtype) {
    Matmul a{x, x_stride, kRows, m, *w, bias, activation, out, out_stride, out_dtype};
    prepare_x(a);
    const bool wide_x = a.x_form == kWide || w->dtype == kFloat32;
    const long most = wide_x ? larger(1, kWideValues / w->k) : kMatmulRows;
    const long blocks = ceil_div(m, most), rows = ceil_div(m, blocks), panels = w->panels();
    const long wanted = ceil_div(pool_threads() * kTasksPerThread, blocks);
    const long pieces = smaller(panels, wanted);
    struct Job {
        const Matmul& a;
        long rows, panels, pieces;
    } job{a, rows, panels, pieces};
    run_tasks(
        blocks * pieces,
        [](const void* data, long i) {
            const Job& j = *static_cast<const Job*>(data);
            const long piece = i % j.pieces, row = i / j.pieces * j.rows;
            active->matmul(j.a, j.panels * piece / j.pieces, j.panels * (piece + 1) / j.pieces, row,
                           smaller(row + j.rows, j.a.m));
        },
        &job);
}

OCTAVO_API void octavo_rms_norm(const void* x, long x_token, long x_head, const void* weight, void* out, long out_token,
                                long out_head, long tokens, long heads, long dim, float eps, int dtype) {
    const Norm a{x, nullptr, weight, out, heads, dim, x_token, x_head, 0, out_token, out_head, eps, dtype};
    norm_rows(a, tokens * heads);
}

OCTAVO_API void octavo_add_rms_norm(const void* x, long x_token, void* residual, long residual_token, const void* weight,
                                    void* out, long out_token, long tokens, long dim, float eps, int dtype) {
    const Norm a{x, residual, weight, out, 1, dim, x_token, 0, residual_token, out_token, 0, eps, dtype};
    norm_rows(a, tokens);
}

OCTAVO_API void octavo_rotary(void* q, long q_token, long q_head, long heads, void* k, long k_token, long k_head,
                              long kv_heads, long dim, const float* cos, const float* sin, const int64_t* positions,
                              long tokens, int dtype) {
    const Rotary a{q, k, q_token, q_head, k_token, k_head, heads, kv_heads, dim, cos, sin, positions, dtype};
    parallel(tokens, kElementsPerTask / ((heads + kv_heads) * dim), [&a](long t0, long t1) { active->rotary(a, t0, t1); });
}

OCTAVO_API void octavo_write_kv(const void* k, long k_token, long k_head, const void* v, long v_token, long v_head,
                                long kv_heads, long tokens, long dim, void* cache, long block_size, long token_elements,
                                const int64_t* slots, int dtype) {
    const CacheLayout layout = layout_of(cache, kv_heads, block_size, token_elements, dim, dtype);
    const WriteKV a{layout, k, v, k_token, k_head, v_token, v_head, kv_heads, slots};
    parallel(tokens, kElementsPerTask / (2 * kv_heads * dim), [&a](long t0, long t1) { active->write_kv(a, t0, t1); });
}

OCTAVO_API void octavo_attention(const void* q, long q_token, long q_head, void* out, long out_token, long out_head,
                                 void* cache, long block_size, long token_elements, const int32_t* query_start,
                                 const int32_t* seq_lens, const int32_t* block_tables, long table_stride,
                                 long sequences, long heads, long kv_heads, long dim, float scale, long window,
                                 float softcap, int dtype) {
    const CacheLayout layout = layout_of(cache, kv_heads, block_size, token_elements, dim, dtype);
    long longest = 1;    // of the queries: a decode step's tiles, and its partial results, are of one token
    for (long s = 0; s < sequences; s++) longest = larger(longest, query_start[s + 1] - query_start[s]);
    const long tile_tokens = larger(1, smaller(longest, kAttentionRows / (heads / kv_heads)));
    Attention a{q, out, q_token, q_head, out_token, out_head, layout, query_start, seq_lens, block_tables, table_stride,
                heads, kv_heads, scale, window, softcap, tile_tokens, nullptr};
    plan_attention(a, sequences, tasks);
    const long threads = pool_threads();
    if (threads > 1 && long(tasks.size()) < threads * kTasksPerThread) attend_split(a, tasks);
    else attend_tasks(a, tasks);
}

// Read `bytes` bytes with every thread, for benchmarks: the limit of what a memory-bound product can reach. The checksum
// keeps the reads.
OCTAVO_API uint64_t octavo_read(const void* data, long bytes) {
    static std::atomic<uint64_t> checksum;
    checksum = 0;
    parallel(bytes / 64, 1 << 12, [data](long l0, long l1) {
        const uint64_t* p = static_cast<const uint64_t*>(data) + l0 * 8;
        const uint64_t* end = static_cast<const uint64_t*>(data) + l1 * 8;
        uint64_t sum[8] = {};
        for (; p < end; p += 8) {
            __builtin_prefetch(p + 256);
            for (int i = 0; i < 8; i++) sum[i] ^= p[i];
        }
        for (int i = 1; i < 8; i++) sum[0] ^= sum[i];
        checksum ^= sum[0];
    });
    return checksum;
}
