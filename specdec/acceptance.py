"""Acceptance: how likely a drafted node is accepted once its parent is, learned from what was.

Drafters claim a score for each node. What such claims are worth is counted: nodes whose parent was
reached and whose rightful token is therefore known, by drafters that guessed the node (several that
agree are a kind of their own), depth, rank among siblings, claimed score and temperature. Counts
are Beta counts with forgetting, each level the prior of the next:

    the claim  ->  (drafters, score)  ->  and temperature  ->  and depth and rank

A request that fares better or worse than these say is told by its own recent counts.
Under the coupled rule a node is accepted if and only if it carries the token that comes, so nodes
that were drafted but not verified are evidence just as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.candidates import Candidates, Floats, Ints
from specdec.plan import DecodeStep

SCORE_EDGES = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
NUM_SCORES = len(SCORE_EDGES) + 1
NUM_TEMPERATURES = 3  # greedy, below 0.9, above
NUM_DEPTHS, NUM_RANKS = 6, 3
MAX_SOURCES = 16  # kinds of agreement told apart; further ones share the last
PRIOR = (4.0, 8.0, 12.0)  # pseudo-counts of each level's prior
MEMORY = (400.0, 400.0, 200.0)  # evidence that a cell of each level remembers
OWN_PRIOR = 1.5  # of a request's own counts
OWN_DECAY = 0.96  # of a request's own counts at each step that brings evidence
FAST_DECAY = 0.8  # of the residuals that tell a sudden change
SURPRISE = 3.5  # standard deviations of those residuals
AFTER_SURPRISE = 0.2  # of a request's own counts is kept then
UNEXPECTED = 0.25
MOST, LEAST = 0.995, 1e-4  # of an estimate: a child is always worth less than its parent

_STEPS = 1024
_SCORE_BIN = np.searchsorted(SCORE_EDGES, (np.arange(_STEPS + 1) / _STEPS), side="right")
_CLAIM = np.convolve((0.0, *SCORE_EDGES, 1.0), (0.5, 0.5), "valid")  # the middle of each bin
_DEPTH_BIN = np.array([0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 5])  # 1, 2, 3, 4-5, 6-9, 10 and more
_KINDS = (MAX_SOURCES, NUM_SCORES, NUM_TEMPERATURES)
_CELLS_PER_KIND = NUM_DEPTHS * NUM_RANKS


class Acceptance:
    """Estimates for the candidates of a step, and what became of them.

    Example:
        expected = acceptance.estimate(steps, candidates)  # [N], P(accepted | parent accepted)
        acceptance.observe(chosen_tokens)  # per tree the tokens that came
    """

    def __init__(self) -> None:
        self._source_ids: dict[tuple[str, ...], int] = {}
        num_kinds = int(np.prod(_KINDS))
        self._by_score = _Counts(MAX_SOURCES * NUM_SCORES, MEMORY[0])
        self._by_kind = _Counts(num_kinds, MEMORY[1])
        self._by_cell = _Counts(num_kinds * _CELLS_PER_KIND, MEMORY[2])
        self._kind_mean = np.repeat(np.tile(_CLAIM, MAX_SOURCES), NUM_TEMPERATURES)
        self._cell_mean = np.repeat(self._kind_mean, _CELLS_PER_KIND)
        self._own = _OwnCounts()
        self._last: _Estimated | None = None

    def estimate(self, steps: Sequence[DecodeStep], candidates: Candidates) -> Floats:
        """P(accepted | parent accepted) of every node, 1 for roots. [N]"""
        owner = candidates.owner
        sources = self._sources(candidates)
        scores = _SCORE_BIN.take((candidates.scores * _STEPS).astype(np.intp), mode="clip")
        temperatures = np.array([_temperature_bin(s.request.params.temperature) for s in steps])
        slots = self._own.slots([step.request.request_id for step in steps])
        kinds = (sources * NUM_SCORES + scores) * NUM_TEMPERATURES + temperatures.take(owner)
        cells = _DEPTH_BIN.take(candidates.depths, mode="clip") * NUM_RANKS + candidates.ranks
        cells += kinds * _CELLS_PER_KIND
        shift, scale = self._own.corrections(slots.take(owner) * MAX_SOURCES + sources)
        expected = self._cell_mean.take(cells) * scale + shift
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

    def cheapest(self, ranks: Mapping[str, tuple[float, int]], nodes: Ints) -> Ints:
        """For some nodes of the last estimate the index of the cheapest drafter that guessed each.

        ranks: by drafter its cost and its index; of those that are unknown, 0 is the index.
        """
        assert self._last is not None
        found = np.zeros(MAX_SOURCES, dtype=np.intp)
        for names, source in self._source_ids.items():
            found[source] = min((ranks[n] for n in names if n in ranks), default=(0.0, 0))[1]
        return found[self._last.sources[nodes]]

    def release(self, request_id: str) -> None:
        """Forget a request's own counts."""
        self._own.release(request_id)

    def as_table(self) -> list[dict[str, Any]]:
        """For people: by drafters and claimed score what was measured, most evidence first."""
        names = {number: " + ".join(names) for names, number in self._source_ids.items()}
        edges = (0.0, *SCORE_EDGES, 1.0)
        rows = []
        for index in np.flatnonzero(self._by_score.seen >= 1.0).tolist():
            source, score = divmod(index, NUM_SCORES)
            seen = float(self._by_score.seen[index])
            rows.append(
                {
                    "drafter": names.get(source, "others"),
                    "score": f"{edges[score]:g}-{edges[score + 1]:g}",
                    "claimed": round(float(_CLAIM[score]), 3),
                    "measured": round(float(self._by_score.right[index]) / seen, 3),
                    "evidence": round(seen, 1),
                }
            )
        return sorted(rows, key=lambda row: (row["drafter"], row["claimed"]))

    def _sources(self, candidates: Candidates) -> Ints:
        """Which drafters guessed each node, as a number. [N]"""
        lasts: list[int] = []
        mixed: list[int] = []
        for index, tree in enumerate(candidates.trees):
            sources = tree.sources
            lasts.append(self._source_id(sources[-1]))
            if sources.count(sources[-1]) < len(sources) - 1:
                mixed.append(index)
        numbers = np.array(lasts).take(candidates.owner)
        for index in mixed:
            start, end = candidates.first[index : index + 2].tolist()
            numbers[start:end] = [self._source_id(x) for x in candidates.trees[index].sources]
        return numbers

    def _source_id(self, names: tuple[str, ...]) -> int:
        known = self._source_ids.get(names)
        if known is None:
            known = min(len(self._source_ids), MAX_SOURCES - 1)
            self._source_ids[names] = known
        return known

    def _learn(self, last: _Estimated, evidence: Ints, is_right: Floats) -> None:
        if not len(evidence):
            return
        right = is_right.take(evidence)
        kinds, cells = last.kinds.take(evidence), last.cells.take(evidence)
        by_score = kinds // NUM_TEMPERATURES
        self._by_score.add(by_score, right)
        self._by_kind.add(kinds, right)
        self._by_cell.add(cells, right)
        self._refresh(np.unique(by_score))
        self._own.add(
            last.slots.take(last.candidates.owner.take(evidence)) * MAX_SOURCES
            + last.sources.take(evidence),
            kinds,
            last.expected.take(evidence),
            right,
            self._kind_mean,
        )

    def _refresh(self, by_score: Ints) -> None:
        """Means below these (drafters, score) pairs."""
        top = self._by_score.mean(by_score, _CLAIM[by_score % NUM_SCORES], PRIOR[0])
        kinds = by_score[:, None] * NUM_TEMPERATURES + np.arange(NUM_TEMPERATURES)
        middle = self._by_kind.mean(kinds, top[:, None], PRIOR[1])
        self._kind_mean[kinds] = middle
        cells = kinds[..., None] * _CELLS_PER_KIND + np.arange(_CELLS_PER_KIND)
        self._cell_mean[cells] = self._by_cell.mean(cells, middle[..., None], PRIOR[2])


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


class _Counts:
    """Beta counts by cell: `seen` and `right`, the oldest fading once a cell has seen `memory`."""

    def __init__(self, size: int, memory: float) -> None:
        self.seen, self.right = np.zeros(size), np.zeros(size)
        self._memory = memory

    def add(self, cells: Ints, right: Floats) -> None:
        np.add.at(self.seen, cells, 1.0)
        np.add.at(self.right, cells, right)
        seen = self.seen[cells]
        if seen.max() > self._memory:
            full = np.unique(cells[seen > self._memory])
            self.right[full] *= self._memory / self.seen[full]
            self.seen[full] = self._memory

    def mean(self, cells: Ints, prior: Floats, weight: float) -> Floats:
        """Posterior means, `weight` being how many observations the prior counts for."""
        mean: Floats = (self.right[cells] + weight * prior) / (self.seen[cells] + weight)
        return mean


class _OwnCounts:
    """Recent evidence of each request by drafters, against what all requests' counts say.

    A request's estimate is the common one, corrected: successes scaled down by (seen right /
    expected right) where it fares worse, failures by (seen wrong / expected wrong) where better.
    A sudden change, told by residuals of the last few steps, makes it forget most of its past.
    A row is one request and one kind of drafters: `slot * MAX_SOURCES + source`.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._rows = np.zeros((0, _NUM_COLUMNS))
        self._seen = np.zeros((0, NUM_SCORES * NUM_TEMPERATURES))

    def slots(self, request_ids: Sequence[str]) -> Ints:
        """Where each request's counts lie."""
        return np.array(
            [self._slots[n] if n in self._slots else self._take(n) for n in request_ids]
        )

    def _take(self, request_id: str) -> int:
        if not self._free:
            size = len(self._rows) // MAX_SOURCES
            more = max(8, size)
            self._free += range(size + more - 1, size - 1, -1)
            self._rows = np.vstack((self._rows, np.zeros((more * MAX_SOURCES, _NUM_COLUMNS))))
            self._seen = np.vstack((self._seen, np.zeros((more * MAX_SOURCES, _NUM_SEEN))))
        slot = self._slots[request_id] = self._free.pop()
        own = slice(slot * MAX_SOURCES, (slot + 1) * MAX_SOURCES)
        self._seen[own] = 0.0
        self._rows[own] = 0.0
        self._rows[own, _SCALE] = 1.0
        return slot

    def release(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def corrections(self, rows: Ints) -> tuple[Floats, Floats]:
        """Shift and scale of the common estimate."""
        return self._rows[:, _SHIFT].take(rows), self._rows[:, _SCALE].take(rows)

    def add(
        self, rows: Ints, kinds: Ints, expected: Floats, right: Floats, kind_mean: Floats
    ) -> None:
        """Evidence, one entry per node; kind_mean: the common estimates, also of older evidence."""
        touched = np.array(sorted(set(rows.tolist())))
        table, seen = self._rows, self._seen
        table[touched] *= _DECAY
        seen[touched] *= OWN_DECAY
        np.add.at(seen, (rows, kinds % _NUM_SEEN), 1.0)
        added = np.zeros((len(rows), _NUM_COLUMNS))
        added[:, _RIGHT] = right
        added[:, _RESIDUAL] = right - expected
        added[:, _VARIANCE] = expected * (1.0 - expected)
        np.add.at(table, rows, added)
        now = table[touched]
        is_sudden = now[:, _RESIDUAL] ** 2 > SURPRISE**2 * (now[:, _VARIANCE] + 0.05)
        if is_sudden.any():
            changed = touched[is_sudden]
            seen[changed] *= AFTER_SURPRISE
            table[changed, _RIGHT] *= AFTER_SURPRISE
            now = table[touched]
        own_seen = seen[touched]
        hoped = (own_seen * kind_mean.reshape(MAX_SOURCES, -1)[touched % MAX_SOURCES]).sum(-1)
        num_right, num_seen = now[:, _RIGHT], own_seen.sum(-1)
        down = (num_right + OWN_PRIOR) / (hoped + OWN_PRIOR)
        up = (num_seen - num_right + OWN_PRIOR) / (num_seen - hoped + OWN_PRIOR)
        is_worse = down < 1.0
        table[touched, _SHIFT] = np.where(is_worse, 0.0, 1.0 - up)
        table[touched, _SCALE] = np.where(is_worse, down, up)


_NUM_SEEN = NUM_SCORES * NUM_TEMPERATURES
_RIGHT, _RESIDUAL, _VARIANCE, _SHIFT, _SCALE = range(5)
_NUM_COLUMNS = 5
_DECAY = np.array([OWN_DECAY, FAST_DECAY, FAST_DECAY, 1.0, 1.0])


def _temperature_bin(temperature: float) -> int:
    return 0 if temperature == 0.0 else 1 if temperature < 0.9 else 2
