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
#include "attention_products.hpp"

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

// One thread's attention.
template <KVFormat FORMAT>
class Attention {
public:
    Attention(
        const Model &model, const Cache &cache, const Step &step, int layer, AttentionBuffers &kept
    )
        : model(model), cache(cache), step(step), layer(layer),
          window(model.layers[layer].window), dim(model.head_dim),
          ratio(model.num_heads / model.num_kv_heads), kept(kept),
          products(dim, ratio, kept) {}

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
            const float *head = q + row * stride + (unit.head * ratio + i % ratio) * dim;
            products.put_query(head, model.scale, i);
            results[i] = {NEVER, 0, &kept.folded[(size_t)i * dim]};
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
    const Model &model;
    const Cache &cache;
    const Step &step;
    const int layer, window, dim, ratio;
    AttentionBuffers &kept;
    AttentionProducts<FORMAT> products;
    std::vector<Part> found, results;
    float tail_scales[KEYS];
    int most = 0;                       // the highest position of the unit's rows
    int first_tile = 0, last_tile = 0;  // of the split, those that any row sees

    void reserve(int count) {
        products.reserve(count);
        found.resize(count);
        results.resize(count);
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
        const Tile own = {kept.tail.data(), tail_scales};
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
        if (first_tile < shared) {
            const MatrixUnit matrix_unit(count);
            for (int t = first_tile; t < shared; t++) {
                const int base = split * SPLIT + t * KEYS;
                if (base + FETCHED <= most) head.fetch(slot(segment, base + FETCHED));
                products.dot_keys(head.tile(slot(segment, base)), 0, count, t);
                for (int r = 0; r < unit.num_rows; r++) mask(unit, r, base, t);
            }
        }
        if (shared == last_tile) return;
        for (int i = 0; i < count; i++)
            for (int t = shared; t < last_tile; t++) store(products.score_of(i, t), splat(NEVER));
        const MatrixUnit matrix_unit(ratio);
        over_tails(unit, head, split, shared, [&](Tile tile, int t, int r) {
            products.dot_keys(tile, r * ratio, ratio, t);
            mask(unit, r, split * SPLIT + t * KEYS, t);
        });
    }

    void mask(const AttentionUnit &unit, int r, int base, int t) {
        const int position = step.positions[unit.row + r];
        if (base + KEYS <= position + 1 && base >= lowest(position)) return;
        const i32x16 lane =
            i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + base;
        const i32x16 is_hidden = (lane > position) | (lane < lowest(position));
        for (int i = r * ratio; i < (r + 1) * ratio; i++) {
            float *scores = products.score_of(i, t);
            store(scores, is_hidden ? splat(NEVER) : load<f32x16>(scores));
        }
    }

    // Scores of a query become weights relative to the greatest.
    Part weigh(int i) {
        f32x16 tops = splat(NEVER), total = {};
        for (int t = first_tile; t < last_tile; t++)
            tops = maximum(tops, load<f32x16>(products.score_of(i, t)));
        const float top = largest(tops);
        for (int t = first_tile; t < last_tile; t++) {
            f32x16 weight = {};
            if (top != NEVER) weight = exp(load<f32x16>(products.score_of(i, t)) - top);
            products.put_weights(weight, i, t);
            total += weight;
        }
        return {top, sum(total), products.mixed_of(i)};
    }

    void mix(const AttentionUnit &unit, int split, int count) {
        const Segment &segment = step.segments[unit.segment];
        const HeadCache head(cache, model, layer, true, unit.head);
        const int shared = end_of_shared(segment, split);
        Tile tiles[SPLIT / KEYS];
        for (int t = first_tile; t < shared; t++)
            tiles[t] = head.tile(slot(segment, split * SPLIT + t * KEYS));
        std::memset(products.mixed_of(0), 0, (size_t)count * dim * sizeof(float));
        if (first_tile < shared) {
            const MatrixUnit matrix_unit(count, KEYS);
            products.add_values(tiles, 0, count, first_tile, shared, true);
        }
        if (shared == last_tile) return;
        const MatrixUnit matrix_unit(ratio, KEYS);
        over_tails(unit, head, split, shared, [&](Tile tile, int t, int r) {
            tiles[t] = tile;
            products.add_values(tiles, r * ratio, ratio, t, t + 1, t == first_tile);
        });
    }
};

}  // namespace specdec
