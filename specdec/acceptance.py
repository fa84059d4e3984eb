"""Acceptance: how likely a drafted node is accepted once its parent is, learned from what was.

Drafters claim a score for each node. What such claims are worth is counted: nodes whose parent was
reached and whose rightful token is therefore known, by drafters that guessed the node (several that
agree are a kind of their own), depth, rank among siblings, claimed score and temperature. Counts
are Beta counts with forgetting, each level the prior of the next:

    the claim  ->  (drafters, score)  ->  and temperature  ->  and depth and rank

A request that fares better or worse than these say is told by its own recent counts, and when it
suddenly does, or all do, the past is dropped.
Under the coupled rule a node is accepted if and only if it carries the token that comes, so nodes
that were drafted but not verified are evidence just as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec.candidates import Candidates, Floats, Ints, is_mixed
from specdec.counts import (
    MAX_SOURCES,
    NUM_SCORES,
    NUM_TEMPERATURES,
    SCORE_EDGES,
    Counts,
    OwnCounts,
    change_evidence,
)
from specdec.plan import DecodeStep

NUM_DEPTHS, NUM_RANKS = 6, 3
PRIOR = (4.0, 6.0, 6.0)  # pseudo-counts of each level's prior
MEMORY = (400.0, 400.0, 200.0)  # evidence that a cell of each level remembers
COMMON_CHANGE = 8.0  # and for all
MERIT_DECAY = 0.995  # per node, of how much better own corrections did than none
MOST_MERIT = 5.0  # of that, a log of likelihoods
UNEXPECTED = 0.25
MOST, LEAST = 0.995, 1e-4  # of an estimate: a child is always worth less than its parent
SCORE_STEPS = 1024
SCORE_BINS = np.searchsorted(SCORE_EDGES, (np.arange(SCORE_STEPS + 1) / SCORE_STEPS), side="right")
CLAIMS = np.convolve((0.0, *SCORE_EDGES, 1.0), (0.5, 0.5), "valid")  # the middle of each bin
DEPTH_BINS = np.array([0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 5])  # 1, 2, 3, 4-5, 6-9, 10 and more
_KINDS = (MAX_SOURCES, NUM_SCORES, NUM_TEMPERATURES)
CELLS_PER_KIND = NUM_DEPTHS * NUM_RANKS
_MERIT = 2  # column of Acceptance.watch


class Acceptance:
    """Estimates for the candidates of a step, and what became of them.

    Example:
        expected = acceptance.estimate(steps, candidates)  # [N], P(accepted | parent accepted)
        acceptance.observe(chosen_tokens)  # per tree the tokens that came
    """

    def __init__(self) -> None:
        self.source_ids = SourceIds()
        num_kinds = int(np.prod(_KINDS))
        self.by_score = Counts(MAX_SOURCES * NUM_SCORES, MEMORY[0])
        self.by_kind = Counts(num_kinds, MEMORY[1])
        self.by_cell = Counts(num_kinds * CELLS_PER_KIND, MEMORY[2])
        self.kind_mean = np.repeat(np.tile(CLAIMS, MAX_SOURCES), NUM_TEMPERATURES)
        self.cell_mean = np.repeat(self.kind_mean, CELLS_PER_KIND)
        self.watch = np.zeros((MAX_SOURCES, 3))  # worse, better, merit of own corrections
        self.own = OwnCounts()
        self._last: _Estimated | None = None

    def estimate(self, steps: Sequence[DecodeStep], candidates: Candidates) -> Floats:
        """P(accepted | parent accepted) of every node, 1 for roots. [N]"""
        owner = candidates.owner
        sources = self._sources(candidates)
        within = np.fmin(np.fmax(candidates.scores, 0.0), 1.0)  # what is no number counts as 0
        scores = SCORE_BINS.take((within * SCORE_STEPS).astype(np.intp))
        temperatures = np.array([temperature_bin(s.request.params.temperature) for s in steps])
        slots = self.own.slots_of([step.request.request_id for step in steps])
        kinds = (sources * NUM_SCORES + scores) * NUM_TEMPERATURES + temperatures.take(owner)
        cells = DEPTH_BINS.take(candidates.depths, mode="clip") * NUM_RANKS + candidates.ranks
        cells += kinds * CELLS_PER_KIND
        shift, scale = self.own.corrections(slots.take(owner) * MAX_SOURCES + sources)
        expected = self.cell_mean.take(cells) * scale + shift
        expected = np.minimum(np.maximum(expected, LEAST), MOST)
        expected[candidates.first[:-1]] = 1.0
        self._last = _Estimated(candidates, sources, kinds, cells, slots, expected)
        return expected

    def observe(self, tokens: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        """Learn from the tokens that came for each tree of the last estimate.

        Returns per tree who guessed the first token right, verified or not, where nobody would
        have expected it.
        """
        last, self._last = self._last, None
        if last is None:
            return []
        candidates = last.candidates
        judged: list[int] = []
        right: list[int] = []
        surprises: list[tuple[str, ...]] = []
        for tree, start, chosen in zip(
            candidates.trees, candidates.first[:-1].tolist(), tokens, strict=True
        ):
            path = tree.path_of(chosen)
            is_surprise = bool(path) and last.expected[start + path[0]] < UNEXPECTED
            surprises.append(tree.sources[path[0]] if is_surprise else ())
            right += [start + node for node in path]
            judged += [start + node for node in (0, *path)[: len(chosen)]]
        is_judged = np.zeros(candidates.num_nodes, dtype=bool)
        is_judged[judged] = True
        is_evidence = is_judged[candidates.parents]
        is_evidence[candidates.first[:-1]] = False
        is_right = np.zeros(candidates.num_nodes)
        is_right[right] = 1.0
        self._learn(last, np.flatnonzero(is_evidence), is_right)
        return surprises

    @property
    def last_sources(self) -> Ints:
        """The source ids of the last estimate's nodes. [N]"""
        assert self._last is not None
        return self._last.sources

    def release(self, request_id: str) -> None:
        """Forget a request's own counts."""
        self.own.release(request_id)

    def as_table(self) -> list[dict[str, Any]]:
        """For people: by drafters and claimed score what was measured, most evidence first."""
        names = {number: " + ".join(names) for names, number in self.source_ids.items()}
        edges = (0.0, *SCORE_EDGES, 1.0)
        rows = []
        for index in np.flatnonzero(self.by_score.seen >= 1.0).tolist():
            source, score = divmod(index, NUM_SCORES)
            seen = float(self.by_score.seen[index])
            rows.append(
                {
                    "drafter": names.get(source, "others"),
                    "score": f"{edges[score]:g}-{edges[score + 1]:g}",
                    "claimed": round(float(CLAIMS[score]), 3),
                    "measured": round(float(self.by_score.right[index]) / seen, 3),
                    "evidence": round(seen, 1),
                }
            )
        return sorted(rows, key=lambda row: (row["drafter"], row["claimed"]))

    def _sources(self, candidates: Candidates) -> Ints:
        """Which drafters guessed each node, as a number. [N]"""
        usual: list[int] = []
        mixed: list[tuple[int, list[int]]] = []
        for tree, start in zip(candidates.trees, candidates.first.tolist(), strict=False):
            usual.append(self.source_ids[tree.sources[-1]])
            if is_mixed(tree):
                mixed.append((start, [self.source_ids[names] for names in tree.sources]))
        numbers = np.array(usual).take(candidates.owner)
        for start, own in mixed:
            numbers[start : start + len(own)] = own
        return numbers

    def _learn(self, last: _Estimated, evidence: Ints, is_right: Floats) -> None:
        if not len(evidence):
            return
        right = is_right.take(evidence)
        kinds, cells = last.kinds.take(evidence), last.cells.take(evidence)
        by_score = kinds // NUM_TEMPERATURES
        expected, common = last.expected.take(evidence), self.cell_mean.take(cells)
        sources = last.sources.take(evidence)
        rows = last.slots.take(last.candidates.owner.take(evidence)) * MAX_SOURCES + sources
        self._weigh_corrections(sources, rows, common, right)
        self.by_score.add(by_score, right)
        self.by_kind.add(kinds, right)
        self.by_cell.add(cells, right)
        changed = self._look_for_changes(sources, expected, right)
        self._refresh(np.unique(np.concatenate((by_score, changed))))
        self.own.add(rows, kinds, expected, right, self.kind_mean, self.watch[:, _MERIT])

    def _weigh_corrections(self, sources: Ints, rows: Ints, common: Floats, right: Floats) -> None:
        """Compare the estimates with and without the requests' own corrections, by likelihood."""
        shift, scale = self.own.corrections(rows, is_full=True)
        corrected = np.minimum(np.maximum(common * scale + shift, LEAST), MOST)
        plain = np.minimum(np.maximum(common, LEAST), MOST)
        odds = np.where(right > 0.5, corrected / plain, (1.0 - corrected) / (1.0 - plain))
        for source, ratio in zip(sources.tolist(), odds.tolist(), strict=True):
            merit = MERIT_DECAY * self.watch[source, _MERIT] + math.log(ratio)
            self.watch[source, _MERIT] = min(max(merit, -MOST_MERIT), MOST_MERIT)

    def _look_for_changes(self, sources: Ints, expected: Floats, right: Floats) -> Ints:
        """After a sudden change for all requests forget most of what was counted.

        Returns the (drafters, score) pairs of which that is true.
        """
        changed: list[int] = []
        touched = np.unique(sources)
        worse, better = change_evidence(expected, right)
        np.add.at(self.watch[:, 0], sources, worse)
        np.add.at(self.watch[:, 1], sources, better)
        self.watch[:, :2] = np.maximum(self.watch[:, :2], 0.0)
        for source in touched[self.watch[touched, :2].max(-1) > COMMON_CHANGE].tolist():
            self.watch[source, :2] = 0.0
            changed += range(source * NUM_SCORES, (source + 1) * NUM_SCORES)
            for counts in (self.by_score, self.by_kind, self.by_cell):
                counts.forget(source)
        return np.array(changed, dtype=np.intp)

    def _refresh(self, by_score: Ints) -> None:
        """Means below these (drafters, score) pairs."""
        top = self.by_score.mean(by_score, CLAIMS[by_score % NUM_SCORES], PRIOR[0])
        kinds = by_score[:, None] * NUM_TEMPERATURES + np.arange(NUM_TEMPERATURES)
        middle = self.by_kind.mean(kinds, top[:, None], PRIOR[1])
        self.kind_mean[kinds] = middle
        cells = kinds[..., None] * CELLS_PER_KIND + np.arange(CELLS_PER_KIND)
        self.cell_mean[cells] = self.by_cell.mean(cells, middle[..., None], PRIOR[2])


class SourceIds(dict[tuple[str, ...], int]):
    """Numbers for the sets of drafters that guess nodes, given as they are asked for."""

    def __missing__(self, names: tuple[str, ...]) -> int:
        number = self[names] = min(len(self), MAX_SOURCES - 1)
        return number


class _Estimated:
    """What an estimate was made of, kept until its outcome is known."""

    def __init__(
        self,
        candidates: Candidates,
        sources: Ints,
        kinds: Ints,
        cells: Ints,
        slots: Ints,
        expected: Floats,
    ) -> None:
        self.candidates, self.sources = candidates, sources
        self.kinds, self.cells, self.slots, self.expected = kinds, cells, slots, expected


def temperature_bin(temperature: float) -> int:
    """0 greedy, 1 cooler, 2 the rest."""
    return 0 if temperature == 0.0 else 1 if temperature < 0.9 else 2
