#include <string.h>

#include "kernels.h"

namespace octavo {
namespace {

template <class T>
void pack(const Pack& a, long p0, long p1) {
    const Weight& w = a.weight;
    constexpr long kPair = sizeof(T) == 2 ? 2 : 1;             // values of k that lie side by side
    constexpr long kStep = sizeof(T) == 2 ? kTileK : 1;        // values of k in one tile
    for (long p = p0; p < p1; p++) {
        T* out = static_cast<T*>(a.out) + p * w.panel_elements();
        memset(out, 0, w.panel_elements() * sizeof(T));
        for (long column = 0; column < kPanel; column++) {
            const long half = column / kHalfPanel, lane = column % kHalfPanel;
            const long row = w.paired ? p * kHalfPanel + lane : p * kPanel + column;
            if (row >= w.n) continue;
            const T* from = static_cast<const T*>(w.paired && half ? a.second : a.first) + row * w.k;
            for (long k = 0; k < w.k; k++) {
                const long tile = k / kStep * 2 + half;
                out[(tile * (kStep / kPair) + k % kStep / kPair) * kHalfPanel * kPair + lane * kPair + k % kPair] = from[k];
            }
        }
    }
}

}  // namespace

void pack_panels(const Pack& a, long p0, long p1) {
    if (a.weight.dtype == kFloat32) pack<float>(a, p0, p1);
    else pack<bf16>(a, p0, p1);
}

}  // namespace octavo
