// Which draft nodes are verified: Acceptance.estimate of specdec/acceptance.py and the choice of
// specdec/choice.py, operation by operation, so that both give the same bits.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

namespace specdec {

struct Counts {
    double *seen, *right;
    double memory, prior;
};

// A request's recent evidence of one kind of drafters.
struct Own {
    double right, worse, better, doubt, full_shift, full_scale, shift, scale;
};

// One kind of drafters over all requests.
struct Watch {
    double worse, better, merit;
};

// The tables of Acceptance and the constants that it counts by.
struct Acceptance {
    Counts by_score, by_kind, by_cell;
    double *kind_mean, *cell_mean;
    Own *own;          // [slots * sources]
    double *own_seen;  // [slots * sources, scores * temperatures]
    Watch *watch;      // [sources]
    const double *claims;
    const int64_t *score_bins, *depth_bins;
    int32_t num_sources, num_scores, num_temperatures, num_ranks, cells_per_kind;
    int32_t last_score_bin, last_depth_bin, reserved;
    double least, most, unexpected;
    double own_prior, doubted_prior, own_decay, change, common_change, after_change;
    double merit_decay, most_merit;
};

struct Tree {
    int32_t size, slot, node_budget, max_depth, source, is_mixed, temperature;
    int32_t num_kept, surprise;  // out: nodes to verify, root included; a node, 0 for none
};

// What is known of a node between a choice and its outcome.
struct Node {
    int32_t parent, tree, source, depth, num_children, pair, kind, cell, own;
    bool is_chosen, is_judged;
    double expected, worth, gain, right;
};

struct Choice {
    Tree *trees;
    const int32_t *token_ids, *parents, *sources;  // of nodes, tree after tree
    const double *scores;
    const int32_t *cheapest;  // drafter by source
    Node *nodes;
    int32_t *kept, *kept_parents;  // out, each tree's from its first node's place on
    double *values, *by_level;     // out: [trees, drafters], [drafters, levels]
    int32_t num_drafters, num_levels;
    double least_worth;
    // What follows changes with each choice.
    const double *costs;  // seconds by number of nodes; null to take as many as there is room
    int32_t num_trees, room;
    double price, margin_price, exponent;
    double worth;                // out
    int32_t num_nodes, deepest;  // out
};

// P(accepted | parent accepted) and P(accepted) of every node.
inline void estimate(const Acceptance &known, Choice &choice) {
    choice.deepest = 0;
    for (int t = 0, first = 0; t < choice.num_trees; first += choice.trees[t++].size) {
        const Tree &tree = choice.trees[t];
        for (int i = first; i < first + tree.size; i++) {
            Node &node = choice.nodes[i];
            const bool is_root = i == first;
            node.parent = is_root ? i : first + choice.parents[i];
            Node &parent = choice.nodes[node.parent];
            node.tree = t;
            node.source = tree.is_mixed ? choice.sources[i] : tree.source;
            node.depth = is_root ? 0 : parent.depth + 1;
            node.num_children = 0;
            const int last_rank = known.num_ranks - 1;
            const int rank = is_root ? last_rank : std::min(parent.num_children++, last_rank);
            const double score = std::fmin(std::fmax(choice.scores[i], 0.0), 1.0);
            const int64_t bin = known.score_bins[(int)(score * known.last_score_bin)];
            const int64_t level = known.depth_bins[std::min(node.depth, known.last_depth_bin)];
            node.pair = node.source * known.num_scores + (int)bin;
            node.kind = node.pair * known.num_temperatures + tree.temperature;
            node.cell = node.kind * known.cells_per_kind + (int)level * known.num_ranks + rank;
            node.own = tree.slot * known.num_sources + node.source;
            const Own &own = known.own[node.own];
            const double estimated = known.cell_mean[node.cell] * own.scale + own.shift;
            const double within = std::min(std::max(estimated, known.least), known.most);
            node.expected = is_root ? 1.0 : within;
            node.worth = is_root ? 1.0 : parent.worth * within;
            node.right = 0.0;
            node.is_judged = false;
            choice.deepest = std::max(choice.deepest, node.depth);
        }
    }
}

// Choose the `count` best of some nodes by one of their figures, of equal ones the first.
inline void take_best(
    Node *nodes, int num_nodes, int count, double Node::*figure, std::vector<double> &scratch
) {
    for (int i = 0; i < num_nodes; i++) nodes[i].is_chosen = false;
    if (count <= 0) return;
    scratch.resize(num_nodes);
    for (int i = 0; i < num_nodes; i++) scratch[i] = nodes[i].*figure;
    const auto last = scratch.begin() + std::min(count, num_nodes) - 1;
    std::nth_element(scratch.begin(), last, scratch.end(), std::greater<>());
    const double least = std::max(*last, DBL_MIN);
    int num_taken = 0;
    for (int i = 0; i < num_nodes; i++)
        num_taken += nodes[i].is_chosen = nodes[i].*figure >= least;
    for (int i = num_nodes - 1; num_taken > count; i--)
        if (nodes[i].*figure == least) nodes[i].is_chosen = false, num_taken--;
}

// Nothing is worth what must not be verified: roots, what is too deep, what exceeds the budget.
inline void forbid(Choice &choice, std::vector<double> &scratch) {
    Node *own = choice.nodes;
    for (int t = 0; t < choice.num_trees; own += choice.trees[t++].size) {
        const Tree &tree = choice.trees[t];
        for (int i = 0; i < tree.size; i++)
            if (i == 0 || own[i].depth > tree.max_depth) own[i].worth = 0.0;
        if (tree.size - 1 <= tree.node_budget) continue;
        take_best(own, tree.size, tree.node_budget, &Node::worth, scratch);
        for (int i = 0; i < tree.size; i++)
            if (!own[i].is_chosen) own[i].worth = 0.0;
    }
}

inline double utility(double speed, double exponent) {
    return exponent == 0.0 ? std::log(speed) : (std::pow(speed, exponent) - 1.0) / exponent;
}

// What each node adds to the goal, the worthier ones of its tree being there.
inline void find_gains(const Choice &choice) {
    std::vector<Node *> own;
    Node *node = choice.nodes;
    for (int t = 0; t < choice.num_trees; t++) {
        own.clear();
        for (int i = 0; i < choice.trees[t].size; i++, node++) {
            node->gain = !choice.costs || node->worth > choice.least_worth ? node->worth : 0.0;
            if (node->gain > 0.0) own.push_back(node);
        }
        if (choice.exponent == 1.0) continue;
        std::stable_sort(own.begin(), own.end(), [](const Node *a, const Node *b) {
            return a->worth > b->worth;
        });
        double total = 0.0;
        for (Node *at : own) {
            total += at->worth;
            const double speed = 1.0 + total;
            at->gain =
                utility(speed, choice.exponent) - utility(speed - at->worth, choice.exponent);
        }
    }
}

// How many nodes to verify.
inline int count_paying(const Choice &choice, int num_nodes, std::vector<double> &gains) {
    if (!choice.costs) return choice.room;
    gains.clear();
    for (int i = 0; i < num_nodes; i++)
        if (choice.nodes[i].gain > 0.0) gains.push_back(choice.nodes[i].gain);
    const int most = std::min(choice.room, (int)gains.size());
    if (most <= 0) return 0;
    const auto end = gains.begin() + most;
    if (end < gains.end()) std::nth_element(gains.begin(), end, gains.end(), std::greater<>());
    std::sort(gains.begin(), end, std::greater<>());
    int found = 0;
    double total = 0.0, best = 0.0;
    for (int i = 0; i < most; i++) {
        total += gains[i];
        const double profit = total - choice.margin_price * (choice.costs[i + 1] - choice.costs[0]);
        if (profit > best) best = profit, found = i + 1;
    }
    return found;
}

// What the chosen nodes promise, and whose they are.
inline void add_up(Choice &choice, int num_nodes) {
    // What a row of each tree costs, in tokens: the time that leaving all of them out saves.
    std::vector<int> kept(choice.num_trees, 0);
    std::vector<double> row_prices(choice.num_trees, 0.0);
    int count = 0;
    for (int i = 0; i < num_nodes; i++) {
        if (!choice.nodes[i].is_chosen) continue;
        kept[choice.nodes[i].tree]++;
        count++;
    }
    for (int t = 0; choice.costs && t < choice.num_trees; t++) {
        const double saved = choice.costs[count] - choice.costs[count - kept[t]];
        row_prices[t] = saved / std::max(1, kept[t]) * choice.price;
    }
    std::fill_n(choice.values, choice.num_trees * choice.num_drafters, 0.0);
    std::fill_n(choice.by_level, choice.num_drafters * choice.num_levels, 0.0);
    choice.worth = 0.0;
    choice.num_nodes = 0;
    for (int i = 0; i < num_nodes; i++) {
        const Node &node = choice.nodes[i];
        if (!node.is_chosen) continue;
        choice.num_nodes++;
        choice.worth += node.worth;
        if (!choice.num_drafters) continue;
        const int drafter = choice.cheapest[node.source];
        const int level = std::min(node.depth, choice.num_levels) - 1;
        const double profit = node.worth - row_prices[node.tree];
        choice.values[node.tree * choice.num_drafters + drafter] += profit;
        choice.by_level[drafter * choice.num_levels + level] += profit;
    }
}

// The chosen nodes of each tree as a tree; one of several drafters is laid likeliest path first.
inline void lay_out(Choice &choice) {
    std::vector<int> order, next, child, waiting, place;
    for (int t = 0, first = 0; t < choice.num_trees; first += choice.trees[t++].size) {
        Tree &tree = choice.trees[t];
        const Node *own = choice.nodes + first;
        order.assign(1, 0);
        for (int i = 1; i < tree.size; i++)
            if (own[i].is_chosen) order.push_back(i);
        if (tree.is_mixed) {
            std::stable_sort(order.begin() + 1, order.end(), [&](int a, int b) {
                return own[a].worth > own[b].worth;
            });
            next.assign(tree.size, 0);
            child.assign(tree.size, 0);
            for (size_t i = order.size() - 1; i > 0; i--) {
                const int parent = own[order[i]].parent - first;
                next[order[i]] = child[parent];
                child[parent] = order[i];
            }
            order.clear();
            waiting.assign(1, 0);
            while (!waiting.empty()) {
                const int i = waiting.back();
                waiting.pop_back();
                order.push_back(i);
                if (next[i]) waiting.push_back(next[i]);
                if (child[i]) waiting.push_back(child[i]);
            }
        }
        tree.num_kept = (int)order.size();
        place.resize(tree.size);
        for (int i = 0; i < tree.num_kept; i++) {
            place[order[i]] = i;
            choice.kept[first + i] = order[i];
            choice.kept_parents[first + i] = i ? place[own[order[i]].parent - first] : -1;
        }
    }
}

// Fill in the choice's outputs; its nodes stay for `learn`.
inline void choose(const Acceptance &known, Choice &choice) {
    std::vector<double> scratch;
    int num_nodes = 0;
    for (int t = 0; t < choice.num_trees; t++) num_nodes += choice.trees[t].size;
    estimate(known, choice);
    forbid(choice, scratch);
    find_gains(choice);
    choice.num_nodes = count_paying(choice, num_nodes, scratch);
    take_best(choice.nodes, num_nodes, choice.num_nodes, &Node::gain, scratch);
    add_up(choice, num_nodes);
    lay_out(choice);
}

}  // namespace specdec
