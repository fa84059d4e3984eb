// Forward: the target's layers over the rows of a step, on the team's threads.
#pragma once

#include <algorithm>

#include "attention.hpp"
#include "rows.hpp"

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
    Forward(const Model &model, int num_threads) : model(model), team(num_threads), buffers(num_threads) {}

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
    std::vector<AttentionBuffers> buffers;  // one per thread

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
        Attention<FORMAT> attention(model, cache, step, index, buffers[me.index]);
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
