#include "norm.h"

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// residual += x, rounded to its dtype.
template <class T>
void add_row(const T* x, T* residual, long dim) {
    long i = 0;
    for (; i + kWidth <= dim; i += kWidth) store(residual + i, add(load(residual + i), load(x + i)));
    if (i < dim) store_some(residual + i, add(load_some(residual + i, dim - i), load_some(x + i, dim - i)), dim - i);
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, long dim, float eps) {
    Vec squares[2] = {zero(), zero()};
    long i = 0;
    for (; i + 2 * kWidth <= dim; i += 2 * kWidth)
        for (int j = 0; j < 2; j++) {
            const Vec v = load(x + i + j * kWidth);
            squares[j] = fma(v, v, squares[j]);
        }
    for (; i < dim; i += kWidth) {
        const Vec v = i + kWidth <= dim ? load(x + i) : load_some(x + i, dim - i);
        squares[0] = fma(v, v, squares[0]);
    }
    const Vec scale = set1(1.0f / __builtin_sqrtf(sum(add(squares[0], squares[1])) / float(dim) + eps));
    for (i = 0; i + kWidth <= dim; i += kWidth) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
    if (i < dim) {
        const Vec v = mul(mul(load_some(x + i, dim - i), scale), load_some(weight + i, dim - i));
        store_some(out + i, v, dim - i);
    }
}

template <class T>
void norm_rows(const Norm& a, long r0, long r1) {
    const T* weight = static_cast<const T*>(a.weight);
    for (long r = r0; r < r1; r++) {
        const long token = r / a.heads, head = r % a.heads;
        const T* x = static_cast<const T*>(a.x) + token * a.x_token + head * a.x_head;
        if (a.residual) {
            T* residual = static_cast<T*>(a.residual) + token * a.residual_token;
            add_row(x, residual, a.dim);
            x = residual;
        }
        norm_row(x, weight, static_cast<T*>(a.out) + token * a.out_token + head * a.out_head, a.dim, a.eps);
    }
}

}  // namespace

void norm(const Norm& a, long r0, long r1) {
    if (a.dtype == kFloat32) norm_rows<float>(a, r0, r1);
    else norm_rows<bf16>(a, r0, r1);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
