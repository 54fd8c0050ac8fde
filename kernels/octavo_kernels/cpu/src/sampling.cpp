// From logits to tokens, a row at a time, without sorting the vocabulary. A token's weight is e^((logit - largest) /
// temperature); one is drawn by inverting the cumulative weights of those kept, in the order of the vocabulary.
#include "sampling.h"

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr long kLanes = 16;                 // partial sums of a part: as many in every instruction set, so draws are equal
constexpr long kVecs = kLanes / kWidth;
constexpr long kPart = 256;                 // tokens whose weights are added in float32; sums of parts are added in double
constexpr long kGroupsPerKept = 4;          // groups of logits for each one that top-k keeps, so that few others are looked at
constexpr int kRounds = 2, kHalvings = 4;   // of the range where top-p ends: over all weights, then over those within
constexpr float kInfinity = __builtin_inff();

// Memory for one row of n logits: `size` is n up to whole parts, zero or -infinity past n.
struct Scratch {
    long size;
    float* weights;
    double* sums;             // of each part's weights
    float* border_weights;    // of tokens about where top-p ends,
    int32_t* border_places;
    Candidate* candidates;
    float* logits;            // that top-k keeps
    int32_t* tokens;
    float* unordered;

    explicit Scratch(long n) : size(round_up(n, kPart)) {
        float* next = thread_scratch(9 * size);
        const auto take = [&next, this](long count) {
            float* taken = next;
            next += count * size;
            return taken;
        };
        weights = take(1);
        sums = reinterpret_cast<double*>(take(1));
        border_weights = take(1);
        border_places = reinterpret_cast<int32_t*>(take(1));
        candidates = reinterpret_cast<Candidate*>(take(2));
        logits = take(1);
        tokens = reinterpret_cast<int32_t*>(take(1));
        unordered = take(1);
    }
};

// body(part, first) for each kPart of n logits, the last filled up with -infinity.
template <class Body>
void each_part(const float* x, long n, const Body& body) {
    long first = 0;
    for (; first + kPart <= n; first += kPart) body(x + first, first);
    if (first == n) return;
    alignas(64) float last[kPart];
    for (long i = 0; i < kPart; i++) last[i] = first + i < n ? x[first + i] : -kInfinity;
    body(last, first);
}

// The first token of the largest logit, which comes out in `peak`; -1 where that is not finite, or any is not a number.
long find_best(const float* x, long n, float& peak) {
    long part = 0;
    uint32_t broken = 0;
    peak = -kInfinity;
    each_part(x, n, [&](const float* p, long first) {
        Vec most = set1(-kInfinity);
        for (long i = 0; i < kPart; i += kWidth) {
            const Vec v = load(p + i);
            broken |= unequal(v, v);
            most = max(most, v);
        }
        const float here = largest(most);
        if (here > peak) peak = here, part = first;
    });
    if (broken || peak == kInfinity || peak == -kInfinity) return -1;
    while (x[part] != peak) part++;
    return part;
}

void weigh(const float* x, long n, float peak, float inverse_temperature, float* weights) {
    const Vec zero_at = set1(peak), factor = set1(inverse_temperature);
    each_part(x, n, [=](const float* p, long first) {
        for (long i = 0; i < kPart; i += kWidth)
            store(weights + first + i, exp(mul(sub(load(p + i), zero_at), factor)));
    });
}

// The sum of the weights that are at least `least`, and each part's.
double add_up(const float* weights, long size, float least, double* sums) {
    const Vec bound = set1(least);
    double total = 0;
    for (long first = 0; first < size; first += kPart) {
        Vec lanes[kVecs];
        for (Vec& lane : lanes) lane = zero();
        for (long i = first; i < first + kPart; i += kLanes)
            for (long j = 0; j < kVecs; j++) lanes[j] = add(lanes[j], if_at_least(load(weights + i + j * kWidth), bound));
        const double part = sum(kVecs == 1 ? lanes[0] : add(lanes[0], lanes[kVecs - 1]));
        sums[first / kPart] = part;
        total += part;
    }
    return total;
}

// Keep the weights in [low, high) and their places (null: all in turn). Returns their number, up to whole parts zeros follow.
long narrow(const float* weights, const int32_t* places, long count, float low, float high, Scratch& s) {
    const Vec from = set1(low), to = set1(high);
    long kept = 0;
    for (long i = 0; i < round_up(count, kPart); i += kWidth) {
        const Vec v = load(weights + i);
        for (uint32_t bits = at_least(v, from) & ~at_least(v, to); bits; bits &= bits - 1) {
            const long place = i + __builtin_ctz(bits);
            s.border_weights[kept] = weights[place];
            s.border_places[kept++] = places ? places[place] : int32_t(place);
        }
    }
    for (long i = kept; i < round_up(kept, kPart); i++) s.border_weights[i] = 0;
    return kept;
}

// Keep the most likely tokens, equal ones by place, until they hold `target`; all others weigh less than `low`, or come out
// with weight zero. Returns `low`. Those that weigh at least the `low` given hold `target`.
float keep_mass(const float* x, long n, double target, float low, Scratch& s) {
    const float* weights = s.weights;
    const int32_t* places = nullptr;
    float high = 1.0f + __FLT_EPSILON__;
    double above = 0;    // mass of what weighs at least `high`: less than `target`
    for (int round = 0; round < kRounds; round++) {
        const double outside = above;
        for (int i = 0; i < kHalvings; i++) {
            const float middle = __builtin_sqrtf(low * high);
            const double mass = outside + add_up(weights, round_up(n, kPart), middle, s.sums);
            if (mass < target) high = middle, above = mass;
            else low = middle;
        }
        n = narrow(weights, places, n, low, high, s);
        weights = s.border_weights;
        places = s.border_places;
    }
    for (long i = 0; i < n; i++) s.candidates[i] = {x[places[i]], places[i]};
    sort_candidates(s.candidates, n);
    long kept = 0;
    while (kept < n && (kept == 0 || above < target)) above += s.weights[s.candidates[kept++].token];
    for (; kept < n; kept++) s.weights[s.candidates[kept].token] = 0;
    return low;
}

// The first place where the sum of the weights from `least` on exceeds `target`; the last of any weight if none does.
long find_sum(const Scratch& s, long n, float least, double target) {
    double before = 0;
    long part = 0, last = 0;
    for (long p = 0; p < ceil_div(n, kPart); p++) {
        if (s.sums[p] <= 0) continue;
        part = p;
        if (before + s.sums[p] > target) break;
        before += s.sums[p];
    }
    for (long i = part * kPart; i < smaller(n, (part + 1) * kPart); i++) {
        const float weight = s.weights[i];
        if (weight < least || weight <= 0) continue;
        last = i;
        before += weight;
        if (before > target) break;
    }
    return last;
}

// The k largest logits and their tokens, in the order of the vocabulary; of equal ones the first.
void keep_largest(const float* x, long n, long k, Scratch& s) {
    // The k-th largest of the maxima of disjoint groups is at most the k-th largest of all.
    float bound = -kInfinity;
    const long parts = s.size / kPart, parts_per_group = larger(1, parts * kLanes / (kGroupsPerKept * k));
    const long groups = ceil_div(parts, parts_per_group) * kLanes;
    if (k <= groups) {
        for (long i = 0; i < groups; i++) s.unordered[i] = -kInfinity;
        each_part(x, n, [&](const float* p, long first) {
            float* maxima = s.unordered + first / kPart / parts_per_group * kLanes;
            for (long j = 0; j < kLanes; j += kWidth) {
                Vec most = load(maxima + j);
                for (long i = j; i < kPart; i += kLanes) most = max(most, load(p + i));
                store(maxima + j, most);
            }
        });
        bound = nth_largest(s.unordered, groups, k);
    }
    long count = 0;
    each_part(x, n, [&](const float* p, long first) {
        for (long i = 0; i < kPart; i += kWidth)
            for (uint32_t bits = at_least(load(p + i), set1(bound)); bits; bits &= bits - 1) {
                const long j = i + __builtin_ctz(bits);
                s.logits[count] = p[j];
                s.tokens[count++] = int32_t(first + j);
            }
    });
    while (s.tokens[count - 1] >= n) count--;
    for (long i = 0; i < count; i++) s.unordered[i] = s.logits[i];
    const float least = nth_largest(s.unordered, count, k);
    long equals = k, kept = 0;
    for (long i = 0; i < count; i++) equals -= s.logits[i] > least;
    for (long i = 0; i < count; i++) {
        if (s.logits[i] < least || (s.logits[i] == least && equals-- <= 0)) continue;
        s.logits[kept] = s.logits[i];
        s.tokens[kept++] = s.tokens[i];
    }
}

long draw(const float* x, long n, float peak, const Draw& d) {
    Scratch s(n);
    const bool fewer = d.top_k > 0 && d.top_k < double(n);
    if (fewer) {
        keep_largest(x, n, long(d.top_k), s);
        x = s.logits;
        n = long(d.top_k);
    }
    weigh(x, n, peak, float(1.0 / d.temperature), s.weights);
    const long size = round_up(n, kPart);
    float least = float(d.min_p);
    double total = add_up(s.weights, size, least, s.sums);
    if (d.top_p < 1.0) {
        // Whatever weighs less than this is, all together, less than top-p leaves out.
        const float smallest = float((1.0 - d.top_p) * total / double(n));
        least = keep_mass(x, n, d.top_p * total, smallest > least ? smallest : least, s);
        total = add_up(s.weights, size, least, s.sums);
    }
    const long place = find_sum(s, n, least, d.number * total);
    return fewer ? s.tokens[place] : place;
}

}  // namespace

void sample(const Sample& a, long r0, long r1) {
    for (long r = r0; r < r1; r++) {
        const float* x = a.logits + r * a.row_stride;
        float peak;
        const long best = find_best(x, a.vocabulary, peak);
        const bool greedy = best < 0 || !a.draws || a.draws[r].temperature == 0;
        a.tokens[r] = greedy ? best : draw(x, a.vocabulary, peak, a.draws[r]);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
