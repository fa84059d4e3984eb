// Weight formats: how panels of sixteen output features lie in memory, and their products.
//
// A weight [out, in] is cut into panels of LANES output features; a panel streams through all input
// features, so a product reads memory in one run. Rows are prepared once per product, in tiles of
// ROWS, interleaved so that the same input features of all rows lie side by side. Every output is
// summed over the input features in one order, whatever the number of rows: rows are invariant.
//
// `in` is padded to a multiple of GROUP with zeros, in weights and rows alike.
#pragma once

#include <cmath>

#include "simd.hpp"

namespace specdec {

constexpr int ROWS = 16;   // rows of a tile
constexpr int GROUP = 32;  // input features that share a scale
constexpr int AHEAD = 8192;  // bytes from what is multiplied to what is fetched (docs/lab-log.md)

inline int padded(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// fp32 weights and rows: panel [in][LANES], tile [in/LANES][ROWS][LANES].
struct F32 {
    static int64_t panel_bytes(int in) { return (int64_t)in * LANES * 4; }
    static int64_t tile_bytes(int in) { return (int64_t)in * ROWS * 4; }

    static void pack(const float *row, int in, int lane, uint8_t *panel) {
        float *out = (float *)panel;
        for (int i = 0; i < in; i++) out[i * LANES + lane] = row[i];
    }

    static void unpack(const uint8_t *panel, int in, int lane, float *row) {
        const float *from = (const float *)panel;
        for (int i = 0; i < in; i++) row[i] = from[i * LANES + lane];
    }

    static void prepare(const float *x, int in, int row, uint8_t *tile) {
        float *out = (float *)tile + row * LANES;
        for (int i = 0; i < in; i += LANES) store(out + i * ROWS, load<f32x16>(x + i));
    }

    template <int M>
    static void product(const uint8_t *panel, const uint8_t *tile, int in, f32x16 *out) {
        f32x16 acc[M] = {};
        const float *w = (const float *)panel, *x = (const float *)tile;
        for (int i = 0; i < in; i += LANES, x += ROWS * LANES)
            for (int j = 0; j < LANES; j++, w += LANES) {
                const f32x16 weight = load<f32x16>(w);
                __builtin_prefetch((const uint8_t *)w + AHEAD, 0, 2);
                UNROLLED for (int r = 0; r < M; r++)
                    acc[r] = fma(weight, splat(x[r * LANES + j]), acc[r]);
            }
        for (int r = 0; r < M; r++) out[r] = acc[r];
    }
};

// Rows in bf16, for weights in bf16 and in integers. A group of a row is a cache line of its own:
// threads that prepare neighbouring rows do not write to the same lines.
template <bool HAS_SUMS>
struct BF16Rows {
    struct Group {
        uint32_t pairs[ROWS][GROUP / 2];
        float sum[ROWS];  // of the group's features; for integer formats only
    };

    static int64_t tile_bytes(int in) { return (int64_t)(in / GROUP) * (int64_t)sizeof(Group); }

    static void prepare(const float *x, int in, int row, uint8_t *tile) {
        Group *group = (Group *)tile;
        for (int i = 0; i < in; i += GROUP, group++) {
            const u16x16 low = narrow_bf16(load<f32x16>(x + i));
            const u16x16 high = narrow_bf16(load<f32x16>(x + i + LANES));
            store(group->pairs[row], low);
            store(group->pairs[row] + LANES / 2, high);
            if constexpr (HAS_SUMS) group->sum[row] = sum(widen_bf16(low) + widen_bf16(high));
        }
    }
};

// bf16 weights: panel [in/2][LANES][2].
struct BF16 : BF16Rows<false> {
    static int64_t panel_bytes(int in) { return (int64_t)in * LANES * 2; }

    static void pack(const float *row, int in, int lane, uint8_t *panel) {
        uint32_t *out = (uint32_t *)panel;
        for (int i = 0; i < in; i += 2) out[i / 2 * LANES + lane] = bf16_pair(row[i], row[i + 1]);
    }

    static void unpack(const uint8_t *panel, int in, int lane, float *row) {
        const uint32_t *from = (const uint32_t *)panel;
        for (int i = 0; i < in; i += 2) {
            const uint32_t pair = from[i / 2 * LANES + lane];
            row[i] = from_bf16((uint16_t)pair);
            row[i + 1] = from_bf16((uint16_t)(pair >> 16));
        }
    }

    template <int M>
    static void product(const uint8_t *panel, const uint8_t *tile, int in, f32x16 *out) {
        f32x16 acc[M] = {};
        const Group *group = (const Group *)tile;
        for (int i = 0; i < in; i += GROUP, group++)
            for (int j = 0; j < GROUP / 2; j++, panel += sizeof(u32x16)) {
                const u32x16 weights = load<u32x16>(panel);
                __builtin_prefetch(panel + AHEAD, 0, 2);
                UNROLLED for (int r = 0; r < M; r++)
                    acc[r] = dot_bf16(acc[r], weights, splat_u(group->pairs[r][j]));
            }
        for (int r = 0; r < M; r++) out[r] = acc[r];
    }
};

// Weights of integers times a scale per group. They become bf16, exactly, when they are used:
// activations keep their precision, and only the bytes read are fewer.
template <class R>
struct Integers : BF16Rows<true> {
    using Record = R;
    using typename BF16Rows<true>::Group;

    static int64_t panel_bytes(int in) { return (int64_t)(in / GROUP) * (int64_t)sizeof(Record); }

    static void pack(const float *row, int in, int lane, uint8_t *panel) {
        Record *record = (Record *)panel;
        for (int i = 0; i < in; i += GROUP) (record++)->pack(row + i, lane);
    }

    // The integers of a GGUF file, as they are.
    static void take_gguf(const uint8_t *blocks, int in, int lane, uint8_t *panel) {
        Record *record = (Record *)panel;
        for (int i = 0; i < in; i += GROUP, blocks += Record::GGUF_BYTES)
            (record++)->take_gguf(blocks, lane);
    }

    static void unpack(const uint8_t *panel, int in, int lane, float *row) {
        const Record *record = (const Record *)panel;
        for (int i = 0; i < in; i += GROUP) (record++)->unpack(row + i, lane);
    }

    template <int M>
    static void product(const uint8_t *panel, const uint8_t *tile, int in, f32x16 *out) {
        f32x16 acc[M] = {};
        const Record *record = (const Record *)panel;
        const Group *group = (const Group *)tile;
        for (int i = 0; i < in; i += GROUP, record++, group++) {
            for (size_t k = 0; k < sizeof(Record); k += 64)
                __builtin_prefetch((const uint8_t *)record + AHEAD + k, 0, 2);
            u32x16 weights[GROUP / 2];
            record->widen(weights);
            f32x16 part[M] = {};
            for (int j = 0; j < GROUP / 2; j++)
                UNROLLED for (int r = 0; r < M; r++)
                    part[r] = dot_bf16(part[r], weights[j], splat_u(group->pairs[r][j]));
            const auto scale = record->scale();
            UNROLLED for (int r = 0; r < M; r++)
                acc[r] = scale.apply(part[r], group->sum[r], acc[r]);
        }
        for (int r = 0; r < M; r++) out[r] = acc[r];
    }
};

constexpr float FP16_MAX = 65504.0f;

// 8-bit weights w = scale * q, q in -127..127 (the values of GGUF's Q8_0).
struct Record8 {
    int8_t bytes[GROUP / 2][LANES][2];
    uint16_t scales[LANES];  // fp16

    void pack(const float *w, int lane) {
        float most = 0;
        for (int j = 0; j < GROUP; j++) most = std::fmax(most, std::fabs(w[j]));
        scales[lane] = to_fp16(std::fmin(most / 127.0f, FP16_MAX));
        const float scale = from_fp16(scales[lane]);
        for (int j = 0; j < GROUP; j++) {
            const float q = scale > 0 ? std::nearbyint(w[j] / scale) : 0.0f;
            bytes[j / 2][lane][j % 2] = (int8_t)std::fmin(std::fmax(q, -127.0f), 127.0f);
        }
    }

    static constexpr int GGUF_BYTES = 34;  // Q8_0: scale, bytes

    void take_gguf(const uint8_t *block, int lane) {
        scales[lane] = load<uint16_t>(block);
        for (int j = 0; j < GROUP; j++) bytes[j / 2][lane][j % 2] = (int8_t)block[2 + j];
    }

    void unpack(float *w, int lane) const {
        const float scale = from_fp16(scales[lane]);
        for (int j = 0; j < GROUP; j++) w[j] = scale * (float)bytes[j / 2][lane][j % 2];
    }

    void widen(u32x16 *weights) const {
        UNROLLED for (int j = 0; j < GROUP / 2; j++) weights[j] = widen_bytes(&bytes[j][0][0]);
    }

    struct Scale {
        f32x16 factor;
        f32x16 apply(f32x16 part, float, f32x16 acc) const { return fma(part, factor, acc); }
    };

    Scale scale() const { return {widen_fp16(scales)}; }
};

// 4-bit weights w = scale * q + least, q in 0..15 (the values of GGUF's Q4_1). A word has eight
// features of one output: nibble n of its lower half is feature 2n, of its upper half 2n + 1.
struct Record4 {
    uint32_t words[GROUP / 8][LANES];
    uint16_t scales[LANES], leasts[LANES];  // fp16

    static int shift(int feature) { return feature % 8 / 2 * 4 + feature % 2 * 16; }

    void put(int lane, int feature, uint32_t q) {
        uint32_t &word = words[feature / 8][lane];
        word = (word & ~(15u << shift(feature))) | q << shift(feature);
    }

    void pack(const float *w, int lane) {
        float low = w[0], high = w[0];
        for (int j = 1; j < GROUP; j++) {
            low = std::fmin(low, w[j]);
            high = std::fmax(high, w[j]);
        }
        scales[lane] = to_fp16(std::fmin((high - low) / 15.0f, FP16_MAX));
        leasts[lane] = to_fp16(std::fmin(std::fmax(low, -FP16_MAX), FP16_MAX));
        const float scale = from_fp16(scales[lane]), least = from_fp16(leasts[lane]);
        for (int j = 0; j < GROUP; j++) {
            const float q = scale > 0 ? std::nearbyint((w[j] - least) / scale) : 0.0f;
            put(lane, j, (uint32_t)std::fmin(std::fmax(q, 0.0f), 15.0f));
        }
    }

    static constexpr int GGUF_BYTES = 20;  // Q4_1: scale, least, two values in each of 16 bytes

    void take_gguf(const uint8_t *block, int lane) {
        scales[lane] = load<uint16_t>(block);
        leasts[lane] = load<uint16_t>(block + 2);
        for (int j = 0; j < GROUP; j++)
            put(lane, j, block[4 + j % 16] >> (j < 16 ? 0 : 4) & 15u);
    }

    void unpack(float *w, int lane) const {
        const float scale = from_fp16(scales[lane]), least = from_fp16(leasts[lane]);
        for (int j = 0; j < GROUP; j++)
            w[j] = scale * (float)(words[j / 8][lane] >> shift(j) & 15u) + least;
    }

    // As 128 + q, whose bf16 is 128's with q in the lowest bits.
    void widen(u32x16 *weights) const {
        const u32x16 nibbles = splat_u(0x000f000fu), bias = splat_u(0x43004300u);
        UNROLLED for (int j = 0; j < GROUP / 2; j++)
            weights[j] = (load<u32x16>(words[j / 4]) >> (j % 4 * 4) & nibbles) | bias;
    }

    struct Scale {
        f32x16 factor, rest;
        f32x16 apply(f32x16 part, float sum, f32x16 acc) const {
            return fma(part, factor, fma(splat(sum), rest, acc));
        }
    };

    Scale scale() const {
        const f32x16 factor = widen_fp16(scales);
        return {factor, fma(factor, splat(-128.0f), widen_fp16(leasts))};
    }
};

using Q8 = Integers<Record8>;
using Q4 = Integers<Record4>;

}  // namespace specdec
