"""A token's logits are the same bits, whatever stands beside it and however it was computed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.config import EngineConfig
from specdec.kernels.attention_group import ROW_TILE
from specdec.loading import load_target
from specdec.model import TargetModel
from specdec.model_config import ModelConfig
from specdec.model_runner import ModelRunner
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, PrefillChunk, StepPlan
from specdec.request import Request
from specdec.row_invariance import PINNED_ROWS, min_rows, padding
from specdec.target import Target
from specdec.tree import ROOT_SOURCE, DraftTree
from specdec.weights import ModelWeights, PackedLinear
from tests.cache_contents import contents
from tests.toy import ALPHABET, CONFIG, Form, RandomTensors

VOCAB = len(ALPHABET)
NUM_BLOCKS = 100
FULL = {**CONFIG, "max_position_embeddings": 400}  # more than reference.TILES_PER_SUM tiles
MIXED = {
    **FULL,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 21,
    "max_window_layers": 1,
}
WIDE = {**FULL, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1}


class Biased(RandomTensors):
    """Qwen2's biases too."""

    def get(self, name: str) -> Tensor:
        if not name.endswith("bias"):
            return super().get(name)
        return super().get(name.replace(".bias", ".weight"))[:, 0]


FORMS = (
    Form("torch", "fp32"),
    Form("torch", "bf16"),
    *(Form("native", weights) for weights in ("fp32", "bf16", "int8", "int4")),
)


@cache
def model(kind: str, form: Form) -> Target:
    """`full` attention; `mixed` with a sliding window; `wide` as a small real model is."""
    fields = {"full": FULL, "mixed": MIXED, "wide": WIDE}[kind]
    shape = ModelConfig.from_checkpoint(fields)
    config = EngineConfig(backend=form.backend, weights=form.weights)
    return load_target(config, shape, Biased(fields, 1), shape.max_position)


def torch_model(kind: str) -> TargetModel:
    """PyTorch's forward in fp32."""
    target = model(kind, FORMS[0])
    assert isinstance(target, TargetModel)
    return target


class Session:
    """A runner with an empty cache of its own."""

    def __init__(self, target: Target) -> None:
        kv_cache = target.make_kv_cache("auto", num_blocks=NUM_BLOCKS, block_size=16)
        self.runner = ModelRunner(target, kv_cache)

    def step(
        self,
        chunks: Sequence[tuple[Request, int, int]] = (),
        trees: Sequence[tuple[Request, DraftTree]] = (),
    ) -> Tensor:
        """Logits of every row, not only those of the trees [num_rows, vocab]."""
        steps = tuple(DecodeStep(request, tree.num_nodes - 1) for request, tree in trees)
        plan = StepPlan(tuple(itertools.starmap(PrefillChunk, chunks)), steps)
        batch = self.runner.pack(plan, [tree for _, tree in trees])
        num_rows = len(batch.slots)
        wanted = dataclasses.replace(batch, logit_rows=tuple(range(num_rows)))
        return self.runner.forward(wanted).logits.clone()


def request(token_ids: Sequence[int], block_ids: Sequence[int] | None = None) -> Request:
    made = Request("r", tuple(token_ids), SamplingParams(seed=0))
    made.block_ids = list(range(25) if block_ids is None else block_ids)
    return made


def alone(target: Target, token_ids: Sequence[int]) -> Tensor:
    """Logits after the last token: one prefill chunk and a root, nothing else."""
    known = request(token_ids)
    chunks = [(known, 0, len(token_ids) - 1)] if len(token_ids) > 1 else []
    return Session(target).step(chunks, [(known, DraftTree.root_only(token_ids[-1]))])[-1]


@dataclass(frozen=True)
class Job:
    """A request: its known tokens, how prefill is cut, and the shape of its tree."""

    num_known: int
    cuts: tuple[int, ...]
    num_nodes: int
    reach: int  # how far back a node's parent may be; 1: a chain
    seed: int

    def tokens(self) -> list[int]:
        rng = random.Random(self.seed)
        return [rng.randrange(VOCAB) for _ in range(self.num_known)]

    def bounds(self) -> list[int]:
        end = self.num_known - 1
        return sorted({0, end, *(cut for cut in self.cuts if cut < end)})

    def tree(self) -> DraftTree:
        rng, n = random.Random(self.seed + 1), self.num_nodes
        parents = [rng.randrange(max(0, node - self.reach), node) for node in range(1, n)]
        token_ids = [rng.randrange(VOCAB) for _ in parents]
        return DraftTree(
            (self.tokens()[-1], *token_ids), (-1, *parents), (0.0,) * n, ((ROOT_SOURCE,),) * n
        )


jobs = st.builds(
    Job,
    num_known=st.integers(1, 90) | st.integers(1, 90) | st.integers(240, 340),
    cuts=st.lists(st.integers(1, 339), max_size=4).map(tuple),
    num_nodes=st.sampled_from([1, 1, 2, 6, 17, 40]),
    reach=st.sampled_from([1, 3, 40]),
    seed=st.integers(0, 9999),
)
kinds = pytest.mark.parametrize("kind", ["full", "mixed"])
forms = pytest.mark.parametrize("form", FORMS, ids=str)


@kinds
@forms
def test_a_tokens_logits_are_the_same_bits_in_any_batch(kind: str, form: Form) -> None:
    """Prefilled in any chunks, decoded or drafted on any branch, in any company and any blocks."""
    target = model(kind, form)

    @settings(max_examples=25, deadline=None)
    @given(mix=st.lists(jobs, min_size=1, max_size=4), seed=st.integers(0, 9999))
    def check(mix: list[Job], seed: int) -> None:
        rng = random.Random(seed)
        blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        requests = [
            request(job.tokens(), blocks[25 * i : 25 * i + 25]) for i, job in enumerate(mix)
        ]
        session = Session(target)
        pending = [list(itertools.pairwise(job.bounds())) for job in mix]
        seen: list[tuple[list[int], Tensor]] = []  # path of tokens, logits after it
        is_done = [False] * len(mix)
        while not all(is_done):
            chunks, trees, paths = [], [], []
            for index, known in enumerate(requests):
                if pending[index]:
                    start, end = pending[index].pop(0)
                    chunks.append((known, start, end))
                    paths += [known.token_ids[: i + 1] for i in range(start, end)]
            for index, (job, known) in enumerate(zip(mix, requests, strict=True)):
                if not pending[index] and (not is_done[index] or rng.random() < 0.5):
                    tree = job.tree()
                    trees.append((known, tree))
                    paths += [
                        known.token_ids[:-1] + [tree.token_ids[i] for i in tree.path(node)]
                        for node in range(tree.num_nodes)
                    ]
                    is_done[index] = True
            seen += zip(paths, session.step(chunks, trees), strict=True)
        for path, logits in rng.sample(seen, min(len(seen), 12)):
            assert torch.equal(logits, alone(target, path))

    check()


@kinds
@forms
def test_every_cut_of_a_prompt_gives_the_same_bits(kind: str, form: Form) -> None:
    """Token by token, in sevens, or all at once; so do all keys and values."""
    target, tokens = model(kind, form), Job(330, (), 1, 1, 5).tokens()
    known = request([*tokens, 0], random.Random(0).sample(range(NUM_BLOCKS), 25))
    results = []
    for size in (1, 7, 33, 330):
        session = Session(target)
        starts = range(0, 330, size)
        parts = [session.step([(known, i, min(i + size, 330))]) for i in starts]
        results.append((torch.cat(parts), contents(session.runner.kv_cache)))
    for logits, data in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert torch.equal(data, results[0][1])


@forms
@pytest.mark.parametrize("num_others", [1, 2, 31, 32, 40, 63, 64])
def test_the_rest_after_full_tiles_is_not_special(num_others: int, form: Form) -> None:
    """The 33rd row once went through a product of one row, and got other bits than alone.

    Products are cut in tiles of 32 rows, and only batches below `min_rows` were padded.
    """
    target = model("wide", form)
    token_ids = Job(20, (), 1, 1, 3).tokens()
    known, other = request(token_ids), request([1] * (num_others + 1), range(30, 40))
    session = Session(target)
    session.step([(known, 0, 19)])
    logits = session.step([(other, 0, num_others)], [(known, DraftTree.root_only(token_ids[-1]))])
    assert torch.equal(logits[-1], alone(target, token_ids))


@pytest.mark.parametrize("num_others", [0, 1, 2, 31, 32, 40, 63, 64])
def test_no_product_sees_too_few_rows(num_others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the head's, which has few rows when few logits are wanted; nor too many.

    PyTorch's only: the native products are invariant from one row on.
    """
    target, sizes = torch_model("full"), set[int]()
    product = PackedLinear._product

    def spy(self: PackedLinear, x: Tensor) -> Tensor:
        sizes.add(len(x))
        return product(self, x)

    monkeypatch.setattr(PackedLinear, "_product", spy)
    monkeypatch.setattr(target, "min_rows", 8)
    known, other = request([1]), request([1] * (num_others + 1), range(30, 40))
    runner = Session(target).runner
    chunks = (PrefillChunk(other, 0, num_others),) if num_others else ()
    for num_nodes in (1, 33):
        plan = StepPlan(chunks, (DecodeStep(known, num_nodes - 1),))
        tree = Job(1, (), num_nodes, 3, 1).tree()
        assert len(runner.forward(runner.pack(plan, [tree])).logits) == num_nodes
    assert min(sizes) >= 8
    assert max(sizes) <= ROW_TILE


@given(num_rows=st.integers(0, 300), fewest=st.sampled_from([1, 4, 8, 16, ROW_TILE]))
def test_padding_leaves_no_small_product(num_rows: int, fewest: int) -> None:
    padded = num_rows + padding(num_rows, fewest)
    tiles = torch.zeros(padded, 1).split(ROW_TILE)
    assert min(len(tile) for tile in tiles) >= fewest
    assert padded - num_rows <= fewest


# --- the probe, for PyTorch's products ---


class FakeProduct:
    """Sums in order from `invariant_from` rows on; below, an output in `rarity` differs a bit.

    With `place`, only in every fourth row from there, as where a kernel takes rows by fours.
    """

    in_features, out_features = 24, 64

    def __init__(self, invariant_from: int, rarity: int = 1, place: int | None = None) -> None:
        self._weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).double()
        self._invariant_from, self._rarity, self._place = invariant_from, rarity, place
        self.sizes: set[int] = set()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self._tile(rows) for rows in x.split(ROW_TILE)])

    def _tile(self, x: Tensor) -> Tensor:
        self.sizes.add(len(x))
        out = (x.double()[:, :, None] * self._weight).sum(1).float()
        if len(x) < self._invariant_from:
            other = torch.nextafter(out, torch.tensor(torch.inf))
            # Which outputs differ is a matter of the values alone, as rounding is.
            is_hit = (out.view(torch.int32) // 2) % self._rarity == 0
            if self._place is not None:
                is_hit &= torch.arange(len(x))[:, None] % 4 == self._place
            out = torch.where(is_hit, other, out)
        return out


def probed(*products: FakeProduct) -> int:
    return min_rows(cast(Any, products), torch.float32)


@pytest.mark.parametrize(
    ("invariant_from", "found"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 32)]
)
@pytest.mark.parametrize(("rarity", "place"), [(1, None), (5000, None), (1, 0), (1, 2)])
def test_the_probe_finds_the_fewest_rows(
    invariant_from: int, found: int, rarity: int, place: int | None
) -> None:
    fake = FakeProduct(invariant_from, rarity, place)
    assert probed(fake) == found
    assert fake.sizes <= {4, 8, 16, 32}


def test_the_neediest_product_decides() -> None:
    assert probed(FakeProduct(1), FakeProduct(8), FakeProduct(4)) == 8


def test_what_is_never_invariant_gets_full_tiles() -> None:
    assert probed(FakeProduct(ROW_TILE + 1, place=0)) == ROW_TILE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_promise_holds_for_a_real_product(dtype: torch.dtype) -> None:
    """Between the number found and a full tile: every number, not only those tried."""
    weight = torch.randn(576, 1536, generator=torch.Generator().manual_seed(0)) / 40
    product = PackedLinear(weight.to(dtype))
    x = torch.randn(ROW_TILE, 1536, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = product(x)
    for num_rows in range(min_rows([product], dtype), ROW_TILE):
        for start in (0, ROW_TILE - num_rows):
            rows = slice(start, start + num_rows)
            assert torch.equal(product(x[rows]), expected[rows])


def test_a_gpu_multiplies_only_the_pinned_number_of_rows() -> None:
    """Nothing is tried there; `meta` stands for a device that is not the CPU."""
    config, meta = ModelConfig.from_checkpoint(CONFIG), torch.device("meta")
    weights = ModelWeights.load(config, RandomTensors(CONFIG, 0), torch.float32, meta, PINNED_ROWS)
    model = TargetModel(config, weights, config.max_position)
    assert [model.padding(num_rows) for num_rows in (1, 63, 64, 65)] == [63, 1, 0, 63]
    weights = dataclasses.replace(weights, row_tile=None)
    assert TargetModel(config, weights, config.max_position).padding(65) == 0
