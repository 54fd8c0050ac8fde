#include <string.h>

#include "kernels.h"

namespace octavo {
namespace {

template <class T>
constexpr long kPair = sizeof(T) == 2 ? 2 : 1;  // values of k that lie side by side

// Where value k of a panel's column lies in the panel.
template <class T>
long offset_in_panel(long column, long k) {
    constexpr long kStep = sizeof(T) == 2 ? kTileK : 1;  // values of k in one tile
    const long tile = k / kStep * 2 + column / kHalfPanel, lane = column % kHalfPanel;
    return (tile * (kStep / kPair<T>) + k % kStep / kPair<T>) * kHalfPanel * kPair<T> + lane * kPair<T> + k % kPair<T>;
}

template <class T>
void pack(const Pack& a, long p0, long p1) {
    const Weight& w = a.weight;
    for (long p = p0; p < p1; p++) {
        T* out = static_cast<T*>(a.out) + p * w.panel_elements();
        memset(out, 0, w.panel_elements() * sizeof(T));
        for (long column = 0; column < kPanel; column++) {
            const long half = column / kHalfPanel, lane = column % kHalfPanel;
            const long row = w.paired ? p * kHalfPanel + lane : p * kPanel + column;
            if (row >= w.n) continue;
            const T* from = static_cast<const T*>(w.paired && half ? a.second : a.first) + row * w.k;
            long k = 0;
            for (; k + kPair<T> <= w.k; k += kPair<T>)
                memcpy(out + offset_in_panel<T>(column, k), from + k, kPair<T> * sizeof(T));
            if (k < w.k) out[offset_in_panel<T>(column, k)] = from[k];
        }
    }
}

template <class T>
void look_up(const Lookup& a, long i0, long i1) {
    const Weight& w = a.weight;
    for (long i = i0; i < i1; i++) {
        const T* panel = static_cast<const T*>(w.data) + a.rows[i] / kPanel * w.panel_elements();
        T* out = static_cast<T*>(a.out) + i * a.out_stride;
        for (long k = 0; k < w.k; k++) out[k] = panel[offset_in_panel<T>(a.rows[i] % kPanel, k)];
    }
}

}  // namespace

void look_up_rows(const Lookup& a, long i0, long i1) {
    if (a.weight.dtype == kQuantised) look_up_quantised(a, i0, i1);
    else if (a.weight.dtype == kFloat32) look_up<float>(a, i0, i1);
    else look_up<bf16>(a, i0, i1);
}

void pack_panels(const Pack& a, long p0, long p1) {
    if (a.weight.dtype == kFloat32) pack<float>(a, p0, p1);
    else pack<bf16>(a, p0, p1);
}

}  // namespace octavo
