"""NativeChooser: the choice of nodes and the learning from them by the native library.

The same bits as specdec/choice.py, in a small part of the time: numpy's many small calls run cold
between two forwards, each of which streams the whole model through the caches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from struct import Struct

import numpy as np

from specdec import acceptance as common
from specdec import counts as counting
from specdec.acceptance import Acceptance, temperature_bin
from specdec.asking import NUM_LEVELS
from specdec.candidates import Floats, is_mixed
from specdec.choice import LEAST_WORTH, Choice, Chooser, Stakes
from specdec.kernels.native_structs import CAcceptance, CChoice, CCounts, CNode, CTree
from specdec.plan import StepPlan
from specdec.tree import DraftTree

_native: ctypes.CDLL | None = None


def use_native(library: ctypes.CDLL | None) -> None:
    """Let choosers that are made from now on use the native library; None = numpy."""
    global _native
    _native = library


def make_chooser(acceptance: Acceptance, drafters: Sequence[str] = ()) -> Chooser:
    """The fastest chooser that is to be had."""
    if _native is None:
        return Chooser(acceptance, drafters)
    return NativeChooser(acceptance, drafters, _native)


class NativeChooser(Chooser):
    """See Chooser. `library` is the loaded one of kernels/native_library.py."""

    def __init__(
        self, acceptance: Acceptance, drafters: Sequence[str], library: ctypes.CDLL
    ) -> None:
        super().__init__(acceptance, drafters)
        self._choose, self._learn = library.specdec_choose, library.specdec_learn
        self._known = _tables(acceptance)
        self._by_level = np.zeros((len(drafters), NUM_LEVELS))
        self._memory = bytearray(ctypes.sizeof(CChoice))
        c = self._c = CChoice.from_buffer(self._memory)
        c.cheapest, c.by_level = self._cheapest.ctypes.data, self._by_level.ctypes.data
        c.num_drafters, c.num_levels, c.least_worth = len(drafters), NUM_LEVELS, LEAST_WORTH
        self._arguments = ctypes.byref(self._known), ctypes.byref(self._c)
        self._last: Sequence[DraftTree] = ()
        self._own_rows: Floats | None = None
        self._costs: Floats | None = None
        self._costs_at = 0
        self._grow(16, 256)

    def choose(
        self, plan: StepPlan, trees: Sequence[DraftTree], room: int, stakes: Stakes | None
    ) -> Choice:
        """See Chooser."""
        num_trees = len(trees)
        num_nodes = sum([len(tree.parents) for tree in trees])
        if num_trees > len(self._values) or num_nodes > self._num_nodes:
            self._grow(2 * num_trees, 2 * num_nodes)
        self._lay_out(plan, trees)
        if stakes is None:
            _put_stakes(self._memory, _STAKES, 0, num_trees, room, 0.0, 0.0, 1.0)
        else:
            self._find_cheapest(stakes.cheapest_first)
            if stakes.costs is not self._costs:
                assert stakes.costs.dtype == np.float64 and stakes.costs.flags.c_contiguous
                self._costs, self._costs_at = stakes.costs, stakes.costs.ctypes.data
            _put_stakes(
                self._memory,
                _STAKES,
                self._costs_at + 8 * num_trees,
                num_trees,
                room,
                stakes.price,
                stakes.margin * stakes.price,
                stakes.exponent,
            )
        self._choose(*self._arguments)
        self._last = trees
        worth, count, deepest = _get_outcome(self._memory, _OUTCOME)
        return Choice(self._picked(trees), count, worth, self._values, self._by_level, deepest)

    def observe(self, tokens: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        """See Chooser."""
        trees, self._last = self._last, ()
        if not trees:
            return []
        if len(tokens) != len(trees):
            raise ValueError(
                f"tokens of {len(tokens)} trees, of {len(trees)} that were chosen from"
            )
        flat: list[int] = []
        for own in tokens:
            flat.append(len(own))
            flat += own
        self._learn(*self._arguments, (ctypes.c_int32 * len(flat))(*flat))
        nodes = self._records[_SURPRISE : _TREE_INTS * len(trees) : _TREE_INTS].tolist()
        return [tree.sources[node] if node else () for tree, node in zip(trees, nodes, strict=True)]

    def _lay_out(self, plan: StepPlan, trees: Sequence[DraftTree]) -> None:
        """Write the trees where the library reads them."""
        source_ids, own = self.acceptance.source_ids, self.acceptance.own
        at = 0
        for index, (step, tree) in enumerate(zip(plan.decode_steps, trees, strict=True)):
            request, sources, size = step.request, tree.sources, len(tree.parents)
            slot = own.slots.get(request.request_id)
            is_joined = is_mixed(tree)
            _put_tree(
                self._trees,
                index * _TREE_BYTES,
                size,
                own.take(request.request_id) if slot is None else slot,
                step.node_budget,
                step.max_depth,
                source_ids[sources[-1]],
                is_joined,
                temperature_bin(request.params.temperature),
            )
            put_ints, put_floats = _putters(size)
            put_ints(self._parents, 4 * at, *tree.parents)
            put_ints(self._token_ids, 4 * at, *tree.token_ids)
            put_floats(self._scores, 8 * at, *tree.scores)
            if is_joined:
                put_ints(self._sources, 4 * at, *map(source_ids.__getitem__, sources))
            at += size
        if own.rows is not self._own_rows:
            self._own_rows = own.rows
            self._known.own, self._known.own_seen = own.rows.ctypes.data, own.seen.ctypes.data

    def _picked(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The trees of the chosen nodes, as Candidates.pick makes them."""
        picked = []
        at = 0
        counts = self._records[_NUM_KEPT : _TREE_INTS * len(trees) : _TREE_INTS].tolist()
        for tree, count in zip(trees, counts, strict=True):
            size = len(tree.parents)
            if count == size and not is_mixed(tree):
                picked.append(tree)
            elif count == 1 or tree.draft_probs is not None:
                picked.append(DraftTree.root_only(tree.token_ids[0]))
            else:
                of = itemgetter(*self._kept[at : at + count])
                parents = tuple(self._kept_parents[at : at + count])
                picked.append(
                    DraftTree(of(tree.token_ids), parents, of(tree.scores), of(tree.sources))
                )
            at += size
        return picked

    def _grow(self, num_trees: int, num_nodes: int) -> None:
        """Make room for so many trees and nodes."""
        self._num_nodes = num_nodes
        self._trees = bytearray(num_trees * _TREE_BYTES)
        self._token_ids, self._parents, self._sources = (bytearray(4 * num_nodes) for _ in "123")
        self._scores = bytearray(8 * num_nodes)
        self._nodes = bytearray(num_nodes * ctypes.sizeof(CNode))
        kept, kept_parents = bytearray(4 * num_nodes), bytearray(4 * num_nodes)
        self._values = np.zeros((num_trees, len(self._drafters)))
        c = self._c
        c.trees, c.nodes = _address(self._trees), _address(self._nodes)
        c.token_ids, c.parents = _address(self._token_ids), _address(self._parents)
        c.sources, c.scores = _address(self._sources), _address(self._scores)
        c.kept, c.kept_parents = _address(kept), _address(kept_parents)
        c.values = self._values.ctypes.data
        self._records = memoryview(self._trees).cast("i")
        self._kept, self._kept_parents = (
            memoryview(kept).cast("i"),
            memoryview(kept_parents).cast("i"),
        )


_TREE_BYTES = ctypes.sizeof(CTree)
_TREE_INTS = _TREE_BYTES // 4
_NUM_KEPT, _SURPRISE = CTree.num_kept.offset // 4, CTree.surprise.offset // 4
_STAKES, _OUTCOME = CChoice.costs.offset, CChoice.worth.offset
# ctypes sets and gets a field in the time of several lines.
_put_stakes, _get_outcome = Struct("Pii3d").pack_into, Struct("dii").unpack_from
_put_tree = Struct(f"{_NUM_KEPT}i").pack_into


@cache
def _putters(size: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """What writes so many 32-bit integers, or 64-bit floats, into a buffer."""
    return Struct(f"{size}i").pack_into, Struct(f"{size}d").pack_into


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _tables(known: Acceptance) -> CAcceptance:
    """The counts, but for the requests' own, and the constants they are kept by."""
    counts = (known.by_score, known.by_kind, known.by_cell)
    return CAcceptance(
        *(
            CCounts(own.seen.ctypes.data, own.right.ctypes.data, memory, prior)
            for own, memory, prior in zip(counts, common.MEMORY, common.PRIOR, strict=True)
        ),
        kind_mean=known.kind_mean.ctypes.data,
        cell_mean=known.cell_mean.ctypes.data,
        watch=known.watch.ctypes.data,
        claims=common.CLAIMS.ctypes.data,
        score_bins=common.SCORE_BINS.ctypes.data,
        depth_bins=common.DEPTH_BINS.ctypes.data,
        num_sources=counting.MAX_SOURCES,
        num_scores=counting.NUM_SCORES,
        num_temperatures=counting.NUM_TEMPERATURES,
        num_ranks=common.NUM_RANKS,
        cells_per_kind=common.CELLS_PER_KIND,
        last_score_bin=len(common.SCORE_BINS) - 1,
        last_depth_bin=len(common.DEPTH_BINS) - 1,
        least=common.LEAST,
        most=common.MOST,
        unexpected=common.UNEXPECTED,
        own_prior=counting.OWN_PRIOR,
        doubted_prior=counting.DOUBTED_PRIOR,
        own_decay=counting.OWN_DECAY,
        change=counting.CHANGE,
        common_change=common.COMMON_CHANGE,
        after_change=counting.AFTER_CHANGE,
        merit_decay=common.MERIT_DECAY,
        most_merit=common.MOST_MERIT,
    )
