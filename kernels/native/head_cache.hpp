// HeadCache: the keys or the values of one kv head of one layer, as attention reads them.
//
// Slots of a block lie in tiles of KEYS. Attention needs sixteen keys side by side, and wants bf16
// and 8-bit elements in pairs, so with PAIR elements together (1 in fp32, 2 otherwise) a tile is
//   keys    [head_dim / PAIR][KEYS][PAIR]
//   values  [KEYS / PAIR][head_dim][PAIR]
// 8-bit elements have one scale per slot, absolute maximum / 127. Neighbouring blocks are one run of
// memory per head.
#pragma once

#include <cmath>

#include "model.hpp"
#include "simd.hpp"

namespace specdec {

constexpr int KEYS = LANES;  // keys of a tile

inline int element_size(KVFormat format) {
    return format == KVFormat::f32 ? 4 : format == KVFormat::bf16 ? 2 : 1;
}

// The elements and, for 8 bits, the scales of sixteen slots.
struct Tile {
    uint8_t *data;
    float *scales;
};

class HeadCache {
public:
    HeadCache(const Cache &cache, const Model &model, int layer, bool is_value, int head)
        : cache(cache), dim(model.head_dim), size(element_size(cache.format)), is_value(is_value),
          first(((int64_t)(layer * 2 + is_value) * model.num_kv_heads + head) * cache.num_blocks *
                cache.block_size) {}

    // The tile that holds `slot`.
    Tile tile(int slot) const {
        const int64_t place = first + slot / KEYS * KEYS;
        return {cache.data + place * dim * size, cache.scales ? cache.scales + place : nullptr};
    }

    // Have a tile on its way from memory.
    void fetch(int slot) const {
        const uint8_t *from = tile(slot).data;
        for (int i = 0; i < KEYS * dim * size; i += 64) __builtin_prefetch(from + i);
    }

    void write(int slot, const float *x) const {
        const Tile to = tile(slot);
        const int key = slot % KEYS;
        switch (cache.format) {
            case KVFormat::f32:
                for (int d = 0; d < dim; d++) ((float *)to.data)[at(key, d)] = x[d];
                return;
            case KVFormat::bf16:
                for (int d = 0; d < dim; d++) ((uint16_t *)to.data)[at(key, d)] = to_bf16(x[d]);
                return;
            case KVFormat::q8: {
                float most = 0;
                for (int d = 0; d < dim; d++)  // a NaN stays
                    if (std::fabs(x[d]) > most || x[d] != x[d]) most = std::fabs(x[d]);
                const bool is_normal = most >= 1e-35f && most < __builtin_inff();
                const float inverse = is_normal ? 127.0f / most : 0.0f;
                for (int d = 0; d < dim; d++)
                    ((int8_t *)to.data)[at(key, d)] =
                        is_normal ? (int8_t)std::nearbyint(x[d] * inverse) : 0;
                to.scales[key] = most / 127.0f;
            }
        }
    }

    // Copy a whole tile.
    void copy(Tile from, Tile to) const {
        std::memcpy(to.data, from.data, (size_t)KEYS * dim * size);
        if (from.scales) std::memcpy(to.scales, from.scales, KEYS * sizeof(float));
    }

    // Copy one key or value between tiles, of the cache or like it.
    void copy(Tile from, int from_key, Tile to, int to_key) const {
        if (size == 4) copy_elements<uint32_t>(from, from_key, to, to_key);
        else if (size == 2) copy_elements<uint16_t>(from, from_key, to, to_key);
        else copy_elements<uint8_t>(from, from_key, to, to_key);
        if (from.scales) to.scales[to_key] = from.scales[from_key];
    }

private:
    const Cache &cache;
    const int dim, size;
    const bool is_value;
    const int64_t first;

    template <class Element>
    void copy_elements(Tile from, int from_key, Tile to, int to_key) const {
        for (int d = 0; d < dim; d++)
            ((Element *)to.data)[at(to_key, d)] = ((const Element *)from.data)[at(from_key, d)];
    }

    // Where element `d` of a key or value lies in a tile.
    int at(int key, int d) const {
        const int pair = cache.format == KVFormat::f32 ? 1 : 2;
        return is_value ? key / pair * dim * pair + d * pair + key % pair
                        : d / pair * KEYS * pair + key * pair + d % pair;
    }
};

}  // namespace specdec
