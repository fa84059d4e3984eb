// The target forward on a CPU, and its weights' packing, behind a C interface.
#include <algorithm>
#include <chrono>

#include "attention.hpp"
#include "learning.hpp"
#include "noise.hpp"

namespace specdec {

// A matrix of fp32 rows, each padded with zeros to a multiple of GROUP.
class Buffer {
public:
    void reserve(int rows, int columns) {
        width = padded(columns, GROUP);
        const size_t needed = (size_t)rows * width + LANES;
        if (memory.size() < needed) memory.assign(needed, 0.0f);  // the padding stays zero
    }

    float *row(int i) {
        float *base = (float *)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
        return base + (int64_t)i * width;
    }

    int width = 0;

private:
    std::vector<float> memory;
};

class Forward {
public:
    Forward(const Model &model, int num_threads) : model(model), team(num_threads) {}

    void run(const Cache &cache, const Step &step) {
        const int rows = step.num_rows;
        const Layer &layer = model.layers[0];
        x.reserve(rows, model.hidden);
        normed.reserve(team.size(), model.hidden);
        qkv.reserve(rows, layer.qkv.out);
        attended.reserve(rows, model.num_heads * model.head_dim);
        activated.reserve(rows, model.intermediate);
        with_format(layer.qkv.format, [&](auto w) {
            const int widest = std::max(std::max(x.width, attended.width), activated.width);
            tiles.reserve(rows, decltype(w)::tile_bytes(widest));
        });
        with_format(model.head.format, [&](auto w) {
            tiles.reserve(step.num_logits, decltype(w)::tile_bytes(x.width));
        });
        plans.clear();
        for (int i = 0; i < model.num_layers; i++) {
            const int window = model.layers[i].window;
            if (!plan(window)) plans.push_back({window, {model, step, window, team.size()}});
        }
        size_t num_floats = 0;
        for (const Plan &p : plans)
            num_floats = std::max(num_floats, (size_t)p.plan.num_parts * part_size());
        if (parts.size() < num_floats) parts.resize(num_floats);
        team.run([&](Team::Member &me) { layers(me, cache, step); });
    }

    // out[r] = rows[r] W^T + b for rows [count, linear.in]; out [count, linear.out].
    void multiply(const Linear &linear, const float *rows, int count, float *out) {
        with_format(linear.format, [&](auto w) {
            tiles.reserve(count, decltype(w)::tile_bytes(linear.in));
        });
        team.run([&](Team::Member &me) {
            me.each(count, [&](int r) { tiles.put(linear, r, rows + (int64_t)r * linear.in); });
            product<1>(me, linear, tiles, count, [&](int r, int panel, const f32x16 *sums) {
                store(out + (int64_t)r * linear.out + panel * LANES, sums[0]);
            });
        });
    }

    void move(const Cache &cache, const int32_t *from, const int32_t *to, int count) {
        const int tile_bytes = KEYS * model.head_dim * element_size(cache.format);
        const int num_tiles = padded(count, KEYS) / KEYS;
        std::vector<uint8_t> data((size_t)num_tiles * tile_bytes);
        std::vector<float> scales((size_t)num_tiles * KEYS);
        for (int i = 0; i < model.num_layers * 2 * model.num_kv_heads; i++) {
            const int layer = i / (2 * model.num_kv_heads), head = i % model.num_kv_heads;
            const HeadCache keys(cache, model, layer, i / model.num_kv_heads % 2, head);
            const auto kept = [&](int k) {
                return Tile{&data[(size_t)k / KEYS * tile_bytes],
                            cache.scales ? &scales[(size_t)k / KEYS * KEYS] : nullptr};
            };
            for (int k = 0; k < count; k++)
                keys.copy(keys.tile(from[k]), from[k] % KEYS, kept(k), k % KEYS);
            for (int k = 0; k < count; k++)
                keys.copy(kept(k), k % KEYS, keys.tile(to[k]), to[k] % KEYS);
        }
    }

private:
    struct Plan {
        int window;
        AttentionPlan plan;
    };

    const Model model;
    Team team;
    Buffer x, normed, qkv, attended, activated;
    Tiles tiles;
    std::vector<Plan> plans;
    std::vector<float> parts;

    const AttentionPlan *plan(int window) const {
        for (const Plan &p : plans)
            if (p.window == window) return &p.plan;
        return nullptr;
    }

    size_t part_size() const {
        const int ratio = model.num_heads / model.num_kv_heads;
        return (size_t)std::max(MAX_QUERIES, ratio) * (2 + model.head_dim);
    }

    void layers(Team::Member &me, const Cache &cache, const Step &step) {
        const int rows = step.num_rows;
        me.each(rows, [&](int r) { embed(model.embedding, step.token_ids[r], x.row(r)); });
        for (int i = 0; i < model.num_layers; i++) {
            const Layer &layer = model.layers[i];
            norm(me, layer.input_norm, layer.qkv, rows);
            product<1>(me, layer.qkv, tiles, rows, [&](int r, int panel, const f32x16 *sums) {
                store(qkv.row(r) + panel * LANES, sums[0]);
            });
            rotate_and_write(me, layer, i, cache, step);
            const bool is_last = i + 1 == model.num_layers;
            if (is_last && !step.num_logits) return;  // keys and values were all that was wanted
            switch (cache.format) {
                case KVFormat::f32: attend<KVFormat::f32>(me, i, cache, step); break;
                case KVFormat::bf16: attend<KVFormat::bf16>(me, i, cache, step); break;
                case KVFormat::q8: attend<KVFormat::q8>(me, i, cache, step); break;
            }
            me.each(rows, [&](int r) { tiles.put(layer.output, r, attended.row(r)); });
            add_product(me, layer.output, rows);
            norm(me, layer.mlp_norm, layer.gate_up, rows);
            product<2>(me, layer.gate_up, tiles, rows, [&](int r, int panel, const f32x16 *sums) {
                store(activated.row(r) + panel / 2 * LANES, silu_mul(sums[0], sums[1]));
            });
            me.each(rows, [&](int r) { tiles.put(layer.down, r, activated.row(r)); });
            add_product(me, layer.down, rows);
        }
        me.each(step.num_logits, [&](int i) {
            float *out = normed.row(me.index);
            rms_norm(x.row(step.logit_rows[i]), model.final_norm, model.hidden, model.eps, out);
            std::copy(out, out + model.hidden, step.hidden + (int64_t)i * model.hidden);
            tiles.put(model.head, i, out);
        });
        product<1>(
            me, model.head, tiles, step.num_logits,
            [&](int r, int panel, const f32x16 *sums) {
                store(step.logits + (int64_t)r * model.head.out + panel * LANES, sums[0]);
            }
        );
    }

    void norm(Team::Member &me, const float *weight, const Linear &next, int rows) {
        me.each(rows, [&](int r) {
            float *out = normed.row(me.index);
            rms_norm(x.row(r), weight, model.hidden, model.eps, out);
            tiles.put(next, r, out);
        });
    }

    void add_product(Team::Member &me, const Linear &linear, int rows) {
        product<1>(me, linear, tiles, rows, [&](int r, int panel, const f32x16 *sums) {
            float *to = x.row(r) + panel * LANES;
            store(to, load<f32x16>(to) + sums[0]);
        });
    }

    // Norm and rotate queries and keys in place, and write keys and values to the cache.
    void rotate_and_write(
        Team::Member &me, const Layer &layer, int index, const Cache &cache, const Step &step
    ) {
        const int dim = model.head_dim, num_q = model.num_heads, num_kv = model.num_kv_heads;
        me.each(step.num_rows, [&](int r) {
            const float *cos = model.cos + (int64_t)step.positions[r] * dim;
            const float *sin = model.sin + (int64_t)step.positions[r] * dim;
            for (int h = 0; h < num_q + 2 * num_kv; h++) {
                float *head = qkv.row(r) + h * dim;
                const bool is_value = h >= num_q + num_kv;
                if (!is_value) {
                    const float *weight = h < num_q ? layer.q_norm : layer.k_norm;
                    if (weight) rms_norm(head, weight, dim, model.eps, head);
                    rotate(head, cos, sin, dim);
                }
                if (h >= num_q)
                    HeadCache(cache, model, index, is_value, (h - num_q) % num_kv)
                        .write(step.slots[r], head);
            }
        });
    }

    template <KVFormat FORMAT>
    void attend(Team::Member &me, int index, const Cache &cache, const Step &step) {
        const AttentionPlan &work = *plan(model.layers[index].window);
        Attention<FORMAT> attention(model, cache, step, index);
        me.each((int)work.units.size(), [&](int i) {
            const AttentionUnit &unit = work.units[i];
            float *part = unit.part < 0 ? nullptr : parts.data() + unit.part * part_size();
            attention.attend(unit, qkv.row(0), qkv.width, attended.row(0), attended.width, part);
        });
        if (work.joins.empty()) return;
        me.each((int)work.joins.size(), [&](int i) { join(work.joins[i]); });
    }

    void join(const AttentionJoin &join) {
        const int dim = model.head_dim, ratio = model.num_heads / model.num_kv_heads;
        for (int query = 0; query < join.num_rows * ratio; query++) {
            Part total = part(join.first_part, query);
            for (int p = 1; p < join.num_parts; p++)
                fold(total, part(join.first_part + p, query), dim);
            const int head = join.head * ratio + query % ratio;
            finish(total, dim, attended.row(join.row + query / ratio) + head * dim);
        }
    }

    Part part(int number, int query) {
        float *at = parts.data() + number * part_size() + query * (2 + model.head_dim);
        return {at[0], at[1], at + 2};
    }
};

}  // namespace specdec

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

// Which draft nodes to verify, and what became of them.
void specdec_choose(const Acceptance *known, Choice *choice) { choose(*known, *choice); }
void specdec_learn(Acceptance *known, const Choice *choice, const int32_t *came) {
    learn(*known, *choice, came);
}

// So that the caller can prove that it states the same structures: bytes of one by number.
int32_t specdec_struct_bytes(int32_t number) {
    const size_t sizes[] = {
        sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Cache), sizeof(Segment), sizeof(Step),
        sizeof(Acceptance), sizeof(Choice), sizeof(Tree), sizeof(Node)
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
