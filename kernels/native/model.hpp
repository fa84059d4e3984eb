// What the host states: the model, its KV cache and one step; native_library.py has the same.
#pragma once

#include <cstdint>

namespace specdec {

enum class Format : int32_t { f32 = 0, bf16 = 1, q8 = 2, q4 = 3 };
enum class KVFormat : int32_t { f32 = 0, bf16 = 1, q8 = 2 };

// y = x W^T + b; `panels` as `Format` lays them out (formats.hpp), `out` padded to LANES and `in` to
// GROUP; bias [out] or null.
struct Linear {
    const uint8_t *panels;
    const float *bias;
    int32_t out, in;
    Format format;
    int32_t reserved;
};

// Norms are fp32; `gate_up` alternates panels of gate and of up; `window` 0 = full attention.
struct Layer {
    Linear qkv, output, gate_up, down;
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm;  // [head_dim] or null
    int32_t window, reserved;
};

struct Model {
    const Layer *layers;
    const float *final_norm;
    Linear embedding, head;
    const float *cos, *sin;  // [max_len, head_dim], sin negative in the first half
    int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim;
    float eps, scale;
};

// [layer][key or value][kv head][block] of block_size slots, as head_cache.hpp lays them out. Scales,
// for q8 only: one float per slot of each head.
struct Cache {
    uint8_t *data;
    float *scales;
    KVFormat format;
    int32_t num_blocks, block_size, reserved;
};

// Rows [start, start + num_rows) of one request: kernels/segment.py. `blocks` is an index into
// Step.blocks; `paths` one into Step.paths, or -1 for a chain: for row i, its ancestors and itself
// in order of depth stand at paths + i * num_rows.
struct Segment {
    int32_t start, num_rows, root, blocks, paths;
};

struct Step {
    const int32_t *token_ids, *positions, *slots;  // [num_rows]
    const Segment *segments;
    const int32_t *blocks;
    const uint8_t *paths;
    const int32_t *logit_rows;
    float *logits;  // [num_logits, head.out]
    float *hidden;  // [num_logits, hidden]: the states after the last norm, which the head reads
    int32_t num_rows, num_segments, num_logits, reserved;
};

}  // namespace specdec
