// What the ranks of a tensor parallel group say to each other: they are processes of one machine, and meet in memory that
// all of them have mapped.
#pragma once

#include <atomic>

#include "kernels.h"

namespace octavo {

struct alignas(64) Counter {
    std::atomic<uint64_t> count;
};

// The ranks, as one of them sees them.
struct Ranks {
    const std::atomic<uint8_t>* broken;    // not 0: nobody waits any more
    Counter* arrived;      // [world][kMostParts]: in how many stages a rank has copied this part
    char* slots;           // [world][2][slot_bytes]
    long slot_bytes;       // a multiple of 64, no less than a row
    long stage;            // stages so far, of this rank
    int rank, world;
};

// x becomes the sum of all ranks'.
struct AllReduce {
    Ranks* ranks;
    void* x;               // [tokens, n]
    long x_stride, n;
    int dtype;
    long tokens;
};

// Rank r's x becomes columns r * widest to (r + 1) * widest of rank 0's out, as far as there are so many; widest is
// ceil(columns / world).
struct Gather {
    Ranks* ranks;
    const float* x;        // [rows, its columns]
    long x_stride;
    float* out;            // [rows, columns]; of rank 0 alone
    long out_stride, columns, rows;
};

void run(const AllReduce&, long threads);    // on the pool's, whatever `threads`: ranks cut it alike
void run(const Gather&);

}  // namespace octavo
