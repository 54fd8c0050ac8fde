#include "operations.h"

#include <string.h>

#include <vector>

namespace octavo {

const Kernels* active = nullptr;

namespace {

constexpr long kRunsPerThread = 8;    // of attention tasks: they differ more in their time
constexpr long kScatteredPerTask = 1 << 11;    // numbers to write; those of a key go to a cache line each, or two to one
constexpr size_t kPartialFloats = size_t(16) << 20;    // partial results of attention kept at once

thread_local std::vector<float> wide;        // x as float32
thread_local std::vector<bf16> narrow;       // x with k rounded up
thread_local std::vector<QuantGroup> groups;    // x quantised
thread_local std::vector<float> partials;
thread_local std::vector<float> prefixes;
thread_local std::vector<long> run_starts;    // in the tasks, and their end

// Bring x into the form that the kernel wants.
void prepare_x(Matmul& a, long threads) {
    a.x_form = active->x_form(a);
    const long k = a.weight.k, whole = round_up(k, kTileK), m = a.m, stride = a.x_stride;
    const bf16* x = static_cast<const bf16*>(a.x);
    if (a.x_form == kWide) {
        if (long(wide.size()) < m * whole) wide.resize(m * whole);
        float* out = wide.data();
        parallel(m, kElementsPerTask / whole, threads, [=](long r0, long r1) {
            active->widen(x + r0 * stride, stride, k, out + r0 * whole, whole, r1 - r0);
        });
        a.x = out;
        a.x_stride = whole;
    } else if (a.x_form == kGroups) {
        const long row_groups = k / kQuantGroup;
        if (long(groups.size()) < m * row_groups) groups.resize(m * row_groups);
        QuantGroup* out = groups.data();
        parallel(m, kElementsPerTask / k, threads,
                 [&a, out, row_groups](long r0, long r1) { active->quantise(a, out + r0 * row_groups, r0, r1); });
        a.x = out;
    } else if (a.weight.dtype == kBFloat16 && k != whole) {
        narrow.assign(m * whole, bf16{0});
        for (long r = 0; r < m; r++) memcpy(&narrow[r * whole], x + r * stride, k * sizeof(bf16));
        a.x = narrow.data();
        a.x_stride = whole;
    }
}

// In runs of about equal work, since a task asks for the first keys of the one that follows it in its run.
void attend_tasks(const Attention& a, const std::vector<AttentionTask>& plan, long threads) {
    const auto work = [&a](const AttentionTask& task) {
        const long rows = task.tokens * (a.heads / a.kv_heads);
        return (task.chunk_end - task.chunk_begin) * ceil_div(rows, 16);    // by tiles of rows
    };
    long total = 0, run = 0;
    for (const AttentionTask& task : plan) total += work(task);
    const long share = ceil_div(total, threads * kRunsPerThread);
    run_starts.clear();
    for (size_t i = 0; i < plan.size(); i++) {
        if (run_starts.empty() || run + work(plan[i]) > share) {
            run_starts.push_back(long(i));
            run = 0;
        }
        run += work(plan[i]);
    }
    run_starts.push_back(long(plan.size()));
    struct Job {
        const Attention& attention;
        const AttentionTask* tasks;
        const long* starts;
    } job{a, plan.data(), run_starts.data()};
    run_tasks(
        long(run_starts.size()) - 1,
        [](const void* data, long i) {
            const Job& j = *static_cast<const Job*>(data);
            active->attend(j.attention, j.tasks + j.starts[i], j.starts[i + 1] - j.starts[i]);
        },
        &job);
}

// Where tasks are too few to occupy the threads: also cut by their context. In rounds, so that what the chunks of long contexts
// leave behind stays within bounds. A piece is a run of chunks, as each asks for the keys of the next one ahead.
void attend_split(Attention& a, const std::vector<AttentionTask>& whole, long threads) {
    a.tile_tokens = 1;    // so many have room in a slot
    for (const AttentionTask& task : whole) a.tile_tokens = larger(a.tile_tokens, task.tokens);
    const size_t slot = round_up(a.tile_tokens * (a.heads / a.kv_heads), 16) * (2 + a.cache.padded_dim);
    std::vector<AttentionTask> merged, pieces;
    long total = 0;
    for (const AttentionTask& task : whole) total += task.chunk_end - task.chunk_begin;
    const int32_t run = int32_t(ceil_div(total, threads * kTasksPerThread));
    for (size_t next = 0; next < whole.size(); merged.clear(), pieces.clear()) {
        size_t slots = 0;
        while (next < whole.size()) {
            AttentionTask task = whole[next];
            const size_t chunks = task.chunk_end - task.chunk_begin;
            if (!merged.empty() && (slots + chunks) * slot > kPartialFloats) break;
            task.partial = int32_t(slots);
            for (int32_t chunk = task.chunk_begin; chunk < task.chunk_end; chunk += run) {
                AttentionTask piece = task;
                piece.partial += chunk - task.chunk_begin;
                piece.chunk_begin = chunk;
                piece.chunk_end = int32_t(smaller(chunk + run, task.chunk_end));
                pieces.push_back(piece);
            }
            merged.push_back(task);
            slots += chunks;
            next++;
        }
        if (partials.size() < slots * slot) partials.resize(slots * slot);
        a.partials = partials.data();
        attend_tasks(a, pieces, threads);
        parallel(long(merged.size()), 1, threads, [&](long i0, long i1) {
            for (long i = i0; i < i1; i++) active->merge(a, merged[i]);
        });
    }
}

// Tasks for all threads, about kTasksPerThread for each, such that the thread with the most panels has the fewest.
long even_pieces(long panels, long threads) {
    const auto most = [=](long turns) { return turns * ceil_div(panels, turns * threads); };
    long best = kTasksPerThread;
    for (long turns = kTasksPerThread - 1; turns <= 2 * kTasksPerThread; turns++)
        if (most(turns) < most(best)) best = turns;
    return best * threads;
}

}  // namespace

void run(Matmul a, long threads) {
    prepare_x(a, threads);
    const auto product = a.x_form == kGroups ? active->quantised_matmul : active->matmul;
    const TaskSize size = active->task_size(a);
    const long rows = size.rows, blocks = ceil_div(a.m, rows), panels = a.weight.panels();
    const long wanted = blocks == 1 ? even_pieces(panels, threads) : ceil_div(threads * kTasksPerThread, blocks);
    const long most = larger(1, panels / size.least_panels), least = ceil_div(panels, size.most_panels);
    const long pieces = larger(least, smaller(most, wanted));
    a.next_panels = panels * threads / pieces;
    struct Job {
        const Matmul& a;
        long rows, panels, pieces;
        decltype(active->matmul) product;
    } job{a, rows, panels, pieces, product};
    run_tasks(
        blocks * pieces,
        [](const void* data, long i) {
            const Job& j = *static_cast<const Job*>(data);
            const long piece = i % j.pieces, row = i / j.pieces * j.rows;
            j.product(j.a, j.panels * piece / j.pieces, j.panels * (piece + 1) / j.pieces, row,
                      smaller(row + j.rows, j.a.m));
        },
        &job);
}

void run(const Norm& a, long threads) {
    parallel(a.tokens * a.heads, kElementsPerTask / a.dim, threads, [&a](long r0, long r1) { active->norm(a, r0, r1); });
}

void run(const Rotary& a, long threads) {
    const long size = (a.heads + a.kv_heads) * a.dim;
    parallel(a.tokens, kElementsPerTask / size, threads, [&a](long t0, long t1) { active->rotary(a, t0, t1); });
}

void run(const WriteKV& a, long threads) {
    const long size = 2 * a.kv_heads * a.cache.dim;
    parallel(a.tokens, kScatteredPerTask / size, threads, [&a](long t0, long t1) { active->write_kv(a, t0, t1); });
}

void run(const Attention& a, long threads) { run(a, plan_attention(a), threads); }

void run(Attention a, const AttentionPlan& plan, long threads) {
    a.sharing = plan.sharing.data();
    a.places = long(plan.sharing.size());
    if (plan.stages.size() > 1) {
        const size_t floats = a.places * a.heads * (2 + a.cache.padded_dim);
        if (prefixes.size() < floats) prefixes.resize(floats);
        a.prefixes = prefixes.data();
    }
    for (const std::vector<AttentionTask>& stage : plan.stages) {
        if (threads > 1 && long(stage.size()) < threads * kTasksPerThread) attend_split(a, stage, threads);
        else attend_tasks(a, stage, threads);
    }
}

}  // namespace octavo
