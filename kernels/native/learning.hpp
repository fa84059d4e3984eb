// What is learned of the candidates of a step: Acceptance.observe of specdec/acceptance.py, operation
// by operation, so that both give the same bits.
#pragma once

#include "choice.hpp"

namespace specdec {

typedef std::vector<const Node *> Nodes;

inline void count(Counts &counts, int32_t Node::*cell, const Nodes &evidence) {
    for (const Node *node : evidence) {
        counts.seen[node->*cell] += 1.0;
        counts.right[node->*cell] += node->right;
    }
    for (const Node *node : evidence) {
        double &seen = counts.seen[node->*cell];
        if (seen <= counts.memory) continue;
        counts.right[node->*cell] *= counts.memory / seen;
        seen = counts.memory;
    }
}

inline double mean(const Counts &counts, int cell, double prior) {
    return (counts.right[cell] + counts.prior * prior) / (counts.seen[cell] + counts.prior);
}

// The means below one pair of drafters and score.
inline void refresh(const Acceptance &known, int pair) {
    const double top = mean(known.by_score, pair, known.claims[pair % known.num_scores]);
    for (int t = 0; t < known.num_temperatures; t++) {
        const int kind = pair * known.num_temperatures + t;
        const double middle = known.kind_mean[kind] = mean(known.by_kind, kind, top);
        for (int i = 0; i < known.cells_per_kind; i++) {
            const int cell = kind * known.cells_per_kind + i;
            known.cell_mean[cell] = mean(known.by_cell, cell, middle);
        }
    }
}

inline double clamped(const Acceptance &known, double estimate) {
    return std::min(std::max(estimate, known.least), known.most);
}

// Log-likelihood of much worse and of much better than expected over as expected.
inline double evidence_of_worse(const Node &node) {
    const double missed = 1.0 - node.expected;
    return node.right > 0.5 ? std::log(0.1) : std::log((1.0 - 0.1 * node.expected) / missed);
}

inline double evidence_of_better(const Node &node) {
    const double missed = 1.0 - node.expected;
    return node.right > 0.5 ? std::log((1.0 - 0.1 * missed) / node.expected) : std::log(0.1);
}

// Are requests' own corrections of use? By the likelihood with and without them.
inline void weigh_correction(const Acceptance &known, const Node &node) {
    const Own &own = known.own[node.own];
    const double common = known.cell_mean[node.cell], plain = clamped(known, common);
    const double corrected = clamped(known, common * own.full_scale + own.full_shift);
    const double ratio = node.right > 0.5 ? corrected / plain : (1.0 - corrected) / (1.0 - plain);
    double &merit = known.watch[node.source].merit;
    merit = known.merit_decay * merit + std::log(ratio);
    merit = std::min(std::max(merit, -known.most_merit), known.most_merit);
}

inline void forget(const Acceptance &known, const Counts &counts, int source, int size) {
    for (int i = source * size; i < (source + 1) * size; i++) {
        const double kept = known.after_change / std::max(counts.seen[i], known.after_change);
        counts.seen[i] *= kept;
        counts.right[i] *= kept;
    }
}

// After a sudden change for all requests forget most of what was counted; `pairs` are to refresh.
inline void look_for_changes(
    const Acceptance &known, const Nodes &evidence, std::vector<int> &pairs
) {
    for (const Node *node : evidence) {
        known.watch[node->source].worse += evidence_of_worse(*node);
        known.watch[node->source].better += evidence_of_better(*node);
    }
    for (int source = 0; source < known.num_sources; source++) {
        Watch &watch = known.watch[source];
        watch.worse = std::max(watch.worse, 0.0);
        watch.better = std::max(watch.better, 0.0);
        if (std::max(watch.worse, watch.better) <= known.common_change) continue;
        watch.worse = watch.better = 0.0;
        const int num_kinds = known.num_scores * known.num_temperatures;
        forget(known, known.by_score, source, known.num_scores);
        forget(known, known.by_kind, source, num_kinds);
        forget(known, known.by_cell, source, num_kinds * known.cells_per_kind);
        for (int i = 0; i < known.num_scores; i++) pairs.push_back(source * known.num_scores + i);
    }
}

// A request's own counts of one kind of drafters, with this step's evidence.
inline void count_own(
    const Acceptance &known, int row, const Node *const *begin, const Node *const *end
) {
    const int num_kinds = known.num_scores * known.num_temperatures;
    Own &own = known.own[row];
    double *seen = known.own_seen + (int64_t)row * num_kinds;
    own.right *= known.own_decay;
    own.doubt *= known.own_decay;
    for (int i = 0; i < num_kinds; i++) seen[i] *= known.own_decay;
    for (auto at = begin; at < end; at++) {
        const Node &node = **at;
        seen[node.kind % num_kinds] += 1.0;
        own.right += node.right;
        own.worse += evidence_of_worse(node);
        own.better += evidence_of_better(node);
    }
    own.worse = std::max(own.worse, 0.0);
    own.better = std::max(own.better, 0.0);
    if (std::max(own.worse, own.better) > known.change) {
        double num_seen = 0.0;
        for (int i = 0; i < num_kinds; i++) num_seen += seen[i];
        const double kept = known.after_change / std::max(num_seen, known.after_change);
        for (int i = 0; i < num_kinds; i++) seen[i] *= kept;
        own.right *= kept;
        own.worse = own.better = 0.0;
        own.doubt = 1.0;
    }
    const int source = row % known.num_sources;
    const double *means = known.kind_mean + source * num_kinds;
    double hoped = 0.0, num_seen = 0.0;
    for (int i = 0; i < num_kinds; i++) {
        hoped += seen[i] * means[i];
        num_seen += seen[i];
    }
    const double prior = known.own_prior + own.doubt * (known.doubted_prior - known.own_prior);
    const double down = (own.right + prior) / (hoped + prior);
    const double up = (num_seen - own.right + prior) / (num_seen - hoped + prior);
    own.full_shift = down < 1.0 ? 0.0 : 1.0 - up;
    own.full_scale = down < 1.0 ? down : up;
    const double trusted = 1.0 / (1.0 + std::exp(-known.watch[source].merit));
    const double trust = std::max(trusted, own.doubt);
    own.shift = trust * own.full_shift;
    own.scale = 1.0 + trust * (own.full_scale - 1.0);
}

// Walk a tree along the tokens that came, and enter the nodes whose rightful token is known.
inline void judge(
    const Acceptance &known, const Choice &choice, Tree &tree, int first, const int32_t *token,
    const int32_t *end, Nodes &evidence
) {
    tree.surprise = 0;
    choice.nodes[first].is_judged = token < end;
    for (int i = first + 1, reached = first; i < first + tree.size; i++) {
        Node &node = choice.nodes[i];
        if (!choice.nodes[node.parent].is_judged) continue;
        evidence.push_back(&node);
        if (node.parent != reached || choice.token_ids[i] != *token) continue;
        if (reached == first && node.expected < known.unexpected) tree.surprise = i - first;
        node.right = 1.0;
        node.is_judged = ++token < end;  // nothing is known of what comes after the last token
        reached = i;
    }
}

// Learn from the tokens that came for each tree: their number, then they, tree after tree.
inline void learn(Acceptance &known, const Choice &choice, const int32_t *tokens) {
    Nodes evidence;
    for (int t = 0, first = 0; t < choice.num_trees; first += choice.trees[t++].size) {
        const int32_t *begin = tokens + 1, *end = begin + *tokens;
        judge(known, choice, choice.trees[t], first, begin, end, evidence);
        tokens = end;
    }
    if (evidence.empty()) return;
    for (const Node *node : evidence) weigh_correction(known, *node);
    count(known.by_score, &Node::pair, evidence);
    count(known.by_kind, &Node::kind, evidence);
    count(known.by_cell, &Node::cell, evidence);
    std::vector<int> pairs;
    for (const Node *node : evidence) pairs.push_back(node->pair);
    look_for_changes(known, evidence, pairs);
    std::sort(pairs.begin(), pairs.end());
    const auto last = std::unique(pairs.begin(), pairs.end());
    for (auto pair = pairs.begin(); pair < last; pair++) refresh(known, *pair);
    std::stable_sort(evidence.begin(), evidence.end(), [](const Node *a, const Node *b) {
        return a->own < b->own;
    });
    const Node *const *at = evidence.data(), *const *all = at + evidence.size();
    while (at < all) {
        const Node *const *end = at;
        while (end < all && (*end)->own == (*at)->own) end++;
        count_own(known, (*at)->own, at, end);
        at = end;
    }
}

}  // namespace specdec
