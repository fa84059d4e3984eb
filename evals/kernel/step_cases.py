"""Kernel cases of what follows the logits: choice of tokens, tree walk, moves of accepted slots."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from specdec.evals.kernel.attention_cases import random_parents
from specdec.evals.kernel.case import Dims, Expected, Place, Prepared, Results
from specdec.kernels.row_sampling import RowSampling
from specdec.kv_cache import KVCache
from specdec.noise import gumbel_all
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from specdec.tree import ROOT_SOURCE, DraftTree
from specdec.verification import verify

PARAMS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
}
_FLOPS = {"greedy": 1, "temperature": 36, "top-p": 38}
_HIT_RATE = 0.9  # how often a node's token is one that was drafted below it
_MOVES_PER_REQUEST = 8


@dataclass(frozen=True)
class Choice:
    """The token of every row of logits: its threshold, then the argmax with noise."""

    rows: int
    kind: Literal["greedy", "temperature", "top-p"]
    vocab_size: int
    dtype: torch.dtype

    @property
    def op(self) -> str:
        return f"choice {self.kind}"

    @property
    def label(self) -> str:
        return f"{self.rows} x {self.vocab_size}"

    @property
    def num_bytes(self) -> int:
        """The logits once, although top-p must pass over them again; 32 bytes of parameters."""
        return self.rows * (self.vocab_size * self.dtype.itemsize + 32 + 8)

    @property
    def num_flops(self) -> int:
        """Per token: a comparison; if sampled also the scaling and 34 for noise made of a word
        (specdec/noise.py); for top-p a weight and its sum."""
        return self.rows * self.vocab_size * _FLOPS[self.kind]

    def prepare(self, place: Place) -> Prepared:
        num_sets = place.num_sets(self.num_bytes)
        sets = place.randn(num_sets, self.rows, self.vocab_size, dtype=self.dtype).mul_(3)
        params, n = PARAMS[self.kind], self.rows

        def column(value: float) -> Tensor:
            return torch.full((n,), value, dtype=torch.float32, device=place.device)

        sampling = RowSampling(
            seeds=place.integers(list(range(n)), torch.int64),
            positions=place.integers([self._position(row) for row in range(n)]),
            inverse_temperature=column(self._sampler(0).inverse_temperature),
            top_k=place.integers([params.top_k] * n),
            top_p=column(params.top_p),
            min_p=column(params.min_p),
        )
        return Prepared(
            [partial(self._run, place, logits, sampling) for logits in sets],
            lambda: self._expect(place, sets[0]),
        )

    def _run(self, place: Place, logits: Tensor, sampling: RowSampling) -> Results:
        if place.uses_kernels:
            from specdec.kernels import gumbel_argmax, truncation

            limits = truncation.thresholds(logits, sampling)
            return gumbel_argmax.gumbel_argmax(logits, sampling, limits)
        is_finite = logits.isfinite().all(1).int()
        return self._chosen(place, logits), is_finite

    def _expect(self, place: Place, logits: Tensor) -> Sequence[Expected]:
        """By the Sampler, and the Sampler's by sorting."""
        rows = logits.cpu()
        if place.uses_kernels:
            token_ids = self._chosen(place, rows)
        else:
            token_ids = place.integers([self._by_sorting(*pair) for pair in enumerate(rows)])
        return [Expected(token_ids), Expected(torch.ones_like(token_ids))]

    def _position(self, row: int) -> int:
        return 1 + 7 * row

    def _sampler(self, row: int) -> Sampler:
        prompt = [0] * self._position(row)
        return Sampler(PARAMS[self.kind], prompt, seed=row, eos_token_ids=())

    def _chosen(self, place: Place, logits: Tensor) -> Tensor:
        """The Sampler's tokens, int32 [rows]."""
        return place.integers(
            [self._sampler(index).choose(row, []) for index, row in enumerate(logits)]
        )

    def _by_sorting(self, index: int, logits: Tensor) -> int:
        params = PARAMS[self.kind]
        if params.is_greedy:
            return int((logits == logits.max()).nonzero()[0])
        scaled = logits.float() * self._sampler(index).inverse_temperature
        ranked = scaled.sort(descending=True).values
        masses = ranked.double().softmax(0).cumsum(0)
        least = ranked[int((masses < params.top_p).sum()) if params.top_p < 1 else -1]
        noise = gumbel_all(index, self._position(index), len(scaled), scaled.device)
        return int((scaled + noise).masked_fill(scaled < least, float("-inf")).argmax())


@dataclass(frozen=True)
class Walk:
    """The accepted paths of several draft trees, from the tokens chosen at their nodes."""

    num_trees: int
    nodes: int
    op: str = "tree_walk"

    @property
    def label(self) -> str:
        return f"{self.num_trees} x {self.nodes} nodes"

    @property
    def num_bytes(self) -> int:
        """Four integers per node, one per tree, and the result."""
        per_tree = 4 * self.nodes + 1 + 3 + 2 * self.longest
        return 4 * (self.num_trees * per_tree + 1)

    @property
    def num_flops(self) -> int:
        return 0

    @property
    def longest(self) -> int:
        """Depth of the deepest node: what the result has room for."""
        return max(max(tree.depths) for tree in self.trees)

    @cached_property
    def trees(self) -> tuple[DraftTree, ...]:
        """Random trees; siblings carry different tokens."""
        return tuple(
            DraftTree(
                tuple(random.Random(seed).sample(range(4 * self.nodes), self.nodes)),
                random_parents(self.nodes, seed),
                (0.0,) * self.nodes,
                ((ROOT_SOURCE,),) * self.nodes,
            )
            for seed in range(self.num_trees)
        )

    @cached_property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """Per tree and node the chosen token, mostly one of a child."""
        rng = random.Random(self.nodes)
        return tuple(
            tuple(
                tree.token_ids[rng.choice(children)]
                if children and rng.random() < _HIT_RATE
                else 4 * self.nodes
                for children in tree.children
            )
            for tree in self.trees
        )

    def prepare(self, place: Place) -> Prepared:
        num_nodes = self.num_trees * self.nodes
        columns = (
            [token for chosen in self.choices for token in chosen],
            [1] * num_nodes,
            [token for tree in self.trees for token in tree.token_ids],
            [parent for tree in self.trees for parent in tree.parents],
            list(range(0, num_nodes + 1, self.nodes)),
        )
        num_sets = place.num_sets(self.num_bytes, 16)
        sets = [tuple(place.integers(column) for column in columns) for _ in range(num_sets)]
        return Prepared(
            [partial(self._run, place, *tensors) for tensors in sets],
            lambda: [Expected(place.integers([self._walked(i) for i in range(self.num_trees)]))],
        )

    def _run(
        self,
        place: Place,
        choices: Tensor,
        is_finite: Tensor,
        token_ids: Tensor,
        parents: Tensor,
        first_node: Tensor,
    ) -> Results:
        if place.uses_kernels:
            from specdec.kernels import tree_walk

            walk = tree_walk.tree_walk(
                choices, is_finite, token_ids, parents, first_node, self.longest
            )
            return (walk.buffer,)
        return (place.integers([self._verified(i) for i in range(self.num_trees)]),)

    def _verified(self, index: int) -> list[int]:
        """By specdec.verification, from logits that leave no doubt."""
        chosen = torch.tensor(self.choices[index])
        logits = torch.nn.functional.one_hot(chosen, 4 * self.nodes + 1).float()
        sampler = Sampler(SamplingParams(), (0,), seed=0, eos_token_ids=())
        verdict = verify("coupled", self.trees[index], logits, sampler, [])
        return self._row(verdict.token_ids, verdict.path)

    def _walked(self, index: int) -> list[int]:
        """By looking for a child until there is none."""
        tree, chosen = self.trees[index], self.choices[index]
        path, tokens, node = [], [chosen[0]], tree.child_with(0, chosen[0])
        while node is not None:
            path.append(node)
            tokens.append(chosen[node])
            node = tree.child_with(node, chosen[node])
        return self._row(tokens, path)

    def _row(self, tokens: Sequence[int], path: Sequence[int]) -> list[int]:
        """A row of TreeWalk's buffer."""
        unused = [-1] * (self.longest - len(path))
        return [len(path), 1, *tokens, *unused, *path, *unused]


@dataclass(frozen=True)
class MoveSlots:
    """Accepted keys and values of all layers moved to the front of their requests' slots."""

    moves: int
    dims: Dims
    dtype: torch.dtype
    op: str = "move_slots"

    @property
    def label(self) -> str:
        return f"{self.moves} slots x {self.dims.num_layers} layers"

    @property
    def num_bytes(self) -> int:
        """Each slot's keys and values read and written, and its two numbers."""
        numbers = self.dims.num_layers * 2 * self.dims.num_kv_heads * self.dims.head_dim
        return self.moves * (2 * numbers * self.dtype.itemsize + 8)

    @property
    def num_flops(self) -> int:
        return 0

    def prepare(self, place: Place) -> Prepared:
        dims = self.dims
        num_requests = -(-self.moves // _MOVES_PER_REQUEST)
        num_sets = place.num_sets(self.num_bytes, max(1, 512 // num_requests))
        kv_cache = KVCache(
            num_layers=dims.num_layers,
            num_blocks=num_sets * num_requests,
            num_kv_heads=dims.num_kv_heads,
            block_size=dims.block_size,
            head_dim=dims.head_dim,
            dtype=self.dtype,
            device=place.device,
        )
        kv_cache.data.normal_()
        order = torch.randperm(kv_cache.num_blocks).view(num_sets, num_requests).tolist()
        sets = [self._slots(blocks, seed) for seed, blocks in enumerate(order)]
        return Prepared(
            [self._call(place, kv_cache, *slots) for slots in sets],
            lambda: self._expect(kv_cache.data, *sets[0]),
        )

    def _slots(self, blocks: Sequence[int], seed: int) -> tuple[list[int], list[int]]:
        """Sources and destinations: the root in slot 0 of a block, the path's nodes behind it."""
        rng, size = random.Random(seed), self.dims.block_size
        src: list[int] = []
        dst: list[int] = []
        for block in blocks:
            count = min(_MOVES_PER_REQUEST, self.moves - len(src))
            nodes = sorted(rng.sample(range(2, size), count))
            src += [block * size + node for node in nodes]
            dst += [block * size + depth for depth in range(1, count + 1)]
        return src, dst

    def _call(
        self, place: Place, kv_cache: KVCache, src: list[int], dst: list[int]
    ) -> partial[Results]:
        if place.uses_kernels:
            return partial(_move, kv_cache.data, place.integers(src), place.integers(dst))
        return partial(_move_by_reference, kv_cache, src, dst)

    def _expect(self, data: Tensor, src: list[int], dst: list[int]) -> Sequence[Expected]:
        moved, size = data.clone(), self.dims.block_size
        for source, target in zip(src, dst, strict=True):
            slot = data[:, :, source // size, :, source % size]
            moved[:, :, target // size, :, target % size] = slot
        return [Expected(moved)]


def _move(data: Tensor, src: Tensor, dst: Tensor) -> Results:
    from specdec.kernels import kv_slots

    kv_slots.move_slots(data, src, dst)
    return (data,)


def _move_by_reference(kv_cache: KVCache, src: Sequence[int], dst: Sequence[int]) -> Results:
    kv_cache.move(src, dst)
    return (kv_cache.data,)
