// Attention: tree attention of query rows over the paged KV cache, one unit of work at a time.
//
// Keys are taken in tiles of KEYS and in splits of SPLIT, both aligned to absolute positions. A row
// of a branching tree reads the keys of its own ancestors in the lanes of their positions, so a key
// is summed in the same place whether it was drafted or committed. Splits are folded in order.
// Which thread does a split and how many rows stand beside a row changes no bit.
//
// Query heads that share a key head are packed; a query is one of them for one row. Keys and values
// in bf16 or 8 bits meet queries and weights in bf16, two at a time; those in fp32 meet fp32. Tiles
// are read where they lie in the cache.
#pragma once

#include <vector>

#include "attention_plan.hpp"
#include "rows.hpp"

namespace specdec {

constexpr float NEVER = -__builtin_inff();
constexpr int FETCHED = 8 * KEYS;  // keys from the tile in use to the one that is fetched

// Some splits' result for one query: greatest score, sum of weights, weighted values [head_dim].
struct Part {
    float most, total;
    float *mixed;
};

inline void fold(Part &into, const Part &next, int dim) {
    if (next.most == NEVER) return;
    if (into.most == NEVER) {
        into.most = next.most;
        into.total = next.total;
        std::memcpy(into.mixed, next.mixed, dim * sizeof(float));
        return;
    }
    const float most = next.most > into.most ? next.most : into.most;
    const f32x16 scales = exp(f32x16{into.most - most, next.most - most});
    into.most = most;
    into.total = into.total * scales[0] + next.total * scales[1];
    for (int i = 0; i < dim; i += LANES) {
        const f32x16 old = load<f32x16>(into.mixed + i) * scales[0];
        store(into.mixed + i, fma(load<f32x16>(next.mixed + i), splat(scales[1]), old));
    }
}

inline void finish(const Part &part, int dim, float *out) {
    for (int i = 0; i < dim; i += LANES) store(out + i, load<f32x16>(part.mixed + i) / part.total);
}

// One thread's attention. `scores` holds a split's scores, then its weights, of every query.
template <KVFormat FORMAT>
class Attention {
public:
    Attention(const Model &model, const Cache &cache, const Step &step, int layer)
        : model(model), cache(cache), step(step), layer(layer),
          window(model.layers[layer].window), dim(model.head_dim),
          ratio(model.num_heads / model.num_kv_heads), words(IS_EXACT ? dim : dim / 2) {}

    // q: fp32 [num_rows, stride], the rotated query heads of a row side by side. A unit of all
    // splits writes to out, fp32 [num_rows, out_stride]; one split of several writes to
    // part, [queries][2 + head_dim].
    void attend(
        const AttentionUnit &unit, const float *q, int stride, float *out, int out_stride,
        float *part
    ) {
        const int count = unit.num_rows * ratio;
        reserve(count);
        for (int i = 0; i < count; i++) {
            const int64_t row = unit.row + i / ratio;
            put_query(q + row * stride + (unit.head * ratio + i % ratio) * dim, i);
            results[i] = {NEVER, 0, &folded[(size_t)i * dim]};
        }
        for (int split = unit.first_split; split < unit.last_split; split++) {
            find_tiles(unit, split);
            score(unit, split);
            for (int i = 0; i < count; i++) found[i] = weigh(i);
            mix(unit, split, count);
            for (int i = 0; i < count; i++) fold(results[i], found[i], dim);
        }
        for (int i = 0; i < count; i++, part += 2 + dim) {
            const int64_t row = unit.row + i / ratio;
            const int head = unit.head * ratio + i % ratio;
            if (unit.part < 0) {
                finish(results[i], dim, out + row * out_stride + head * dim);
            } else {
                part[0] = results[i].most;
                part[1] = results[i].total;
                std::memcpy(part + 2, results[i].mixed, dim * sizeof(float));
            }
        }
    }

private:
    static constexpr bool IS_EXACT = FORMAT == KVFormat::f32;
    static constexpr int TOGETHER = 8;  // queries that meet a tile's keys at once

    const Model &model;
    const Cache &cache;
    const Step &step;
    const int layer, window, dim, ratio;
    const int words;  // of a query: fp32 elements or pairs in bf16
    std::vector<uint32_t> queries;  // [count / TOGETHER][words][TOGETHER]
    std::vector<float> scores, mixed, folded;
    std::vector<Part> found, results;
    std::vector<uint8_t> tail_data;  // a tile of one row's own ancestors
    float tail_scales[KEYS];
    int most = 0;                       // the highest position of the unit's rows
    int first_tile = 0, last_tile = 0;  // of the split, those that any row sees

    void reserve(int count) {
        if (results.size() >= (size_t)count) return;
        queries.resize((size_t)padded(count, TOGETHER) * words);
        scores.resize((size_t)count * SPLIT);
        mixed.resize((size_t)count * dim);
        folded.resize((size_t)count * dim);
        found.resize(count);
        results.resize(count);
        tail_data.resize((size_t)dim * KEYS * element_size(FORMAT));
    }

    int lowest(int position) const {
        return window && position >= window ? position - window + 1 : 0;
    }

    int slot(const Segment &segment, int position) const {
        const int size = cache.block_size;
        return step.blocks[segment.blocks + position / size] * size + position % size;
    }

    void find_tiles(const AttentionUnit &unit, int split) {
        const int *positions = step.positions + unit.row;
        int least = most = positions[0];
        for (int r = 1; r < unit.num_rows; r++) {
            least = positions[r] < least ? positions[r] : least;
            most = positions[r] > most ? positions[r] : most;
        }
        const int begin = split * SPLIT;
        first_tile = lowest(least) > begin ? (lowest(least) - begin) / KEYS : 0;
        last_tile = most - begin < SPLIT ? (most - begin) / KEYS + 1 : SPLIT / KEYS;
    }

    // The first tile of the split that rows do not share: where the segment branches.
    int end_of_shared(const Segment &segment, int split) const {
        if (segment.paths < 0) return last_tile;
        const int whole = segment.root / KEYS - split * (SPLIT / KEYS);
        return whole < first_tile ? first_tile : whole < last_tile ? whole : last_tile;
    }

    // Call `use(tile, number of the tile in the split, row of the unit)` for what rows do not share.
    template <class Use>
    void over_tails(
        const AttentionUnit &unit, const HeadCache &head, int split, int first, Use use
    ) {
        const Segment &segment = step.segments[unit.segment];
        for (int t = first; t < last_tile; t++) {
            const int base = split * SPLIT + t * KEYS;
            for (int r = 0; r < unit.num_rows; r++)
                if (base <= step.positions[unit.row + r])
                    use(tail(segment, head, unit.row + r, base), t, r);
        }
    }

    // The tile of keys from position `base` on, those of row `row`'s own ancestors among them.
    Tile tail(const Segment &segment, const HeadCache &head, int row, int base) {
        const int node = row - segment.start, position = step.positions[row];
        const uint8_t *path = step.paths + segment.paths + node * segment.num_rows;
        const Tile own = {tail_data.data(), tail_scales};
        head.copy(head.tile(slot(segment, base)), own);
        for (int at = base > segment.root ? base : segment.root; at < base + KEYS; at++) {
            if (at > position) break;
            const int from = slot(segment, segment.root + path[at - segment.root]);
            if (path[at - segment.root] != at - segment.root)
                head.copy(head.tile(from), from % KEYS, own, at - base);
        }
        return own;
    }

    void score(const AttentionUnit &unit, int split) {
        const Segment &segment = step.segments[unit.segment];
        const HeadCache head(cache, model, layer, false, unit.head);
        const int shared = end_of_shared(segment, split), count = unit.num_rows * ratio;
        for (int t = first_tile; t < shared; t++) {
            const int base = split * SPLIT + t * KEYS;
            if (base + FETCHED <= most) head.fetch(slot(segment, base + FETCHED));
            const Tile tile = head.tile(slot(segment, base));
            int i = 0;
            for (; i + TOGETHER <= count; i += TOGETHER) dot_keys<TOGETHER>(tile, i, t);
            if (i + 3 <= count) dot_keys<3>(tile, i, t), i += 3;
            for (; i < count; i++) dot_keys<1>(tile, i, t);
            for (int r = 0; r < unit.num_rows; r++) mask(unit, r, base, t);
        }
        for (int i = 0; i < count; i++)
            for (int t = shared; t < last_tile; t++) store(score_of(i, t), splat(NEVER));
        over_tails(unit, head, split, shared, [&](Tile tile, int t, int r) {
            for (int i = r * ratio; i < (r + 1) * ratio; i++) dot_keys<1>(tile, i, t);
            mask(unit, r, split * SPLIT + t * KEYS, t);
        });
    }

    float *score_of(int i, int t) { return &scores[(size_t)i * SPLIT + t * KEYS]; }

    void mask(const AttentionUnit &unit, int r, int base, int t) {
        const int position = step.positions[unit.row + r];
        if (base + KEYS <= position + 1 && base >= lowest(position)) return;
        const i32x16 lane =
            i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + base;
        const i32x16 is_hidden = (lane > position) | (lane < lowest(position));
        for (int i = r * ratio; i < (r + 1) * ratio; i++)
            store(score_of(i, t), is_hidden ? splat(NEVER) : load<f32x16>(score_of(i, t)));
    }

    // Scores of a query become weights relative to the greatest.
    Part weigh(int i) {
        f32x16 tops = splat(NEVER), total = {};
        for (int t = first_tile; t < last_tile; t++)
            tops = maximum(tops, load<f32x16>(score_of(i, t)));
        const float top = largest(tops);
        for (int t = first_tile; t < last_tile; t++) {
            f32x16 weight = {};
            if (top != NEVER) weight = exp(load<f32x16>(score_of(i, t)) - top);
            store(score_of(i, t), weight);
            total += weight;
        }
        return {top, sum(total), &mixed[(size_t)i * dim]};
    }

    void mix(const AttentionUnit &unit, int split, int count) {
        const Segment &segment = step.segments[unit.segment];
        const HeadCache head(cache, model, layer, true, unit.head);
        const int shared = end_of_shared(segment, split);
        Tile tiles[SPLIT / KEYS];
        for (int t = first_tile; t < shared; t++)
            tiles[t] = head.tile(slot(segment, split * SPLIT + t * KEYS));
        std::memset(mixed.data(), 0, (size_t)count * dim * sizeof(float));
        int i = 0;
        for (; i + 6 <= count; i += 6) add_values<6>(tiles, i, first_tile, shared);
        if (i + 3 <= count) add_values<3>(tiles, i, first_tile, shared), i += 3;
        for (; i < count; i++) add_values<1>(tiles, i, first_tile, shared);
        over_tails(unit, head, split, shared, [&](Tile tile, int t, int r) {
            tiles[t] = tile;
            for (int q = r * ratio; q < (r + 1) * ratio; q++) add_values<1>(tiles, q, t, t + 1);
        });
    }

    uint32_t *query(int i) {
        return &queries[(size_t)(i / TOGETHER) * words * TOGETHER + i % TOGETHER];
    }

    void put_query(const float *q, int i) {
        uint32_t *out = query(i);
        for (int d = 0; d < dim; d += LANES) {
            uint32_t part[LANES];
            const f32x16 scaled = load<f32x16>(q + d) * model.scale;
            if constexpr (IS_EXACT) store(part, scaled);
            else store(part, narrow_bf16(scaled));
            for (int w = 0; w < words * LANES / dim; w++, out += TOGETHER) *out = part[w];
        }
    }

    // Vector `i` of a tile: sixteen elements in fp32 or sixteen pairs in bf16.
    static u32x16 elements(const uint8_t *tile, int i) {
        if constexpr (FORMAT == KVFormat::q8) return widen_bytes((const int8_t *)tile + i * 32);
        else return load<u32x16>(tile + i * 64);
    }

    static f32x16 multiply_add(u32x16 a, uint32_t word, f32x16 acc) {
        if constexpr (IS_EXACT) return fma((f32x16)a, (f32x16)splat_u(word), acc);
        else return dot_bf16(acc, a, splat_u(word));
    }

    // Q queries from `i` on with the tile's keys; two sums each, to have enough in flight.
    template <int Q>
    void dot_keys(Tile tile, int i, int t) {
        f32x16 sums[2][Q] = {};
        const uint32_t *word = query(i);
        for (int w = 0; w < words; w += 2)
            UNROLLED for (int half = 0; half < 2; half++, word += TOGETHER) {
                const u32x16 keys = elements(tile.data, w + half);
                UNROLLED for (int n = 0; n < Q; n++)
                    sums[half][n] = multiply_add(keys, word[n], sums[half][n]);
            }
        for (int n = 0; n < Q; n++) {
            f32x16 out = sums[0][n] + sums[1][n];
            if constexpr (FORMAT == KVFormat::q8) out *= load<f32x16>(tile.scales);
            store(score_of(i + n, t), out);
        }
    }

    // Q queries from `i` on, with the values of tiles [first, last).
    template <int Q>
    void add_values(const Tile *tiles, int i, int first, int last) {
        int d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES) add_values<Q, 4>(tiles, i, first, last, d);
        for (; d < dim; d += LANES) add_values<Q, 1>(tiles, i, first, last, d);
    }

    // D vectors of features from `d` on.
    template <int Q, int D>
    void add_values(const Tile *tiles, int i, int first, int last, int d) {
        f32x16 acc[Q][D];
        float *to = &mixed[(size_t)i * dim + d];
        UNROLLED for (int n = 0; n < Q; n++)
            UNROLLED for (int v = 0; v < D; v++) acc[n][v] = load<f32x16>(to + n * dim + v * LANES);
        for (int t = first; t < last; t++) {
            uint32_t weights[Q * KEYS];  // fp32, or pairs in bf16 in a query's first half
            UNROLLED for (int n = 0; n < Q; n++) {
                f32x16 weight = load<f32x16>(score_of(i + n, t));
                if constexpr (FORMAT == KVFormat::q8) weight *= load<f32x16>(tiles[t].scales);
                if constexpr (IS_EXACT) store(weights + n * KEYS, weight);
                else store(weights + n * KEYS, narrow_bf16(weight));
            }
            for (int k = 0; k < (IS_EXACT ? KEYS : KEYS / 2); k++)
                UNROLLED for (int v = 0; v < D; v++) {
                    const u32x16 values = elements(tiles[t].data, (k * dim + d) / LANES + v);
                    UNROLLED for (int n = 0; n < Q; n++)
                        acc[n][v] = multiply_add(values, weights[n * KEYS + k], acc[n][v]);
                }
        }
        UNROLLED for (int n = 0; n < Q; n++)
            UNROLLED for (int v = 0; v < D; v++) store(to + n * dim + v * LANES, acc[n][v]);
    }
};

}  // namespace specdec
