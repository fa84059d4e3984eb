// Tree attention of query rows over the paged KV cache.
//
// Keys are taken in tiles of KEYS and in chunks of CHUNK, both aligned to absolute positions. A row
// of a branching tree reads the keys of its own ancestors in the lanes of their positions, so a key
// is summed in the same place whether it was drafted or committed. Chunks are folded in order.
// Which thread does a chunk and how many rows stand beside a row changes no bit.
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

// Some chunks' result for one query: greatest score, sum of weights, weighted values [head_dim].
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

// One thread's attention. `scores` holds a chunk's scores, then its weights, of every query.
template <KVFormat FORMAT>
class Attention {
public:
    Attention(const Model &model, const Cache &cache, const Step &step, int layer)
        : model(model), cache(cache), step(step), layer(layer),
          window(model.layers[layer].window), dim(model.head_dim),
          ratio(model.num_heads / model.num_kv_heads) {}

    // q: fp32 [num_rows, stride], the rotated query heads of a row side by side. A unit of all
    // chunks writes to out, fp32 [num_rows, out_stride]; one chunk of several writes to
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
        for (int chunk = unit.first_chunk; chunk < unit.last_chunk; chunk++) {
            find_tiles(unit, chunk);
            score(unit, chunk);
            for (int i = 0; i < count; i++) found[i] = weigh(i);
            mix(unit, chunk, count);
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

    const Model &model;
    const Cache &cache;
    const Step &step;
    const int layer, window, dim, ratio;
    std::vector<float> queries, scores, mixed, folded;
    std::vector<Part> found, results;
    std::vector<uint8_t> tail_data;  // a tile of one row's own ancestors
    float tail_scales[KEYS];
    int most = 0;                       // the highest position of the unit's rows
    int first_tile = 0, last_tile = 0;  // of the chunk, those that any row sees

    void reserve(int count) {
        if (results.size() >= (size_t)count) return;
        queries.resize((size_t)count * dim);
        scores.resize((size_t)count * CHUNK);
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

    void find_tiles(const AttentionUnit &unit, int chunk) {
        const int *positions = step.positions + unit.row;
        int least = most = positions[0];
        for (int r = 1; r < unit.num_rows; r++) {
            least = positions[r] < least ? positions[r] : least;
            most = positions[r] > most ? positions[r] : most;
        }
        const int begin = chunk * CHUNK;
        first_tile = lowest(least) > begin ? (lowest(least) - begin) / KEYS : 0;
        last_tile = most - begin < CHUNK ? (most - begin) / KEYS + 1 : CHUNK / KEYS;
    }

    // Call `use(tile, number of the tile in the chunk, first row, end row)` for the tiles that rows
    // see: once for all rows, or for each row that has ancestors of its own in the tile.
    template <class Use>
    void over_tiles(const AttentionUnit &unit, int chunk, bool is_value, Use use) {
        const Segment &segment = step.segments[unit.segment];
        const HeadCache head(cache, model, layer, is_value, unit.head);
        const int *positions = step.positions + unit.row;
        for (int t = first_tile; t < last_tile; t++) {
            const int base = chunk * CHUNK + t * KEYS;
            if (segment.paths < 0 || base + KEYS <= segment.root) {
                if (base + FETCHED <= most) head.fetch(slot(segment, base + FETCHED));
                int first = 0;  // a chain's rows stand in order of position
                while (positions[first] < base) first++;
                use(head.tile(slot(segment, base)), t, first, unit.num_rows);
                continue;
            }
            for (int r = 0; r < unit.num_rows; r++) {
                if (positions[r] < base) continue;
                const int node = unit.row + r - segment.start;
                const uint8_t *path = step.paths + segment.paths + node * segment.num_rows;
                const Tile tail = {tail_data.data(), tail_scales};
                for (int k = 0; k < KEYS; k++) {
                    const int at = base + k < positions[r] ? base + k : positions[r];
                    const bool is_drafted = at >= segment.root;
                    const int where = is_drafted ? segment.root + path[at - segment.root] : at;
                    const int from = slot(segment, where);
                    head.copy(head.tile(from), from % KEYS, tail, k);
                }
                use(tail, t, r, r + 1);
            }
        }
    }

    void score(const AttentionUnit &unit, int chunk) {
        const int count = unit.num_rows * ratio;
        for (int i = 0; i < count; i++)
            for (int t = first_tile; t < last_tile; t++) store(score_of(i, t), splat(NEVER));
        over_tiles(unit, chunk, false, [&](Tile tile, int t, int first, int end) {
            const int last = end * ratio;
            int i = first * ratio;
            for (; i + 8 <= last; i += 8) dot_keys<8>(tile, i, t);
            for (; i + 3 <= last; i += 3) dot_keys<3>(tile, i, t);
            for (; i < last; i++) dot_keys<1>(tile, i, t);
            for (int r = first; r < end; r++) mask(unit, r, chunk * CHUNK + t * KEYS, t);
        });
    }

    float *score_of(int i, int t) { return &scores[(size_t)i * CHUNK + t * KEYS]; }

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

    void mix(const AttentionUnit &unit, int chunk, int count) {
        std::memset(mixed.data(), 0, (size_t)count * dim * sizeof(float));
        over_tiles(unit, chunk, true, [&](Tile tile, int t, int first, int end) {
            const int last = end * ratio;
            int i = first * ratio;
            for (; i + 4 <= last; i += 4) add_values<4>(tile, i, t);
            for (; i + 3 <= last; i += 3) add_values<3>(tile, i, t);
            for (; i < last; i++) add_values<1>(tile, i, t);
        });
    }

    void put_query(const float *q, int i) {
        float *out = &queries[(size_t)i * dim];
        if constexpr (IS_EXACT) std::memcpy(out, q, dim * sizeof(float));
        else
            for (int d = 0; d < dim; d += LANES)
                store((uint16_t *)out + d, narrow_bf16(load<f32x16>(q + d)));
    }

    // Vector `i` of a tile: sixteen elements in fp32 or sixteen pairs in bf16.
    static u32x16 elements(const uint8_t *tile, int i) {
        if constexpr (FORMAT == KVFormat::q8) return widen_bytes((const int8_t *)tile + i * 32);
        else return load<u32x16>(tile + i * 64);
    }

    static f32x16 multiply_add(u32x16 a, const float *word, f32x16 acc) {
        if constexpr (IS_EXACT) return fma((f32x16)a, splat(*word), acc);
        else return dot_bf16(acc, a, splat_u(load<uint32_t>(word)));
    }

    // Q queries from `i` on with the tile's keys; two sums each, to have enough in flight.
    template <int Q>
    void dot_keys(Tile tile, int i, int t) {
        f32x16 sums[2][Q] = {};
        const float *query = &queries[(size_t)i * dim];
        const int words = IS_EXACT ? dim : dim / 2;
        for (int w = 0; w < words; w += 2)
            UNROLLED for (int half = 0; half < 2; half++) {
                const u32x16 keys = elements(tile.data, w + half);
                UNROLLED for (int n = 0; n < Q; n++)
                    sums[half][n] = multiply_add(keys, query + n * dim + w + half, sums[half][n]);
            }
        for (int n = 0; n < Q; n++) {
            f32x16 out = (sums[0][n] + sums[1][n]) * model.scale;
            if constexpr (FORMAT == KVFormat::q8) out *= load<f32x16>(tile.scales);
            store(score_of(i + n, t), out);
        }
    }

    template <int Q>
    void add_values(Tile tile, int i, int t) {
        float weights[Q][KEYS];
        for (int n = 0; n < Q; n++) {
            f32x16 weight = load<f32x16>(score_of(i + n, t));
            if constexpr (FORMAT == KVFormat::q8) weight *= load<f32x16>(tile.scales);
            if constexpr (IS_EXACT) store(weights[n], weight);
            else store(weights[n], narrow_bf16(weight));
        }
        int d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES) add_values<Q, 4>(tile, weights[0], i, d);
        for (; d < dim; d += LANES) add_values<Q, 1>(tile, weights[0], i, d);
    }

    // Q queries from `i` on, D vectors of features from `d` on.
    template <int Q, int D>
    void add_values(Tile tile, const float *weights, int i, int d) {
        f32x16 acc[Q][D];
        float *to = &mixed[(size_t)i * dim + d];
        UNROLLED for (int n = 0; n < Q; n++)
            UNROLLED for (int v = 0; v < D; v++) acc[n][v] = load<f32x16>(to + n * dim + v * LANES);
        for (int k = 0; k < (IS_EXACT ? KEYS : KEYS / 2); k++)
            UNROLLED for (int v = 0; v < D; v++) {
                const u32x16 values = elements(tile.data, (k * dim + d) / LANES + v);
                UNROLLED for (int n = 0; n < Q; n++)
                    acc[n][v] = multiply_add(values, weights + n * KEYS + k, acc[n][v]);
            }
        UNROLLED for (int n = 0; n < Q; n++)
            UNROLLED for (int v = 0; v < D; v++) store(to + n * dim + v * LANES, acc[n][v]);
    }
};

}  // namespace specdec
