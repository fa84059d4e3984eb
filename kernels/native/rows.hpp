// What happens to single rows between products: embedding, norm, activation, rotation.
#pragma once

#include "product.hpp"

namespace specdec {

inline void embed(const Linear &embedding, int token_id, float *x) {
    with_format(embedding.format, [&](auto w) {
        using W = decltype(w);
        const uint8_t *panel = embedding.panels + token_id / LANES * W::panel_bytes(embedding.in);
        W::unpack(panel, embedding.in, token_id % LANES, x);
    });
}

// out = x * weight / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019). `size` floats count for the
// mean; both buffers and the weight are padded with zeros to a multiple of LANES.
inline void rms_norm(const float *x, const float *weight, int size, float eps, float *out) {
    f32x16 squares = {};
    for (int i = 0; i < size; i += LANES) {
        const f32x16 v = load<f32x16>(x + i);
        squares = fma(v, v, squares);
    }
    const f32x16 factor = splat(1.0f / std::sqrt(sum(squares) / (float)size + eps));
    for (int i = 0; i < size; i += LANES)
        store(out + i, load<f32x16>(x + i) * factor * load<f32x16>(weight + i));
}

// silu(gate) * up
inline f32x16 silu_mul(f32x16 gate, f32x16 up) { return gate / (exp(-gate) + 1.0f) * up; }

// Rotate halves by position (Su et al. 2021), in place.
inline void rotate(float *head, const float *cos, const float *sin, int head_dim) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] + b * sin[i];
        head[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

}  // namespace specdec
