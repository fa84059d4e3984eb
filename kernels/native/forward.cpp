// The C interface: the forward, the packing of weights, and what is done between forwards.
#include <algorithm>
#include <chrono>

#include "forward.hpp"
#include "learning.hpp"
#include "sampling.hpp"

using namespace specdec;

extern "C" {

void *specdec_open(const Model *model, int32_t num_threads) {
    return new Forward(*model, num_threads);
}

void specdec_close(void *forward) { delete (Forward *)forward; }

void specdec_forward(void *forward, const Cache *cache, const Step *step) {
    ((Forward *)forward)->run(*cache, *step);
}

// A product of the caller's own, by the forward's threads.
void specdec_multiply(
    void *forward, const Linear *linear, const float *rows, int32_t count, float *out
) {
    ((Forward *)forward)->multiply(*linear, rows, count, out);
}

// Copy keys and values between slots, all layers and heads; reads everything before it writes.
void specdec_move(
    void *forward, const Cache *cache, const int32_t *from, const int32_t *to, int32_t count
) {
    ((Forward *)forward)->move(*cache, from, to, count);
}

// Gumbel noise of tokens [0, count) at a position, and of single tokens at theirs.
void specdec_gumbel_all(uint64_t seed, int32_t position, int64_t count, float *out) {
    gumbel_all(seed, (uint32_t)position, count, out);
}

void specdec_gumbel_of(
    uint64_t seed, const int64_t *positions, const int64_t *ids, int64_t count, float *out
) {
    gumbel_of(seed, positions, ids, count, out);
}

// The token of a row of logits [size], or -1 where the caller must find it.
int32_t specdec_sample(const float *logits, int32_t size, const Draw *draw) {
    return sample(logits, size, *draw);
}

// Verify a draft tree of `count` nodes, tokens and then parents: see walk.
int32_t specdec_walk(
    const float *rows, int64_t stride, int32_t size, const int32_t *tree, int32_t count,
    const Draw *draw, int32_t *out
) {
    return walk(rows, stride, size, {tree, count}, *draw, out);
}

// Whether the rows [count, stride], of `size` numbers each, are finite, a byte per row.
void specdec_are_finite(
    const float *rows, int32_t count, int64_t stride, int32_t size, uint8_t *out
) {
    for (int32_t i = 0; i < count; i++) out[i] = is_finite(rows + i * stride, size);
}

// Which draft nodes to verify, and what became of them.
void specdec_choose(const Acceptance *known, Choice *choice) { choose(*known, *choice); }
void specdec_learn(Acceptance *known, const Choice *choice, const int32_t *came) {
    learn(*known, *choice, came);
}

// So that the caller can prove that it states the same structures: bytes of one by number.
int32_t specdec_struct_bytes(int32_t number) {
    const size_t sizes[] = {
        sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Cache), sizeof(Segment), sizeof(Step),
        sizeof(Acceptance), sizeof(Choice), sizeof(Tree), sizeof(Node), sizeof(Draw)
    };
    return (int32_t)sizes[number];
}

// Seconds that one pass over the bytes takes the team: what memory can give. The data must be
// aligned to 64 bytes, and should exceed the last cache by far.
double specdec_read(const void *data, int64_t num_bytes, int32_t num_threads) {
    constexpr int64_t PIECE = 1 << 18;
    Team team(num_threads);
    std::atomic<float> kept{0};  // so that the loads are not optimised away
    const auto start = std::chrono::steady_clock::now();
    team.run([&](Team::Member &me) {
        me.each((int)(num_bytes / PIECE), [&](int i) {
            const uint8_t *from = (const uint8_t *)data + i * PIECE;
            f32x16 sums[4] = {};
            for (int64_t at = 0; at < PIECE; at += 256)
                UNROLLED for (int k = 0; k < 4; k++) sums[k] += load<f32x16>(from + at + 64 * k);
            kept.store(sum(sums[0] + sums[1] + sums[2] + sums[3]), std::memory_order_relaxed);
        });
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Whether a register holds LANES floats; without, everything is right and slow.
int32_t specdec_has_wide_registers() {
#if defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

int64_t specdec_panel_bytes(Format format, int32_t in) {
    int64_t bytes = 0;
    with_format(format, [&](auto w) { bytes = decltype(w)::panel_bytes(padded(in, GROUP)); });
    return bytes;
}

// Pack rows [0, count) of a weight, fp32 [count, in], as output features from `first` on.
void specdec_pack(
    Format format, const float *rows, int32_t count, int32_t in, int32_t first, uint8_t *panels
) {
    const int width = padded(in, GROUP);
    std::vector<float> row(width);
    with_format(format, [&](auto w) {
        using W = decltype(w);
        for (int i = 0; i < count; i++) {
            std::copy(rows + (int64_t)i * in, rows + (int64_t)(i + 1) * in, row.begin());
            const int feature = first + i;
            W::pack(row.data(), width, feature % LANES,
                    panels + feature / LANES * W::panel_bytes(width));
        }
    });
}

// Pack rows [0, count) of a weight in GGUF's Q8_0 (for q8) or Q4_1 (for q4) blocks likewise; `in` is
// a multiple of GROUP.
void specdec_pack_gguf(
    Format format, const uint8_t *rows, int32_t count, int32_t in, int32_t first, uint8_t *panels
) {
    const auto pack = [&]<class Record>(Integers<Record>) {
        using W = Integers<Record>;
        for (int i = 0; i < count; i++)
            W::take_gguf(
                rows + (int64_t)i * (in / GROUP) * Record::GGUF_BYTES, in, (first + i) % LANES,
                panels + (first + i) / LANES * W::panel_bytes(in)
            );
    };
    if (format == Format::q8) pack(Q8{});
    else if (format == Format::q4) pack(Q4{});
}

}  // extern "C"
