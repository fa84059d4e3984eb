// Vectors of sixteen floats, and the operations that all the rest is written in.
//
// GCC's and Clang's vector types compile for any processor; operations with an instruction of
// their own on AVX-512 use it. Every operation has one rounding behaviour per build, and nothing
// is contracted or reassociated by the compiler (-ffp-contract=off, no -ffast-math): that is what
// row invariance rests on.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Before a loop of fixed length whose sums must stay in registers.
#define UNROLLED _Pragma("GCC unroll 16")

namespace specdec {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

template <class T, class P>
inline T load(const P *p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class T, class P>
inline void store(P *p, T v) {
    std::memcpy(p, &v, sizeof v);
}

inline f32x16 splat(float x) { return f32x16{} + x; }
inline u32x16 splat_u(uint32_t x) { return u32x16{} + x; }

// a * b + c, rounded once.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    f32x16 out;
    for (int i = 0; i < LANES; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
#endif
}

inline f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Lanes are folded in a fixed tree, so the result depends on the lanes alone.
template <class Fold>
inline float reduce(f32x16 v, Fold fold) {
    v = fold(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = fold(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
    v = fold(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
    v = fold(v, __builtin_shufflevector(v, v, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0));
    return v[0];
}

inline float sum(f32x16 v) {
    return reduce(v, [](f32x16 a, f32x16 b) { return a + b; });
}

inline float largest(f32x16 v) { return reduce(v, maximum); }

inline bool any(i32x16 mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
    int32_t lanes = 0;
    for (int i = 0; i < LANES; i++) lanes |= mask[i];
    return lanes;
#endif
}

// a * b of 32-bit words: the lower halves, and in `high` the upper ones.
inline u32x16 multiply(u32x16 a, uint32_t b, u32x16 &high) {
#if defined(__AVX512F__)
    const __m512i factor = _mm512_set1_epi32((int)b);
    const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    high = (u32x16)_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
#else
    for (int i = 0; i < LANES; i++) high[i] = (uint32_t)((uint64_t)a[i] * b >> 32);
#endif
    return a * b;
}

// Lane 4 q + k of words[j] to lane 4 q + j of words[k].
inline void transpose_quarters(u32x16 words[4]) {
    const auto low = [](u32x16 a, u32x16 b) {
        return __builtin_shufflevector(
            a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
        );
    };
    const auto high = [](u32x16 a, u32x16 b) {
        return __builtin_shufflevector(
            a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
        );
    };
    const u32x16 a = low(words[0], words[2]), b = low(words[1], words[3]);
    const u32x16 c = high(words[0], words[2]), d = high(words[1], words[3]);
    words[0] = low(a, b), words[1] = high(a, b), words[2] = low(c, d), words[3] = high(c, d);
}

// exp(x): 2^n times a polynomial of degree 6 on [-ln2/2, ln2/2] (relative error 2e-7). 0 for -inf
// and below -104; exp(88) above 88.
inline f32x16 exp(f32x16 x) {
#if defined(__AVX512F__)
    const __m512 bounded = _mm512_max_ps(  // of a NaN and a number, the second operand
        _mm512_set1_ps(-150.0f), _mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x)
    );
    const f32x16 n = (f32x16)_mm512_roundscale_ps(bounded * _mm512_set1_ps(1.44269504f), 0);
    x = (f32x16)bounded;
#else
    const f32x16 low = splat(-87.0f), high = splat(88.0f);
    const i32x16 is_low = x < low;
    x = is_low ? low : x;
    x = x > high ? high : x;
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 n = fma(x, splat(1.44269504f), magic) - magic;
#endif
    f32x16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.3981999507e-3f);
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
#if defined(__AVX512F__)
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const f32x16 power = (f32x16)((__builtin_convertvector(n, i32x16) + 127) << 23);
    return is_low ? f32x16{} : p * power;
#endif
}

// ---- bf16: the upper half of a float; two in a 32-bit word, the first in the lower half.

// Round to nearest even.
inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 64);  // NaN stays NaN
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline uint32_t bf16_pair(float first, float second) {
    return to_bf16(first) | (uint32_t)to_bf16(second) << 16;
}

inline f32x16 widen_bf16(u16x16 x) {
    return (f32x16)(__builtin_convertvector(x, u32x16) << 16);
}

inline u16x16 narrow_bf16(f32x16 x) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    const u32x16 bits = (u32x16)x;
    const u32x16 rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    const u32x16 quiet = bits >> 16 | 64;
    const i32x16 is_nan = (bits & 0x7fffffffu) > splat_u(0x7f800000u);
    return __builtin_convertvector((u32x16)(is_nan ? (i32x16)quiet : (i32x16)rounded), u16x16);
#endif
}

// acc + the dot product of two pairs of bf16 in every lane.
inline f32x16 dot_bf16(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    const u32x16 upper = splat_u(0xffff0000u);
    acc = fma((f32x16)(a & upper), (f32x16)(b & upper), acc);
    return fma((f32x16)(a << 16), (f32x16)(b << 16), acc);
#endif
}

// Thirty-two signed bytes as pairs of bf16, which holds them exactly.
inline u32x16 widen_bytes(const int8_t *p) {
#if defined(__AVX512BF16__)
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p + LANES)));
    return (u32x16)_mm512_cvtne2ps_pbh(high, low);
#else
    const u32x16 words = __builtin_convertvector(load<u16x16>(p), u32x16);  // a pair of bytes each
    const i32x16 first = (i32x16)(words << 24) >> 24, second = (i32x16)(words << 16) >> 24;
    const u32x16 low = (u32x16)__builtin_convertvector(first, f32x16);
    const u32x16 high = (u32x16)__builtin_convertvector(second, f32x16);
    return low >> 16 | (high & 0xffff0000u);
#endif
}

// ---- fp16, in which the scales of integer weights are stored.

inline float from_fp16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    uint32_t bits;
    float out;
    if (rest >= 0x7c00u) {
        bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    } else if (rest >= 0x400u) {
        bits = sign | (rest + 0x1c000u) << 13;
    } else {
        out = (float)rest * 5.9604644775390625e-8f;  // 2^-24: fp16's smallest step
        return sign ? -out : out;
    }
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest even; beyond fp16's range, infinity.
inline uint16_t to_fp16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) {
        const float step = magnitude * 16777216.0f + 12582912.0f;  // rounds to multiples of 2^-24
        uint32_t rounded;
        std::memcpy(&rounded, &step, 4);
        return (uint16_t)(sign | (rounded & 0x7fffu));
    }
    return (uint16_t)(sign | ((bits + 0xfffu + (bits >> 13 & 1)) - 0x38000000u) >> 13);
}

inline f32x16 widen_fp16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps((__m256i)load<u16x16>(p));
#else
    f32x16 out;
    for (int i = 0; i < LANES; i++) out[i] = from_fp16(p[i]);
    return out;
#endif
}

}  // namespace specdec
