// Sampling: the token of a row of logits, as specdec/sampling.py chooses it, bit by bit.
//
// y = argmax(logit * factor + noise) over the tokens that survive truncation. Few tokens can win:
// noise is never above MOST_NOISE, and a word of the generator bounds its own noise in a few
// instructions, so that hardly any noise is computed. Truncation is looked at last, for most rows'
// winner survives it.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "noise.hpp"

namespace specdec {

constexpr float MOST_NOISE = 22.9f;  // -log(-log1p(-2^-33)) = 22.87
constexpr int32_t UNDECIDED = -1;

typedef double f64x16 __attribute__((vector_size(128)));

// How a row is sampled. Greedy where `factor`, the inverse temperature, is 0. No truncation: `top_k`
// 0, `top_p` 1, `min_p_gap` (-log(min_p)) infinite.
struct Draw {
    uint64_t seed;
    uint32_t position;
    float factor;
    int32_t top_k;
    float min_p_gap;
    double top_p;
};

// Never below the noise of a word: -log(u) by the straight line through each octave, which is below
// the logarithm of base 2, and more than the rounding of both.
inline f32x16 noise_bound(u32x16 words) {
    const f32x16 x = __builtin_convertvector(words, f32x16) + 0.5f;
    // 159 ln 2 = 110.2104, and ln 2 / 2^23: bits / 2^23 is at most 127 + log2.
    return 110.211f - __builtin_convertvector((i32x16)x, f32x16) * 0x1.62e430p-24f;
}

class Row {
public:
    static constexpr int BLOCK = 4 * LANES;  // tokens of one call of the generator

    // `maxima` is memory to work in.
    Row(const float *logits, int32_t size, float factor, std::vector<float> &maxima)
        : logits(logits), size(size), num_blocks((size + BLOCK - 1) / BLOCK), factor(factor),
          maxima(maxima) {
        maxima.resize(num_blocks);
        f32x16 all = splat(-INFINITY);
        i32x16 is_nan = {};
        for (int b = 0; b < num_blocks; b++) {
            f32x16 x[4], most = splat(-INFINITY);
            scaled(b, x);
            for (int k = 0; k < 4; k++) {
                is_nan |= x[k] != x[k];
                most = maximum(most, x[k]);
            }
            all = maximum(all, most);
            maxima[b] = largest(most);
        }
        top = any(is_nan) ? NAN : largest(all);
    }

    bool is_sane() const { return std::isfinite(top); }

    // The lowest of the likeliest tokens.
    int32_t likeliest() const {
        int b = 0;
        while (maxima[b] != top) b++;
        int32_t id = b * BLOCK;
        while (logits[id] * factor != top) id++;
        return id;
    }

    int32_t choose(const Draw &draw) const {
        int32_t id = noisiest(draw, -INFINITY);
        const bool has_nucleus = draw.top_p < 1;
        if (!has_nucleus && !draw.top_k && std::isinf(draw.min_p_gap)) return id;
        // The likeliest tokens survive whatever is cut.
        if (value(id) == top) return id;
        const float last = 0 < draw.top_k && draw.top_k < size ? ranked(draw.top_k) : -INFINITY;
        const double most = has_nucleus ? draw.top_p * mass(last) : INFINITY;
        for (float least = std::max(last, top - draw.min_p_gap);; id = noisiest(draw, least)) {
            const float own = value(id);
            if (own < least) continue;
            if (!has_nucleus || own == top) return id;
            const float next = std::nextafter(own, INFINITY);
            const double above = mass(next);
            if (above < most * (1 - UNSURE)) return id;
            if (above <= most * (1 + UNSURE)) return UNDECIDED;
            least = next;
        }
    }

private:
    // Of a sum of probabilities: more than what the rounding of exponentials, here or elsewhere, and
    // leaving out those below e^-LEAST_MASS can amount to.
    static constexpr double UNSURE = 1e-5;
    static constexpr float LEAST_MASS = 32;

    const float *logits;
    const int32_t size, num_blocks;
    const float factor;
    std::vector<float> &maxima;  // of the scaled logits, per block
    float top;

    float value(int32_t id) const { return logits[id] * factor; }

    // Scaled logits of a block; what is no token is at -inf.
    void scaled(int b, f32x16 x[4]) const {
        const float *from = logits + (int64_t)b * BLOCK;
        float tail[BLOCK];
        if (size - b * BLOCK < BLOCK) {
            std::fill(tail, tail + BLOCK, -INFINITY);
            std::copy(from, logits + size, tail);
            from = tail;
        }
        UNROLLED for (int k = 0; k < 4; k++) x[k] = load<f32x16>(from + k * LANES) * factor;
    }

    // argmax(scaled + noise) over tokens whose scaled logit is at least `least`, which is not above
    // `top`; the lowest token of equal sums.
    int32_t noisiest(const Draw &draw, float least) const {
        int64_t best_id = likeliest(), position = draw.position;
        float best;
        gumbel_of(draw.seed, &position, &best_id, 1, &best);
        best = top + best;
        for (int b = 0; b < num_blocks; b++) {
            // Rounded addition is monotonous: these comparisons let nobody win but lose.
            if (maxima[b] + MOST_NOISE < best || maxima[b] < least) continue;
            u32x16 words[4];
            f32x16 x[4];
            token_words((uint32_t)b, draw.position, draw.seed, words);
            scaled(b, x);
            for (int k = 0; k < 4; k++) {
                if (!any((x[k] + noise_bound(words[k]) >= best) & (x[k] >= least))) continue;
                const f32x16 score = x[k] + gumbel(words[k]);
                for (int lane = 0; lane < LANES; lane++) {
                    const int64_t id = b * BLOCK + k * LANES + lane;
                    if (x[k][lane] < least || score[lane] < best) continue;
                    if (score[lane] == best && id > best_id) continue;
                    best = score[lane];
                    best_id = id;
                }
            }
        }
        return (int32_t)best_id;
    }

    // The k-th largest scaled logit, or -inf where fewer are above -inf.
    float ranked(int32_t k) const {
        float least = std::numeric_limits<float>::lowest();
        std::vector<float> kept;
        if (k <= num_blocks) {  // so many blocks have at least one token each that is as large
            kept = maxima;
            std::nth_element(kept.begin(), kept.begin() + k - 1, kept.end(), std::greater<>());
            least = std::max(least, kept[k - 1]);
            kept.clear();
        }
        for (int b = 0; b < num_blocks; b++) {
            if (maxima[b] < least) continue;
            for (int32_t id = b * BLOCK; id < std::min(size, (b + 1) * BLOCK); id++)
                if (value(id) >= least) kept.push_back(value(id));
        }
        if ((int64_t)kept.size() < k) return -INFINITY;
        std::nth_element(kept.begin(), kept.begin() + k - 1, kept.end(), std::greater<>());
        return kept[k - 1];
    }

    // Sum of exp(scaled - top) over tokens at or above `least`.
    double mass(float least) const {
        const float lowest = std::max(least, top - LEAST_MASS);
        f64x16 sums = {};
        for (int b = 0; b < num_blocks; b++) {
            if (maxima[b] < lowest) continue;
            f32x16 x[4], own = {};
            scaled(b, x);
            for (int k = 0; k < 4; k++) own += x[k] >= least ? exp(x[k] - top) : f32x16{};
            sums += __builtin_convertvector(own, f64x16);
        }
        double total = 0;
        for (int lane = 0; lane < LANES; lane++) total += sums[lane];
        return total;
    }
};

// The token of a row, or UNDECIDED where rounding may decide or not all logits are numbers.
inline int32_t sample(const float *logits, int32_t size, const Draw &draw) {
    static thread_local std::vector<float> maxima;
    const bool is_greedy = draw.factor == 0;
    const Row row(logits, size, is_greedy ? 1.0f : draw.factor, maxima);
    if (!row.is_sane()) return UNDECIDED;
    return is_greedy ? row.likeliest() : row.choose(draw);
}

inline bool is_finite(const float *row, int32_t size) {
    f32x16 sums = {};
    int32_t at = 0;
    for (; at + LANES <= size; at += LANES) sums += load<f32x16>(row + at) * 0.0f;
    float rest = sum(sums);
    for (; at < size; at++) rest += row[at] * 0.0f;
    return rest == 0;
}

// Nodes of a draft tree: token_ids, then parents, of which the root's is not read.
struct DraftNodes {
    const int32_t *token_ids;
    int32_t count;

    int32_t child(int32_t node, int32_t token_id) const {
        const int32_t *parents = token_ids + count;
        for (int32_t i = node + 1; i < count; i++)
            if (parents[i] == node && token_ids[i] == token_id) return i;
        return 0;
    }
};

constexpr int32_t NOT_FINITE = 0;

// From the root to children that carry the chosen tokens until there is none: how many tokens were
// chosen, at least one, or NOT_FINITE for any of the rows [count, stride], or UNDECIDED. `out` gets
// the tokens and, `count` places on, the nodes that they led to, 0 the last one.
inline int32_t walk(
    const float *rows, int64_t stride, int32_t size, DraftNodes tree, Draw draw, int32_t *out
) {
    for (int32_t i = 0; i < tree.count; i++)
        if (!is_finite(rows + i * stride, size)) return NOT_FINITE;
    int32_t node = 0, chosen = 0;
    do {
        const int32_t token_id = sample(rows + node * stride, size, draw);
        if (token_id == UNDECIDED) return UNDECIDED;
        node = tree.child(node, token_id);
        out[chosen] = token_id;
        out[tree.count + chosen++] = node;
        draw.position++;
    } while (node);
    return chosen;
}

}  // namespace specdec
