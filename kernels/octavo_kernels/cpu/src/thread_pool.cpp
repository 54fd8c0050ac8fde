#include "thread_pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <system_error>
#include <thread>

namespace octavo {
namespace {

// A fork-join is under 1 us while workers spin and about 50 us when they sleep; the gaps inside a model step are a few
// us of Python. Past kSpins the CPU is offered to other processes at every turn; past kIdle the worker sleeps.
constexpr int kSpins = 100;
constexpr auto kIdle = std::chrono::microseconds(200);

// Written by the caller of run_tasks before `tickets`, stable until every claimed task is done.
struct Job {
    Task task;
    const void* data;
    uint32_t count;
};

Job job;
// High half: number of the job. Low half: tasks not yet claimed. The number makes a late claim of an old job fail.
alignas(64) std::atomic<uint64_t> tickets{0};
alignas(64) std::atomic<uint32_t> done{0};
alignas(64) std::atomic<uint32_t> signal{0};    // changes with every job; workers wait on it
std::atomic<int> sleepers{0};
std::atomic<int> threads_wanted{1};
std::atomic<bool> busy{false};
int workers = 0;

template <class T>
void futex(std::atomic<T>& word, int operation, int value) {
    syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
}

inline void pause() { __builtin_ia32_pause(); }

bool claim(uint32_t& index) {
    uint64_t seen = tickets.load(std::memory_order_acquire);
    while (uint32_t(seen) != 0) {
        if (tickets.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            index = job.count - uint32_t(seen);
            return true;
        }
    }
    return false;
}

void work() {
    uint32_t index;
    while (claim(index)) {
        job.task(job.data, index);
        done.fetch_add(1, std::memory_order_release);
    }
}

void sleep_until_signal_leaves(uint32_t seen) {
    sleepers.fetch_add(1);
    futex(signal, FUTEX_WAIT_PRIVATE, int(seen));
    sleepers.fetch_sub(1);
}

void wait_for_signal(uint32_t seen) {
    for (int i = 0; i < kSpins; i++) {
        if (signal.load(std::memory_order_acquire) != seen) return;
        pause();
    }
    const auto limit = std::chrono::steady_clock::now() + kIdle;
    while (std::chrono::steady_clock::now() < limit) {
        if (signal.load(std::memory_order_acquire) != seen) return;
        sched_yield();
    }
    while (signal.load(std::memory_order_acquire) == seen) sleep_until_signal_leaves(seen);
}

void worker(int id) {
    for (;;) {
        const uint32_t seen = signal.load(std::memory_order_acquire);
        const int wanted = threads_wanted.load(std::memory_order_relaxed);
        if (id < wanted) {
            work();
            wait_for_signal(seen);
        } else {    // not by the signal, or each job would wake it
            futex(threads_wanted, FUTEX_WAIT_PRIVATE, wanted);
        }
    }
}

}  // namespace

void run_tasks(long count, Task task, const void* data) {
    const bool alone = count < 2 || threads_wanted.load(std::memory_order_relaxed) < 2;
    if (alone || busy.exchange(true, std::memory_order_acquire)) {
        for (long i = 0; i < count; i++) task(data, i);
        return;
    }
    job = {task, data, uint32_t(count)};
    done.store(0, std::memory_order_relaxed);
    const uint32_t number = signal.load(std::memory_order_relaxed) + 1;
    tickets.store(uint64_t(number) << 32 | uint32_t(count));
    signal.store(number);
    if (sleepers.load() > 0) futex(signal, FUTEX_WAKE_PRIVATE, INT_MAX);
    work();
    for (int spins = 0; done.load(std::memory_order_acquire) != uint32_t(count); spins++) {
        if (spins < kSpins) pause();
        else sched_yield();
    }
    busy.store(false, std::memory_order_release);
}

void set_pool_threads(int threads) {
    threads_wanted.store(threads < 1 ? 1 : threads);
    while (workers < threads - 1) {
        try {
            std::thread(worker, workers + 1).detach();
        } catch (const std::system_error&) {    // a limit on threads: go on with those there are
            threads_wanted.store(workers + 1);
            break;
        }
        workers++;
    }
    futex(threads_wanted, FUTEX_WAKE_PRIVATE, INT_MAX);
}

int pool_threads() { return threads_wanted.load(); }

}  // namespace octavo
