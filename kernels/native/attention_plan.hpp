// AttentionPlan: how the attention of one step is cut into units of work for the team.
#pragma once

#include <vector>

#include "head_cache.hpp"

namespace specdec {

constexpr int SPLIT = 256;       // keys of a split
constexpr int MAX_QUERIES = 48;  // of a unit, unless one row has more: (row, query head) pairs

// Splits [first_split, last_split) for rows [row, row + num_rows) of the batch, one segment's, and
// one key head. `part` < 0: the unit covers all splits; else it is one split of several, and its
// result is the part of this number.
struct AttentionUnit {
    int segment, row, num_rows, head, first_split, last_split, part;
};

// Parts [first_part, first_part + num_parts) are the splits of the same rows and key head, in order.
struct AttentionJoin {
    int row, num_rows, head, first_part, num_parts;
};

struct AttentionPlan {
    std::vector<AttentionUnit> units;
    std::vector<AttentionJoin> joins;
    int num_parts = 0;

    // Splits are shared out only where whole rows are too few to occupy the team.
    AttentionPlan(const Model &model, const Step &step, int window, int team_size) {
        const int ratio = model.num_heads / model.num_kv_heads;
        const int most_rows = MAX_QUERIES > ratio ? MAX_QUERIES / ratio : 1;
        int num_groups = 0;
        for (int i = 0; i < step.num_segments; i++)
            num_groups += (step.segments[i].num_rows + most_rows - 1) / most_rows;
        const bool is_shared_out = num_groups * model.num_kv_heads < 4 * team_size;
        for (int i = 0; i < step.num_segments; i++) {
            const Segment &segment = step.segments[i];
            for (int first = 0; first < segment.num_rows; first += most_rows) {
                const int left = segment.num_rows - first;
                add(model, step, i, segment.start + first, left < most_rows ? left : most_rows,
                    window, is_shared_out);
            }
        }
    }

private:
    void add(
        const Model &model, const Step &step, int segment, int row, int num_rows, int window,
        bool is_shared_out
    ) {
        int least = step.positions[row], most = least;
        for (int r = row; r < row + num_rows; r++) {
            const int position = step.positions[r];
            least = position < least ? position : least;
            most = position > most ? position : most;
        }
        const int begin = window && least >= window ? (least - window + 1) / SPLIT : 0;
        const int end = most / SPLIT + 1;
        for (int head = 0; head < model.num_kv_heads; head++) {
            if (!is_shared_out || end - begin == 1) {
                units.push_back({segment, row, num_rows, head, begin, end, -1});
                continue;
            }
            joins.push_back({row, num_rows, head, num_parts, end - begin});
            for (int split = begin; split < end; split++)
                units.push_back({segment, row, num_rows, head, split, split + 1, num_parts++});
        }
    }
};

}  // namespace specdec
