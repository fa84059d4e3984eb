// Gumbel noise: the bits of specdec/noise.py, whose formulas these are, operation by operation.
#pragma once

#include "simd.hpp"

namespace specdec {

// Philox4x32-10 with counter (first, position, 0, 0), the Gumbel stream being 0.
inline void philox(u32x16 first, u32x16 position, uint64_t seed, u32x16 words[4]) {
    u32x16 c0 = first, c1 = position, c2 = {}, c3 = {};
    uint32_t key_a = (uint32_t)seed, key_b = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        u32x16 high_a, high_b;
        const u32x16 low_a = multiply(c0, 0xD2511F53u, high_a);
        const u32x16 low_b = multiply(c2, 0xCD9E8D57u, high_b);
        c0 = high_b ^ c1 ^ key_a;
        c2 = high_a ^ c3 ^ key_b;
        c1 = low_b;
        c3 = low_a;
        key_a += 0x9E3779B9u;
        key_b += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// x = mantissa * 2^exponent with a mantissa in [sqrt(1/2), sqrt(2)).
inline void octave(f32x16 x, i32x16 &exponent, f32x16 &mantissa) {
    const i32x16 above = (i32x16)x - 0x3F3504F3;
    exponent = above >> 23;
    mantissa = (f32x16)((above & 0x7FFFFF) + 0x3F3504F3);
}

// -log((1 - below_one) * 2^exponent).
inline f32x16 negative_log(i32x16 exponent, f32x16 below_one) {
    const f32x16 ratio = below_one / (2.0f - below_one);
    const f32x16 square = ratio * ratio;
    f32x16 series = square * 0x1.31e34cp-3f;
    series = (series + 0x1.995eb6p-3f) * square;
    series = (series + 0x1.55557ap-2f) * square;
    const f32x16 twice = ratio + ratio;
    series = series * twice + twice;
    return series + __builtin_convertvector(exponent, f32x16) * -0x1.62e430p-1f;
}

inline f32x16 gumbel(u32x16 words) {
    const f32x16 uniform = (__builtin_convertvector(words, f32x16) + 0.5f) * 0x1p-32f;
    i32x16 exponent;
    f32x16 mantissa;
    octave((__builtin_convertvector(~words, f32x16) + 0.5f) * 0x1p-32f, exponent, mantissa);
    // 1 - mantissa has lost u's digits where 1 - u is in the first octave.
    const f32x16 first = negative_log(exponent, exponent < 0 ? 1.0f - mantissa : uniform);
    octave(first, exponent, mantissa);
    return negative_log(exponent, 1.0f - mantissa);
}

// Words of the 64 tokens from 64 * block on, in order: four neighbours share a call of the generator.
inline void token_words(uint32_t block, uint32_t position, uint64_t seed, u32x16 words[4]) {
    // Lanes are dealt out so that the words of tokens 16 k + 4 q + j, of group 4 k + q, lie in lane
    // 4 q + k: quarters of registers then change places within themselves.
    const u32x16 groups = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    philox(groups + 16 * block, splat_u(position), seed, words);
    transpose_quarters(words);
}

// Noise of tokens [0, count) at one position.
inline void gumbel_all(uint64_t seed, uint32_t position, int64_t count, float *out) {
    for (int64_t at = 0; at < count; at += 4 * LANES) {
        u32x16 words[4];
        token_words((uint32_t)(at / (4 * LANES)), position, seed, words);
        f32x16 noise[4];
        for (int k = 0; k < 4; k++) noise[k] = gumbel(words[k]);
        const int64_t left = count - at < 4 * LANES ? count - at : 4 * LANES;
        std::memcpy(out + at, noise, left * sizeof(float));
    }
}

// Noise of token ids[i] at positions[i].
inline void gumbel_of(
    uint64_t seed, const int64_t *positions, const int64_t *ids, int64_t count, float *out
) {
    for (int64_t at = 0; at < count; at += LANES) {
        u32x16 group = {}, position = {}, words[4], picked;
        const int left = count - at < LANES ? (int)(count - at) : LANES;
        for (int i = 0; i < left; i++) {
            group[i] = (uint32_t)(ids[at + i] >> 2);
            position[i] = (uint32_t)positions[at + i];
        }
        philox(group, position, seed, words);
        for (int i = 0; i < LANES; i++) picked[i] = words[i < left ? ids[at + i] & 3 : 0][i];
        const f32x16 noise = gumbel(picked);
        std::memcpy(out + at, &noise, left * sizeof(float));
    }
}

}  // namespace specdec
