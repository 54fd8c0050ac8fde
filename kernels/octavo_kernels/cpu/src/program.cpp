#include "program.h"

#include <algorithm>
#include <utility>

#include "operations.h"

namespace octavo {
namespace {

constexpr long kChainStep = 32;          // rows that AMX products take together
constexpr long kLeastChainRows = 192;    // each thread reads all weights, which pays for so many rows

Program* recording = nullptr;

// Some rows (tokens) of the operations.
struct Rows {
    long first, count;

    void take(Matmul& a) const {
        skip(a.x, a.x_stride, a.weight.dtype);
        skip(a.out, a.out_stride, a.out_dtype);
        a.m = count;
    }
    void take(Norm& a) const {
        skip(a.x, a.x_token, a.dtype);
        if (a.residual) skip(a.residual, a.residual_token, a.dtype);
        skip(a.out, a.out_token, a.dtype);
        a.tokens = count;
    }
    void take(Rotary& a) const {
        skip(a.q, a.q_token, a.dtype);
        skip(a.k, a.k_token, a.dtype);
        a.positions += first;
        a.tokens = count;
    }
    void take(WriteKV& a) const {
        skip(a.k, a.k_token, a.cache.dtype);
        skip(a.v, a.v_token, a.cache.dtype);
        a.slots += first;
        a.tokens = count;
    }
    void take(AllReduce& a) const {
        skip(a.x, a.x_stride, a.dtype);
        a.tokens = count;
    }
    void take(Attention&) const {}

  private:
    // dtype: of the numbers, or of the weight that multiplies them.
    template <class Pointer>
    void skip(Pointer& at, long stride, int dtype) const {
        at = reinterpret_cast<Pointer>(uintptr_t(at) + first * stride * (dtype == kFloat32 ? sizeof(float) : sizeof(bf16)));
    }
};

using Steps = Program::const_iterator;

bool ends_chain(const Operation& operation) {
    return std::holds_alternative<Attention>(operation) || std::holds_alternative<AllReduce>(operation);
}

// How many rows a thread takes through all operations between those that end a chain: what one of them writes is then in the
// thread's cache when the next reads it, and threads do not wait for each other in between. 0: each operation is shared out.
long chain_rows(Steps begin, Steps end, long tokens) {
    const long threads = pool_threads();
    if (threads == 1 || tokens < threads * kLeastChainRows) return 0;
    long most = tokens;
    for (; begin != end; ++begin)
        if (const Matmul* product = std::get_if<Matmul>(&*begin)) most = smaller(most, active->chain_rows(*product));
    if (most < kLeastChainRows) return 0;
    const long blocks = round_up(ceil_div(tokens, most), threads);
    return round_up(ceil_div(tokens, blocks), kChainStep);
}

void run_rows(Steps begin, Steps end, const Rows& rows, long threads) {
    for (; begin != end; ++begin) {
        Operation operation = *begin;
        std::visit(
            [&rows, threads](auto& a) {
                rows.take(a);
                run(a, threads);
            },
            operation);
    }
}

void run_chain(Steps begin, Steps end, long tokens) {
    struct Job {
        Steps begin, end;
        long tokens, rows;
    } job{begin, end, tokens, chain_rows(begin, end, tokens)};
    if (job.rows == 0) return run_rows(begin, end, {0, tokens}, pool_threads());
    run_tasks(
        ceil_div(tokens, job.rows),
        [](const void* data, long i) {
            const Job& j = *static_cast<const Job*>(data);
            const long first = i * j.rows;
            run_rows(j.begin, j.end, {first, smaller(j.rows, j.tokens - first)}, 1);
        },
        &job);
}

}  // namespace

void start_recording() {
    delete recording;
    recording = new Program;
}

Program* end_recording() {
    Program* made = recording;
    recording = nullptr;
    return made;
}

void perform(const Operation& operation) {
    if (recording) recording->push_back(operation);
    else std::visit([](const auto& a) { run(a, pool_threads()); }, operation);
}

void replay(const Program& program, long tokens, long sequences) {
    std::vector<std::pair<const Attention*, AttentionPlan>> plans;    // of each kind of layer, such as those with a window
    for (Steps at = program.begin(); at != program.end();) {
        const Steps last = std::find_if(at, program.end(), ends_chain);
        run_chain(at, last, tokens);
        if (last == program.end()) break;
        at = last + 1;
        if (std::holds_alternative<AllReduce>(*last)) {
            run_rows(last, at, {0, tokens}, pool_threads());
            continue;
        }
        const Attention& recorded = std::get<Attention>(*last);
        Attention a = recorded;
        a.sequences = sequences;
        auto planned = std::find_if(plans.begin(), plans.end(),
                                    [&recorded](const auto& plan) { return planned_alike(*plan.first, recorded); });
        if (planned == plans.end()) planned = plans.insert(planned, {&recorded, plan_attention(a)});
        run(a, planned->second, pool_threads());
    }
}

}  // namespace octavo
