"""Counts: Beta counts with forgetting, of all requests and of each one, and what tells a change."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specdec.candidates import Floats, Ints

SCORE_EDGES = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
NUM_SCORES = len(SCORE_EDGES) + 1
NUM_TEMPERATURES = 3  # greedy, below 0.9, above
MAX_SOURCES = 16  # kinds of agreement told apart; further ones share the last
OWN_PRIOR = 1.5  # of a request's own counts
OWN_DECAY = 0.96  # of a request's own counts at each step that brings evidence
DOUBTED_PRIOR = 0.2  # of the same after a change: what is common was no guide
CHANGE = 5.0  # log of how much likelier a change than none must be, for a request
AFTER_CHANGE = 2.0  # observations that count then

_NUM_SEEN = NUM_SCORES * NUM_TEMPERATURES
_RIGHT, _WORSE, _BETTER, _DOUBT, _FULL_SHIFT, _FULL_SCALE, _SHIFT, _SCALE = range(8)
_NUM_COLUMNS = 8
_DECAY = np.array([OWN_DECAY, 1.0, 1.0, OWN_DECAY, 1.0, 1.0, 1.0, 1.0])
_LOG_TENTH = math.log(0.1)


class Counts:
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

    def forget(self, source: int) -> None:
        """Keep little of what was counted of one kind of drafters."""
        size = len(self.seen) // MAX_SOURCES
        own = slice(source * size, (source + 1) * size)
        kept = AFTER_CHANGE / np.maximum(self.seen[own], AFTER_CHANGE)
        self.seen[own] *= kept
        self.right[own] *= kept

    def mean(self, cells: Ints, prior: Floats, weight: float) -> Floats:
        """Posterior means, `weight` being how many observations the prior counts for."""
        mean: Floats = (self.right[cells] + weight * prior) / (self.seen[cells] + weight)
        return mean


class OwnCounts:
    """Recent evidence of each request by drafters, against what all requests' counts say.

    A request's estimate is the common one, corrected: successes scaled down by (seen right /
    expected right) where it fares worse, failures by (seen wrong / expected wrong) where better;
    as far as such corrections have been of use. A sudden change makes it forget its past.
    A row is one request and one kind of drafters: `slot * MAX_SOURCES + source`.
    """

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self._free: list[int] = []
        self.rows = np.zeros((0, _NUM_COLUMNS))
        self.seen = np.zeros((0, NUM_SCORES * NUM_TEMPERATURES))

    def slots_of(self, request_ids: Sequence[str]) -> Ints:
        """Where each request's counts lie."""
        return np.array([self.slots[n] if n in self.slots else self.take(n) for n in request_ids])

    def take(self, request_id: str) -> int:
        """A place for a new request's counts."""
        if not self._free:
            size = len(self.rows) // MAX_SOURCES
            more = max(8, size)
            self._free += range(size + more - 1, size - 1, -1)
            self.rows = np.vstack((self.rows, np.zeros((more * MAX_SOURCES, _NUM_COLUMNS))))
            self.seen = np.vstack((self.seen, np.zeros((more * MAX_SOURCES, _NUM_SEEN))))
        slot = self.slots[request_id] = self._free.pop()
        own = slice(slot * MAX_SOURCES, (slot + 1) * MAX_SOURCES)
        self.seen[own] = 0.0
        self.rows[own] = 0.0
        self.rows[own, _SCALE] = self.rows[own, _FULL_SCALE] = 1.0
        return slot

    def release(self, request_id: str) -> None:
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def corrections(self, rows: Ints, *, is_full: bool = False) -> tuple[Floats, Floats]:
        """Shift and scale of the common estimate; in full, as if they had always been of use."""
        shift, scale = (_FULL_SHIFT, _FULL_SCALE) if is_full else (_SHIFT, _SCALE)
        return self.rows[:, shift].take(rows), self.rows[:, scale].take(rows)

    def add(
        self,
        rows: Ints,
        kinds: Ints,
        expected: Floats,
        right: Floats,
        kind_mean: Floats,
        merit: Floats,
    ) -> None:
        """Evidence, one entry per node.

        kind_mean: the common estimates, also of older evidence; merit: by source, how much better
        corrected estimates did (a logarithm of likelihoods).
        """
        touched = np.array(sorted(set(rows.tolist())))
        table, seen = self.rows, self.seen
        table[touched] *= _DECAY
        seen[touched] *= OWN_DECAY
        np.add.at(seen, (rows, kinds % _NUM_SEEN), 1.0)
        np.add.at(table[:, _RIGHT], rows, right)
        worse, better = change_evidence(expected, right)
        np.add.at(table[:, _WORSE], rows, worse)
        np.add.at(table[:, _BETTER], rows, better)
        changes = np.maximum(table[touched, _WORSE : _BETTER + 1], 0.0)
        table[touched, _WORSE : _BETTER + 1] = changes
        changed = touched[changes.max(-1) > CHANGE]
        if len(changed):
            num_seen = np.cumsum(seen[changed], axis=-1)[:, -1]
            kept = AFTER_CHANGE / np.maximum(num_seen, AFTER_CHANGE)
            seen[changed] *= kept[:, None]
            table[changed, _RIGHT] *= kept
            table[changed, _WORSE] = table[changed, _BETTER] = 0.0
            table[changed, _DOUBT] = 1.0
        now, own_seen = table[touched], seen[touched]
        means = kind_mean.reshape(MAX_SOURCES, -1)[touched % MAX_SOURCES]
        # Running sums have an order, so that the native form can have the same.
        hoped, num_seen = np.cumsum((own_seen * means, own_seen), axis=-1)[..., -1]
        num_right, doubt = now[:, _RIGHT], now[:, _DOUBT]
        prior = OWN_PRIOR + doubt * (DOUBTED_PRIOR - OWN_PRIOR)
        down = (num_right + prior) / (hoped + prior)
        up = (num_seen - num_right + prior) / (num_seen - hoped + prior)
        is_worse = down < 1.0
        shift, scale = np.where(is_worse, 0.0, 1.0 - up), np.where(is_worse, down, up)
        merits = merit[touched % MAX_SOURCES].tolist()
        trust = np.array([1.0 / (1.0 + math.exp(-each)) for each in merits])
        trust = np.maximum(trust, doubt)  # a change has been seen
        table[touched, _FULL_SHIFT], table[touched, _FULL_SCALE] = shift, scale
        table[touched, _SHIFT] = trust * shift
        table[touched, _SCALE] = 1.0 + trust * (scale - 1.0)


def change_evidence(expected: Floats, right: Floats) -> tuple[list[float], list[float]]:
    """Log-likelihood of (much worse, much better) than expected over as expected, per node.

    Summed up and kept from falling below 0, that is Page's CUSUM test for a change (1954). By
    `math`, for numpy rounds otherwise.
    """
    worse, better = [], []
    for hoped, is_right in zip(expected.tolist(), right.tolist(), strict=True):
        missed = 1.0 - hoped
        if is_right:
            worse.append(_LOG_TENTH)
            better.append(math.log((1.0 - 0.1 * missed) / hoped))
        else:
            worse.append(math.log((1.0 - 0.1 * hoped) / missed))
            better.append(_LOG_TENTH)
    return worse, better
