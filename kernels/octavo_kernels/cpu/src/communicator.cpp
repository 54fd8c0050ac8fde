#include "communicator.h"

#include <sched.h>
#include <string.h>

#include <chrono>
#include <thread>

#include "operations.h"

namespace octavo {
namespace {

constexpr long kMostParts = 16;           // of a stage; communicator.py makes room for their counters
constexpr long kPartBytes = 1 << 14;      // of a rank: a few microseconds of copying and summing

// Ranks come within microseconds of each other, unless one has more threads or is held up. As in the pool, a waiting thread
// spins, then offers the CPU to others, and at last sleeps.
constexpr int kSpins = 100;
constexpr auto kAwake = std::chrono::microseconds(200);
constexpr auto kNap = std::chrono::microseconds(20);

// Until `other` has come to `count`, or the group is broken.
void wait_for(const Counter& other, uint64_t count, const std::atomic<uint8_t>& broken) {
    const auto over = [&] {
        return other.count.load(std::memory_order_acquire) >= count || broken.load(std::memory_order_relaxed);
    };
    for (int i = 0; i < kSpins; i++) {
        if (over()) return;
        __builtin_ia32_pause();
    }
    const auto limit = std::chrono::steady_clock::now() + kAwake;
    while (!over()) {
        if (std::chrono::steady_clock::now() < limit) sched_yield();
        else std::this_thread::sleep_for(kNap);
    }
}

// The rows that a rank brings.
struct Rows {
    const void* data;
    long stride, bytes;    // of a row
    long room;             // bytes of a row in a slot: as wide as the widest rank's
    long count;
};

// Brings every rank's rows together, in stages of as many rows as a slot holds. After each, take(slots, first, begin, end) is
// called for the stage's rows [begin, end): rank r's row i of the stage, which is row first + i of the call, is at
// slots + r * 2 * slot_bytes + i * room.
//
// A stage has parts, the same on all ranks whatever their threads. The thread that copies a part here waits until every rank
// has copied that part. It cannot wait for ever: threads take parts in order, so of the parts that are missing on some rank
// the first is the next that a thread there takes.
//
// Each rank has two slots, of which stages take turns, so one wait a stage is enough. A rank writes for stage k + 2 where it
// wrote for stage k. It has ended stage k + 1 by then, so the others have begun that one, so they have ended stage k: nobody
// reads there any more.
template <class Take>
void exchange(Ranks& ranks, const Rows& x, const Take& take) {
    const long most = ranks.slot_bytes / x.room;
    for (long first = 0; first < x.count; first += most, ranks.stage++) {
        const long rows = smaller(most, x.count - first);
        const long parts = smaller(smaller(rows, kMostParts), ceil_div(rows * x.room, kPartBytes));
        char* slots = ranks.slots + (ranks.stage & 1) * ranks.slot_bytes;
        const auto bring = [&](long part) {
            const long begin = rows * part / parts, end = rows * (part + 1) / parts;
            char* slot = slots + ranks.rank * 2 * ranks.slot_bytes;
            const char* data = static_cast<const char*>(x.data) + first * x.stride;
            for (long r = begin; r < end; r++) memcpy(slot + r * x.room, data + r * x.stride, x.bytes);

            std::atomic<uint64_t>& mine = ranks.arrived[ranks.rank * kMostParts + part].count;
            const uint64_t count = mine.load(std::memory_order_relaxed) + 1;
            mine.store(count, std::memory_order_release);
            for (long rank = 0; rank < ranks.world; rank++)
                wait_for(ranks.arrived[rank * kMostParts + part], count, *ranks.broken);
            take(slots, first, begin, end);
        };
        using Bring = decltype(bring);
        run_tasks(parts, [](const void* job, long part) { (*static_cast<Bring*>(job))(part); }, &bring);
    }
}

}  // namespace

void run(const AllReduce& a, long) {
    const long size = a.dtype == kFloat32 ? sizeof(float) : sizeof(bf16);
    const long stride = a.x_stride * size, rank_stride = 2 * a.ranks->slot_bytes / size;
    exchange(*a.ranks, {a.x, stride, a.n * size, a.n * size, a.tokens},
             [&a, stride, rank_stride](const char* slots, long first, long begin, long end) {
                 const Sum sum{slots, rank_stride, a.ranks->world, static_cast<char*>(a.x) + first * stride, a.x_stride,
                               a.n, a.dtype};
                 active->sum_ranks(sum, begin, end);
             });
}

void run(const Gather& a) {
    const Ranks& ranks = *a.ranks;
    const long widest = ceil_div(a.columns, ranks.world);
    const auto bytes = [&a, widest](long rank) {
        return larger(0, smaller(widest, a.columns - rank * widest)) * long(sizeof(float));
    };
    const Rows x{a.x, a.x_stride * long(sizeof(float)), bytes(ranks.rank), widest * long(sizeof(float)), a.rows};
    exchange(*a.ranks, x, [&](const char* slots, long first, long begin, long end) {
        if (ranks.rank != 0) return;
        for (long r = begin; r < end; r++)
            for (long rank = 0; rank < ranks.world; rank++)
                memcpy(a.out + (first + r) * a.out_stride + rank * widest, slots + rank * 2 * ranks.slot_bytes + r * x.room,
                       bytes(rank));
    });
}

}  // namespace octavo
