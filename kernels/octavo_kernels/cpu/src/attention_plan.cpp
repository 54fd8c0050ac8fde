#include "attention_plan.h"

#include <string.h>

#include <algorithm>

namespace octavo {
namespace {

constexpr long kTaskRows = 96;    // query rows (tokens times heads a KV head) of one task

// A sequence whose queries are too few for a tile, and which may share the first blocks of its context with others.
struct Sharer {
    const int32_t* table;
    long sequence, queries;
    long chunks;       // that lie before its queries
    long blocks;       // that hold these chunks
    size_t own;        // its tasks in the last stage, one for each KV head
    long place;        // of its first query among all that may share
    long common;       // chunks that it shares with the sharer before it, once they are sorted
};

class Planner {
  public:
    explicit Planner(const Attention& attention)
        : a(attention), tile(larger(1, kTaskRows / (a.heads / a.kv_heads))) {}

    AttentionPlan plan() {
        for (long s = 0; s < a.sequences; s++) add_sequence(s);
        sort_sharers();
        share(0, sharers.size(), 0, 0);
        made.stages.push_back(std::move(own));
        return std::move(made);
    }

  private:
    void add_sequence(long s) {
        const long queries = a.query_start[s + 1] - a.query_start[s], chunks = (a.seq_lens[s] - queries) / kChunk;
        if (queries > 0 && queries < tile && chunks > 0 && a.window == 0)
            sharers.push_back({a.block_tables + s * a.table_stride, s, queries, chunks,
                               ceil_div(chunks * kChunk, a.cache.block_size), own.size(), 0, 0});
        for (long first = 0; first < queries; first += tile)
            for (long head = 0; head < a.kv_heads; head++) {
                AttentionTask task{int32_t(s), int32_t(head), int32_t(first), int32_t(smaller(tile, queries - first)),
                                   0, 0, -1, -1, false};
                chunk_range(a, task);
                own.push_back(task);
            }
    }

    // By their blocks, so that those that share some stand side by side.
    void sort_sharers() {
        std::sort(sharers.begin(), sharers.end(), [](const Sharer& x, const Sharer& y) {
            const int order = memcmp(x.table, y.table, smaller(x.blocks, y.blocks) * sizeof(int32_t));
            return order != 0 ? order < 0 : x.blocks < y.blocks;
        });
        const Sharer* before = nullptr;
        for (Sharer& sharer : sharers) {
            sharer.place = long(made.sharing.size());
            for (long i = 0; i < sharer.queries; i++) made.sharing.push_back(a.query_start[sharer.sequence] + int32_t(i));
            if (before) sharer.common = common_chunks(*before, sharer);
            before = &sharer;
        }
    }

    long common_chunks(const Sharer& x, const Sharer& y) const {
        const long most = smaller(x.blocks, y.blocks);
        const long equal = std::mismatch(x.table, x.table + most, y.table).first - x.table;
        return smaller(equal * a.cache.block_size / kChunk, smaller(x.chunks, y.chunks));
    }

    // Tasks for the sharers [first, last), which have their first `done` chunks in common: for each run of them that has more,
    // and in the next stage for the runs within it that have still more.
    void share(size_t first, size_t last, long done, size_t stage) {
        while (first < last) {
            size_t end = first + 1;
            long common = sharers[first].chunks;
            for (; end < last && sharers[end].common > done; end++) common = smaller(common, sharers[end].common);
            if (end - first > 1) {
                add_prefix(first, end, done, common, stage);
                share(first, end, common, stage + 1);
            }
            first = end;
        }
    }

    void add_prefix(size_t first, size_t last, long begin, long end, size_t stage) {
        if (made.stages.size() <= stage) made.stages.emplace_back();
        const long sequence = sharers[first].sequence, stop = sharers[last - 1].place + sharers[last - 1].queries;
        for (long place = sharers[first].place; place < stop; place += tile)
            for (long head = 0; head < a.kv_heads; head++)
                made.stages[stage].push_back({int32_t(sequence), int32_t(head), 0, int32_t(smaller(tile, stop - place)),
                                              int32_t(begin), int32_t(end), -1, int32_t(place), true});
        for (size_t i = first; i < last; i++)
            for (long head = 0; head < a.kv_heads; head++) {
                AttentionTask& task = own[sharers[i].own + head];
                task.chunk_begin = int32_t(end);
                task.sharing = int32_t(sharers[i].place);
            }
    }

    const Attention& a;
    const long tile;    // queries that one task takes
    std::vector<AttentionTask> own;
    std::vector<Sharer> sharers;
    AttentionPlan made;
};

}  // namespace

AttentionPlan plan_attention(const Attention& a) { return Planner(a).plan(); }

}  // namespace octavo
