// The C interface that Python calls. Pointers are raw, strides count elements, and nothing is checked: the caller does
// that once, when a model is built.
#include <atomic>

#include "communicator.h"
#include "dispatch.h"
#include "operations.h"
#include "program.h"

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

namespace octavo {
namespace {

// A cache is [blocks][kv_heads][block_size][token_elements], the page of one head filling the last two.
CacheLayout layout_of(void* data, long kv_heads, long block_size, long token_elements, long dim, int dtype,
                      int stored) {
    const long head_stride = block_size * token_elements;
    return {data, kv_heads * head_stride, head_stride, block_size, dim, round_up(dim, kDimStep), dtype, stored};
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// Changes with the functions below, so that Python does not call into a library that was built from other sources.
OCTAVO_API int octavo_interface() { return 8; }

// Choose the instruction set: by name, or the best for null. Returns its name, null where it is not supported.
OCTAVO_API const char* octavo_start(const char* isa) {
    const Kernels* chosen = choose_kernels(isa);
    if (!chosen) return nullptr;
    active = chosen;
    return active->name;
}

OCTAVO_API void octavo_set_threads(int threads) { set_pool_threads(threads); }

OCTAVO_API long octavo_packed_bytes(const Weight* w) { return w->panels() * w->panel_bytes(); }

OCTAVO_API void octavo_pack(const Weight* w, const void* first, const void* second) {
    const Pack a{first, second, const_cast<void*>(w->data), *w};
    parallel(w->panels(), kElementsPerTask / w->panel_elements(), [&a](long p0, long p1) { pack_panels(a, p0, p1); });
}

// values, scales and minima of first, then of second (in a pair): see Quants.
OCTAVO_API void octavo_pack_quantised(const Weight* w, const Quants* first, const Quants* second) {
    const PackQuantised a{*first, *second, const_cast<void*>(w->data), *w};
    parallel(w->panels(), 1, [&a](long p0, long p1) { pack_quantised(a, p0, p1); });
}

OCTAVO_API void octavo_lookup(const Weight* w, const int64_t* rows, long count, void* out, long out_stride) {
    const Lookup a{*w, rows, out, out_stride};
    parallel(count, kElementsPerTask / w->k, [&a](long i0, long i1) { look_up_rows(a, i0, i1); });
}

OCTAVO_API void octavo_matmul(const void* x, long x_stride, long m, const Weight* w, const void* bias, int activation,
                              void* out, long out_stride, int out_dtype) {
    perform(Matmul{x, x_stride, kRows, m, *w, bias, activation, out, out_stride, out_dtype});
}

OCTAVO_API void octavo_rms_norm(const void* x, long x_token, long x_head, const void* weight, void* out, long out_token,
                                long out_head, long tokens, long heads, long dim, float eps, int dtype) {
    perform(Norm{x, nullptr, weight, out, heads, dim, x_token, x_head, 0, out_token, out_head, eps, dtype, tokens});
}

OCTAVO_API void octavo_add_rms_norm(const void* x, long x_token, void* residual, long residual_token, const void* weight,
                                    void* out, long out_token, long tokens, long dim, float eps, int dtype) {
    perform(Norm{x, residual, weight, out, 1, dim, x_token, 0, residual_token, out_token, 0, eps, dtype, tokens});
}

OCTAVO_API void octavo_rotary(void* q, long q_token, long q_head, long heads, void* k, long k_token, long k_head,
                              long kv_heads, long dim, const float* cos, const float* sin, const int64_t* positions,
                              long tokens, int dtype) {
    perform(Rotary{q, k, q_token, q_head, k_token, k_head, heads, kv_heads, dim, cos, sin, positions, dtype, tokens});
}

OCTAVO_API void octavo_write_kv(const void* k, long k_token, long k_head, const void* v, long v_token, long v_head,
                                long kv_heads, long tokens, long dim, void* cache, long block_size, long token_elements,
                                const int64_t* slots, float key_factor, float value_factor, int dtype, int stored) {
    const CacheLayout layout = layout_of(cache, kv_heads, block_size, token_elements, dim, dtype, stored);
    perform(WriteKV{layout, k, v, k_token, k_head, v_token, v_head, kv_heads, key_factor, value_factor, slots, tokens});
}

OCTAVO_API void octavo_attention(const void* q, long q_token, long q_head, void* out, long out_token, long out_head,
                                 void* cache, long block_size, long token_elements, const int32_t* query_start,
                                 const int32_t* seq_lens, const int32_t* block_tables, long table_stride,
                                 long sequences, long heads, long kv_heads, long dim, float scale,
                                 float value_scale, long window, float softcap, int dtype, int stored) {
    const CacheLayout layout = layout_of(cache, kv_heads, block_size, token_elements, dim, dtype, stored);
    perform(Attention{q, out, q_token, q_head, out_token, out_head, layout, query_start, seq_lens, block_tables,
                      table_stride, heads, kv_heads, scale, value_scale, window, softcap, sequences, 0, nullptr, nullptr, 0,
                      nullptr});
}

// draws: null, or [rows] of Draw.
OCTAVO_API void octavo_sample(const float* logits, long row_stride, long rows, long vocabulary, const void* draws,
                              int64_t* tokens) {
    const Sample a{logits, row_stride, vocabulary, static_cast<const Draw*>(draws), tokens};
    parallel(rows, kElementsPerTask / vocabulary, [&a](long r0, long r1) { active->sample(a, r0, r1); });
}

OCTAVO_API void octavo_all_reduce(Ranks* ranks, void* x, long x_stride, long tokens, long n, int dtype) {
    perform(AllReduce{ranks, x, x_stride, n, dtype, tokens});
}

OCTAVO_API void octavo_gather(Ranks* ranks, const float* x, long x_stride, long rows, float* out, long out_stride,
                              long columns) {
    run(Gather{ranks, x, x_stride, out, out_stride, columns, rows});
}

OCTAVO_API void octavo_start_recording() { start_recording(); }

OCTAVO_API void* octavo_end_recording() { return end_recording(); }

OCTAVO_API void octavo_replay(const void* program, long tokens, long sequences) {
    replay(*static_cast<const Program*>(program), tokens, sequences);
}

OCTAVO_API void octavo_forget(void* program) { delete static_cast<Program*>(program); }

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

// Multiply in registers with every thread, `steps` times in each of its tasks, for benchmarks: the limit (peak) of a product
// that does not wait for memory. Returns the floating-point operations done.
OCTAVO_API long octavo_multiply(int dtype, long steps) {
    static std::atomic<long> operations;
    operations = 0;
    parallel(pool_threads() * kTasksPerThread, 1, [dtype, steps](long t0, long t1) {
        operations += active->multiply_registers(dtype, (t1 - t0) * steps);
    });
    return operations;
}
