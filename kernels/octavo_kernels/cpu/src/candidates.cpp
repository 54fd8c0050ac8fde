// Orders of a few logits, for sampling. Apart from it, as the standard library's functions must not be compiled for one
// instruction set and then be used on another.
#include <algorithm>
#include <functional>

#include "kernels.h"

namespace octavo {

float nth_largest(float* values, long count, long n) {
    std::nth_element(values, values + n - 1, values + count, std::greater<float>());
    return values[n - 1];
}

void sort_candidates(Candidate* candidates, long count) {
    std::sort(candidates, candidates + count, [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
    });
}

}  // namespace octavo
