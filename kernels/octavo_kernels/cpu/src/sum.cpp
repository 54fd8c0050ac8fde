#include "sum.h"

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

template <class T>
void sum_rows(const Sum& a, long r0, long r1) {
    for (long r = r0; r < r1; r++) {
        const T* x = static_cast<const T*>(a.x) + r * a.n;
        T* out = static_cast<T*>(a.out) + r * a.out_stride;
        long i = 0;
        for (; i + kWidth <= a.n; i += kWidth) {
            Vec total = load(x + i);
            for (long rank = 1; rank < a.ranks; rank++) total = add(total, load(x + rank * a.rank_stride + i));
            store(out + i, total);
        }
        if (const long left = a.n - i; left > 0) {
            Vec total = load_some(x + i, left);
            for (long rank = 1; rank < a.ranks; rank++) total = add(total, load_some(x + rank * a.rank_stride + i, left));
            store_some(out + i, total, left);
        }
    }
}

}  // namespace

void sum_ranks(const Sum& a, long r0, long r1) {
    if (a.dtype == kFloat32) sum_rows<float>(a, r0, r1);
    else sum_rows<bf16>(a, r0, r1);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
