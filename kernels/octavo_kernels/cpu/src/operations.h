// Each operation on the threads of the pool, by the kernels of the instruction set that was chosen.
#pragma once

#include "attention_plan.h"
#include "kernels.h"
#include "thread_pool.h"

namespace octavo {

extern const Kernels* active;

constexpr long kTasksPerThread = 4;           // so that a thread that is held up leaves the rest to others
constexpr long kElementsPerTask = 1 << 13;    // of element-wise work: a few microseconds

// body(begin, end) over [0, count), in pieces of about `grain`, as many for each thread.
template <class Body>
static void parallel(long count, long grain, long threads, const Body& body) {
    const long most = smaller(count, threads > 1 ? threads * kTasksPerThread : 1);
    const long wanted = ceil_div(count, larger(grain, 1));
    if (wanted <= 1 || most <= 1) return body(0, count);
    const long pieces = smaller(round_up(wanted, threads), most);
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

template <class Body>
static void parallel(long count, long grain, const Body& body) {
    parallel(count, grain, pool_threads(), body);
}

// On so many threads: those of the pool, or 1 inside a task.
void run(Matmul, long threads);
void run(const Norm&, long threads);
void run(const Rotary&, long threads);
void run(const WriteKV&, long threads);
void run(const Attention&, long threads);
void run(Attention, const AttentionPlan&, long threads);

}  // namespace octavo
