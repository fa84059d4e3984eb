// AttentionProducts: queries times keys, and weights times values, for the tiles of one split.
//
// Those in bf16 are the matrix unit's where there is one, those in 8 bits and fp32 are done by
// vectors. Either way a query's sums are in one order, whatever other queries are beside it.
#pragma once

#include <vector>

#include "attention_plan.hpp"
#include "matrix_unit.hpp"

namespace specdec {

// What a thread keeps from one layer to the next, so that it needs no new memory.
struct AttentionBuffers {
    std::vector<uint32_t> queries;  // [count / TOGETHER][words][TOGETHER]; the unit's [count][words]
    std::vector<float> scores;      // [count][SPLIT]
    std::vector<uint16_t> weights;  // the unit's, in bf16 [count][SPLIT]
    std::vector<float> mixed, folded;  // [count][dim]: of a split, of all so far
    std::vector<uint8_t> tail;         // a tile of one row's own ancestors
};

// `scores` holds a split's scores, then its weights, of every query. The caller has a MatrixUnit
// for as many queries as it hands over at once: over GROUP features for keys, over KEYS for values.
template <KVFormat FORMAT>
class AttentionProducts {
public:
    // `ratio` queries stand for a row.
    AttentionProducts(int dim, int ratio, AttentionBuffers &kept)
        : dim(dim), words(IS_EXACT ? dim : dim / 2),
          has_unit(HAS_MATRIX_UNIT && FORMAT == KVFormat::bf16 && dim % GROUP == 0 &&
                   (ratio < ROWS || ratio % ROWS == 0)),
          kept(kept) {}

    void reserve(int count) {
        grow(kept.queries, (size_t)padded(count, TOGETHER) * words);
        grow(kept.scores, (size_t)count * SPLIT);
        if (has_unit) grow(kept.weights, (size_t)count * SPLIT);
        grow(kept.mixed, (size_t)count * dim);
        grow(kept.folded, (size_t)count * dim);
        grow(kept.tail, (size_t)dim * KEYS * element_size(FORMAT));
    }

    float *score_of(int i, int t) { return &kept.scores[(size_t)i * SPLIT + t * KEYS]; }
    float *mixed_of(int i) { return &kept.mixed[(size_t)i * dim]; }

    void put_weights(f32x16 weight, int i, int t) {
        store(score_of(i, t), weight);
        if (has_unit) store(weights_of(i, t), narrow_bf16(weight));
    }

    void put_query(const float *q, float scale, int i) {
        uint32_t *out = query(i);
        const int step = has_unit ? 1 : TOGETHER;
        for (int d = 0; d < dim; d += LANES) {
            uint32_t part[LANES];
            const f32x16 scaled = load<f32x16>(q + d) * scale;
            if constexpr (IS_EXACT) store(part, scaled);
            else store(part, narrow_bf16(scaled));
            for (int w = 0; w < words * LANES / dim; w++, out += step) *out = part[w];
        }
    }

    // `count` queries from `i` on with the tile's keys.
    void dot_keys(Tile tile, int i, int count, int t) {
#if defined(__AMX_BF16__)
        if (has_unit)
            return over_blocks(i, count, [&](int first) {
                MatrixUnit::clear<0>();
                for (int w = 0; w < words; w += GROUP / 2)
                    MatrixUnit::add<0>(
                        query(first) + w, words * 4, tile.data + w * KEYS * 4, KEYS * 4
                    );
                MatrixUnit::take<0>(score_of(first, t), SPLIT * 4);
            });
#endif
        const int end = i + count;
        if (i % TOGETHER == 0) {
            for (; i + TOGETHER <= end; i += TOGETHER) dot_keys<TOGETHER>(tile, i, t);
            if (i + 3 <= end) dot_keys<3>(tile, i, t), i += 3;
        }
        for (; i < end; i++) dot_keys<1>(tile, i, t);
    }

    // Mix the values of tiles [first, last) into those of `count` queries from `i` on,
    // of which nothing was mixed yet if `is_first`.
    void add_values(const Tile *tiles, int i, int count, int first, int last, bool is_first) {
#if defined(__AMX_BF16__)
        if (has_unit)
            return over_blocks(i, count, [&](int block) {
                for (int d = 0; d < dim; d += GROUP)
                    MatrixUnit::each_sum<GROUP / LANES>([&](auto n) {
                        const int at = d + n * LANES;
                        float *to = mixed_of(block) + at;
                        if (is_first) MatrixUnit::clear<n>();
                        else MatrixUnit::put<n>(to, dim * 4);
                        for (int t = first; t < last; t++)
                            MatrixUnit::add<n>(
                                weights_of(block, t), SPLIT * 2, tiles[t].data + at * 4, dim * 4
                            );
                        MatrixUnit::take<n>(to, dim * 4);
                    });
            });
#endif
        const int end = i + count;
        for (; i + 6 <= end; i += 6) add_values<6>(tiles, i, first, last);
        if (i + 3 <= end) add_values<3>(tiles, i, first, last), i += 3;
        for (; i < end; i++) add_values<1>(tiles, i, first, last);
    }

private:
    static constexpr bool IS_EXACT = FORMAT == KVFormat::f32;
    static constexpr int TOGETHER = 8;  // queries that meet a tile's keys at once

    const int dim;
    const int words;  // of a query: fp32 elements or pairs in bf16
    const bool has_unit;
    AttentionBuffers &kept;

    template <class T>
    static void grow(std::vector<T> &buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
    }

    uint32_t *query(int i) {
        if (has_unit) return &kept.queries[(size_t)i * words];
        return &kept.queries[(size_t)(i / TOGETHER) * words * TOGETHER + i % TOGETHER];
    }

    uint16_t *weights_of(int i, int t) { return &kept.weights[(size_t)i * SPLIT + t * KEYS]; }

    // Vector `i` of a tile: sixteen elements in fp32 or sixteen pairs in bf16.
    static u32x16 elements(const uint8_t *tile, int i) {
        if constexpr (FORMAT == KVFormat::q8) return widen_bytes((const int8_t *)tile + i * 32);
        else return load<u32x16>(tile + i * 64);
    }

    static f32x16 multiply_add(u32x16 a, uint32_t word, f32x16 acc) {
        if constexpr (IS_EXACT) return fma((f32x16)a, (f32x16)splat_u(word), acc);
        else return dot_bf16(acc, a, splat_u(word));
    }

    // Call `use(first)` for blocks of ROWS queries, of all where they are fewer. The last block may
    // have some of the one before, which are done again.
    template <class Use>
    static void over_blocks(int i, int count, Use use) {
        for (int at = 0; at < count; at += ROWS)
            use(i + (at && at + ROWS > count ? count - ROWS : at));
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
        float *to = mixed_of(i) + d;
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
