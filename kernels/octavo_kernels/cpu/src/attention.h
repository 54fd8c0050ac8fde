// Blocked ("flash") attention over the pages of a sequence: Dao et al., arXiv 2205.14135, over vLLM's paged cache
// (arXiv 2309.06180). The context is cut at absolute multiples of kChunk; each chunk gives its own maximum, sum and
// weighted values, and chunks are merged from left to right. So a row's result is the same whichever rows share its
// tile, however long the tile is, and whether or not the context was split over threads.
//
// The two products (queries with keys, probabilities with values) are a policy: on vector registers, or on AMX tiles.
#pragma once

#include "cache.h"
#include "eight_bits.h"
#include "softmax.h"

namespace octavo {
namespace OCTAVO_ISA {

void attend(const Attention& a, const AttentionTask* tasks, long count);
void merge(const Attention& a, const AttentionTask& task);

constexpr long kChunkGroups = kChunk / kGroup;
constexpr long kRowPad = 16;    // scratch rows come in whole AMX tiles

// Running or partial result of a tile of rows: maxima [rows], sums [rows], values [rows][padded_dim].
struct Softmax {
    float* maximum;
    float* sum;
    float* values;
};

template <class T>
struct Tile {
    long rows;                 // query tokens times heads a KV head; what lies in the padding does not matter
    const T* keys[kChunkGroups];
    const T* values[kChunkGroups];
    const T* next_keys[kChunkGroups];    // of the chunk that comes next, to be asked for ahead; keys where there is none
    long groups;               // in use of the three above
    bool unasked;              // no chunk before this one has asked for its keys

    // Those of next_keys that are asked for during the softmax; the others while the values are weighed.
    long early_groups() const { return groups / 2; }

    long dim, padded_dim;
    float* queries;            // as the policy's Query type, [rows up to kRowPad][padded_dim]
    float* scores;             // [rows up to kRowPad][kChunk]
    float* probabilities;      // as the policy's Query type, same shape; may be scores
    Softmax chunk, running;
    T* spare;                  // keys and values of kChunkGroups groups, where they cannot be read in place
    uint8_t* bytes;            // room for a group of an 8-bit cache
    float *key_scales, *value_scales;    // of each token of the chunk, in int8; else null
};

static inline Softmax carve(float*& at, long rows, long padded_dim) {
    Softmax s{at, at + rows, at + 2 * rows};
    at += rows * (2 + padded_dim);
    return s;
}

// Copy the valid tokens of a group (keys and values) to `to`, zeros after them: what lies behind the end of a sequence
// may be anything, and zero times infinity is not zero.
// Stored: the type of the cache's numbers, in the order of T.
template <class T, class Stored>
void gather_group(const Attention& a, const AttentionTask& task, long token, long end, Stored* keys, Stored* values) {
    const CacheLayout& c = a.cache;
    const int32_t* table = a.block_tables + task.sequence * a.table_stride;
    for (long i = 0; i < c.group_elements(); i++) keys[i] = values[i] = Stored{};
    for (long i = 0; i < kGroup && token + i < end; i++) {
        const long block = table[(token + i) / c.block_size], offset = (token + i) % c.block_size;
        const Stored* from_keys = key_group<Stored>(c, block, task.kv_head, offset / kGroup);
        const Stored* from_values = value_group<Stored>(c, block, task.kv_head, offset / kGroup);
        for (long d = 0; d < c.dim; d++) {
            keys[key_offset<T>(i, d)] = from_keys[key_offset<T>(offset % kGroup, d)];
            values[value_offset<T>(c, i, d)] = from_values[value_offset<T>(c, offset % kGroup, d)];
        }
    }
}

// Zeros after the first `tokens` of a group's values.
template <class T>
void clear_values(const CacheLayout& c, long tokens, T* values) {
    const bool half = sizeof(T) == 2 && tokens % 2;    // of a pair
    for (long i = (tokens + half) * c.padded_dim; i < c.group_elements(); i++) values[i] = T{};
    if (half)
        for (long d = 0; d < c.padded_dim; d++) values[value_offset<T>(c, tokens, d)] = T{};
}

// The scales of a group's first `tokens`, zeros after them.
static inline void gather_scales(const Attention& a, const AttentionTask& task, long token, long tokens, float* keys,
                                 float* values) {
    const CacheLayout& c = a.cache;
    const int32_t* table = a.block_tables + task.sequence * a.table_stride;
    for (long i = 0; i < kGroup; i++) keys[i] = values[i] = 0.0f;
    const long step = c.block_size % kGroup == 0 ? tokens : 1;
    for (long i = 0; i < tokens; i += step) {
        const long block = table[(token + i) / c.block_size], offset = (token + i) % c.block_size;
        const long group = offset / kGroup, at = offset % kGroup * sizeof(float), size = step * sizeof(float);
        __builtin_memcpy(keys + i, key_scales(c, block, task.kv_head, group) + at, size);
        __builtin_memcpy(values + i, value_scales(c, block, task.kv_head, group) + at, size);
    }
}

// The tokens [begin, end) of one chunk that the queries of a task see; begin is a multiple of kGroup.
struct Chunk {
    const AttentionTask* task;
    long position;             // of the first query; in a prefix all queries see the whole chunk, wherever they stand
    long begin, end;

    Chunk(const Attention& a, const AttentionTask& of, long chunk) : task(&of) {
        const long length = a.query_start[of.sequence + 1] - a.query_start[of.sequence];
        position = a.seq_lens[of.sequence] - length + of.first;
        const long lowest = a.window > 0 ? larger(0, position - a.window + 1) : 0;
        begin = larger(chunk * kChunk, lowest / kGroup * kGroup);
        end = smaller((chunk + 1) * kChunk, position + of.tokens);
    }

    // Where the keys of the group lie that holds a token.
    template <class T>
    const T* keys(const Attention& a, long token) const {
        const CacheLayout& c = a.cache;
        const long block = a.block_tables[task->sequence * a.table_stride + token / c.block_size];
        return key_group<T>(c, block, task->kv_head, token % c.block_size / kGroup);
    }
};

template <class T>
static inline void ask(const T* at, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(T)) _mm_prefetch(reinterpret_cast<const char*>(at + i), _MM_HINT_T0);
}

// Bring a group of numbers of 8 bits, and their scales, to the tile, and ask for the one at its place in the chunk that comes
// next.
template <class T>
void widen_group(const Attention& a, const Chunk& chunk, const Chunk* next, long token, Tile<T>& tile) {
    const CacheLayout& c = a.cache;
    const long g = tile.groups - 1, count = c.group_elements();
    const uint8_t *keys = tile.bytes, *values = tile.bytes + count;
    if (c.block_size % kGroup == 0) {
        keys = chunk.keys<uint8_t>(a, token);
        values = keys + c.groups() * count;
        const long soon = next ? next->begin + g * kGroup : 0;
        if (next && soon < next->end) {
            const uint8_t* ahead = next->keys<uint8_t>(a, soon);
            ask(ahead, count);
            ask(ahead + c.groups() * count, count);
        }
    } else {
        gather_group<T>(a, *chunk.task, token, chunk.end, tile.bytes, tile.bytes + count);
    }
    T* spare = tile.spare + 2 * g * count;
    void (*widen)(const uint8_t*, T*, long) = widen_e4m3;
    if (c.stored == kInt8) widen = widen_int8;
    widen(keys, spare, count);
    widen(values, spare + count, count);
    tile.keys[g] = tile.next_keys[g] = spare;
    tile.values[g] = spare + count;
    const long tokens = smaller(kGroup, chunk.end - token);
    if (c.stored != kInt8) return clear_values(c, tokens, spare + count);
    gather_scales(a, *chunk.task, token, tokens, tile.key_scales + g * kGroup, tile.value_scales + g * kGroup);
}

// Point the tile at the groups of a chunk, and at those of the chunk that comes next (null: none).
template <class T>
void find_groups(const Attention& a, const Chunk& chunk, const Chunk* next, Tile<T>& tile) {
    const CacheLayout& c = a.cache;
    const AttentionTask& task = *chunk.task;
    const long begin = chunk.begin, end = chunk.end;
    const bool aligned = c.block_size % kGroup == 0;
    tile.groups = 0;
    for (long token = begin; token < end; token += kGroup) {
        const long g = tile.groups++;
        if (c.stored != kPlain) {
            widen_group(a, chunk, next, token, tile);
            continue;
        }
        T* spare_keys = tile.spare + 2 * g * c.group_elements();
        T* spare_values = spare_keys + c.group_elements();
        if (!aligned) {
            gather_group<T>(a, task, token, end, spare_keys, spare_values);
            tile.keys[g] = spare_keys;
            tile.values[g] = spare_values;
            tile.next_keys[g] = spare_keys;
            continue;
        }
        tile.keys[g] = chunk.keys<T>(a, token);
        tile.values[g] = tile.keys[g] + c.groups() * c.group_elements();
        const long soon = next ? next->begin + g * kGroup : 0;
        tile.next_keys[g] = next && soon < next->end ? next->keys<T>(a, soon) : tile.keys[g];
        if (end - token < kGroup) {
            __builtin_memcpy(spare_values, tile.values[g], c.group_elements() * sizeof(T));
            clear_values(c, end - token, spare_values);
            tile.values[g] = spare_values;
        }
    }
}

// running := running merged with the next chunk. Rows are taken kWidth at a time, so both have room for kRowPad more.
static inline void merge_rows(const Softmax& chunk, const Softmax& running, long rows, long padded_dim) {
    alignas(64) float old_factor[kWidth], new_factor[kWidth];
    for (long first = 0; first < rows; first += kWidth) {
        const Vec old_top = load(running.maximum + first), new_top = load(chunk.maximum + first);
        const Vec top = max(max(old_top, new_top), set1(-3e38f));    // finite, so that no row's factor is a NaN
        const Vec old_vec = exp(sub(old_top, top)), new_vec = exp(sub(new_top, top));
        store(old_factor, old_vec);
        store(new_factor, new_vec);
        const Vec sums = fma(load(chunk.sum + first), new_vec, mul(load(running.sum + first), old_vec));
        store(running.maximum + first, top);
        store(running.sum + first, sums);
        for (long r = first; r < smaller(first + kWidth, rows); r++) {
            if (chunk.maximum[r] == kMinusInfinity) continue;
            float* values = running.values + r * padded_dim;
            const float* more = chunk.values + r * padded_dim;
            const Vec keep = set1(old_factor[r - first]), gain = set1(new_factor[r - first]);
            for (long d = 0; d < padded_dim; d += kWidth)
                store(values + d, fma(load(more + d), gain, mul(load(values + d), keep)));
        }
    }
}

static inline void clear(const Softmax& s, long rows, long padded_dim) {
    for (long r = 0; r < rows; r++) {
        s.maximum[r] = kMinusInfinity;
        s.sum[r] = 0.0f;
    }
    for (long i = 0; i < rows * padded_dim; i++) s.values[i] = 0.0f;
}

// Copies the first `rows` of one to the other.
static inline void copy_rows(const Softmax& from, const Softmax& to, long rows, long padded_dim) {
    __builtin_memcpy(to.maximum, from.maximum, rows * sizeof(float));
    __builtin_memcpy(to.sum, from.sum, rows * sizeof(float));
    __builtin_memcpy(to.values, from.values, rows * padded_dim * sizeof(float));
}

// What the queries of a task have made of the blocks that they share with others.
static inline Softmax prefix_rows(const Attention& a, const AttentionTask& task) {
    const long share = a.heads / a.kv_heads, first = (task.kv_head * a.places + task.sharing) * share;
    float* at = a.prefixes;
    const Softmax all = carve(at, a.places * a.heads, a.cache.padded_dim);
    return {all.maximum + first, all.sum + first, all.values + first * a.cache.padded_dim};
}

// What the rows of a task have before its first chunk: what an earlier stage of the plan has made, or nothing.
static inline void begin_rows(const Attention& a, const AttentionTask& task, const Softmax& running) {
    const long rows = task.tokens * (a.heads / a.kv_heads);
    if (task.sharing >= 0 && task.chunk_begin > 0) copy_rows(prefix_rows(a, task), running, rows, a.cache.padded_dim);
    else clear(running, rows, a.cache.padded_dim);
}

template <class T>
void write_rows(const Attention& a, const AttentionTask& task, const Softmax& result) {
    const long share = a.heads / a.kv_heads, dim = a.cache.dim;
    if (task.prefix) return copy_rows(result, prefix_rows(a, task), task.tokens * share, a.cache.padded_dim);
    for (long r = 0; r < task.tokens * share; r++) {
        const long token = query_row(a, task, r / share);
        T* out = static_cast<T*>(a.out) + token * a.out_token + (task.kv_head * share + r % share) * a.out_head;
        const float* values = result.values + r * a.cache.padded_dim;
        const Vec scale = set1(a.value_scale / result.sum[r]);
        long d = 0;
        for (; d + kWidth <= dim; d += kWidth) store(out + d, mul(load(values + d), scale));
        if (d < dim) store_some(out + d, mul(load(values + d), scale), dim - d);
    }
}

template <class T, class Query>
void load_queries(const Attention& a, const AttentionTask& task, Query* to) {
    const long share = a.heads / a.kv_heads, dim = a.cache.dim, padded_dim = a.cache.padded_dim;
    for (long r = 0; r < task.tokens * share; r++, to += padded_dim) {
        const long token = query_row(a, task, r / share);
        const T* q = static_cast<const T*>(a.q) + token * a.q_token + (task.kv_head * share + r % share) * a.q_head;
        long d = 0;
        for (; d + kWidth <= dim; d += kWidth) store(to + d, load(q + d));
        if (d < dim) store_some(to + d, load_some(q + d, dim - d), dim - d);
        for (d = dim; d < padded_dim; d++) to[d] = Query{};
    }
}

static inline Softmax partial_slot(const Attention& a, long slot) {
    const long rows = round_up(a.tile_tokens * (a.heads / a.kv_heads), kRowPad);
    float* at = a.partials + slot * rows * (2 + a.cache.padded_dim);
    return carve(at, rows, a.cache.padded_dim);
}

// Scores of a tile's rows to probabilities, asking for the next keys meanwhile.
template <class T, class Query>
void softmax_rows(const Attention& a, const Chunk& chunk, const Tile<T>& tile) {
    const long share = a.heads / a.kv_heads, columns = tile.groups * kGroup;
    const long start = chunk.begin / kChunk * kChunk;
    const Scaling by{a.scale, a.softcap, tile.key_scales, tile.value_scales};
    const auto seen_by = [&](long own) {
        const long lowest = a.window > 0 ? own - a.window + 1 : 0;
        return Seen{larger(0, lowest - chunk.begin), smaller(own + 1 - chunk.begin, columns), lowest <= start};
    };
    float *maximum = tile.chunk.maximum, *sum = tile.chunk.sum;
    for (long r = 0, own = chunk.position; r < tile.rows; own++) {
        const Seen seen = seen_by(own);
        for (const long end = r + share; r < end; r++) maximum[r] = row_top<Query>(tile.scores + r * kChunk, seen, by);
    }
    Query* out = reinterpret_cast<Query*>(tile.probabilities);
    const long early = tile.early_groups();
    for (long r = 0, own = chunk.position, asked = 0; r < tile.rows; own++) {
        const Seen seen = seen_by(own);
        for (const long end = r + share; r < end; r++) {
            for (; asked * tile.rows < early * (r + 1); asked++) ask(tile.next_keys[asked], a.cache.group_elements());
            row_probabilities(tile.scores + r * kChunk, columns, seen, by, out + r * kChunk, maximum[r], sum[r]);
        }
    }
}

// Attend to one task: whether it is the first of its run, and which one follows (null: none).
template <class T, class Products>
void attend_tile(const Attention& a, const AttentionTask& task, bool first, const AttentionTask* following) {
    using Query = typename Products::Query;
    const CacheLayout& c = a.cache;
    const long share = a.heads / a.kv_heads, rows = task.tokens * share, padded_rows = round_up(rows, kRowPad);
    const long spare = kChunkGroups * 2 * c.group_elements() * sizeof(T) / sizeof(float);
    const long bytes = 2 * c.group_elements() / sizeof(float);
    float* at = thread_scratch(padded_rows * (3 * c.padded_dim + 2 * kChunk + 4) + spare + bytes + 2 * kChunk);
    Tile<T> tile;
    tile.rows = rows;
    tile.dim = c.dim;
    tile.padded_dim = c.padded_dim;
    tile.queries = at;
    tile.scores = tile.queries + padded_rows * c.padded_dim;
    tile.probabilities = tile.scores + padded_rows * kChunk;
    at = tile.probabilities + padded_rows * kChunk;
    tile.spare = reinterpret_cast<T*>(at);
    at += spare;
    tile.bytes = reinterpret_cast<uint8_t*>(at);
    at += bytes;
    tile.key_scales = c.stored == kInt8 ? at : nullptr;
    tile.value_scales = c.stored == kInt8 ? at + kChunk : nullptr;
    at += 2 * kChunk;
    tile.chunk = carve(at, padded_rows, c.padded_dim);
    tile.running = carve(at, padded_rows, c.padded_dim);
    load_queries<T>(a, task, reinterpret_cast<Query*>(tile.queries));
    if (task.partial < 0) begin_rows(a, task, tile.running);

    for (long number = task.chunk_begin; number < task.chunk_end; number++) {
        const Chunk chunk(a, task, number);
        const bool last = number + 1 == task.chunk_end;
        const AttentionTask* then = last ? following : &task;
        const Chunk next = then ? Chunk(a, *then, last ? then->chunk_begin : number + 1) : chunk;
        find_groups(a, chunk, then ? &next : nullptr, tile);
        tile.unasked = first && number == task.chunk_begin;
        if (task.partial >= 0) tile.chunk = partial_slot(a, task.partial + number - task.chunk_begin);
        Products::score(tile);
        softmax_rows<T, Query>(a, chunk, tile);
        Products::weigh(tile);
        if (task.partial < 0) merge_rows(tile.chunk, tile.running, rows, c.padded_dim);
    }
    if (task.partial < 0) write_rows<T>(a, task, tile.running);
}

// One task after the other.
template <class T, class Products>
void attend_tiles(const Attention& a, const AttentionTask* tasks, long count) {
    for (long i = 0; i < count; i++)
        attend_tile<T, Products>(a, tasks[i], i == 0, i + 1 < count ? &tasks[i + 1] : nullptr);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
