#include <stdlib.h>

#include <new>

#include "kernels.h"

namespace octavo {
namespace {

struct Buffer {
    float* data = nullptr;
    size_t floats = 0;
    ~Buffer() { free(data); }
};

thread_local Buffer buffer;

}  // namespace

float* thread_scratch(size_t floats) {
    if (floats > buffer.floats) {
        free(buffer.data);
        buffer.floats = floats + floats / 4;
        void* data = nullptr;
        if (posix_memalign(&data, 64, buffer.floats * sizeof(float)) != 0) abort();    // as a failed new in a worker would
        buffer.data = static_cast<float*>(data);
    }
    return buffer.data;
}

}  // namespace octavo
