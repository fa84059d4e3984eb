"""StepTables: what the kernels read after a load is the batch, whatever was loaded before."""

from __future__ import annotations

import dataclasses
import random

import torch

from specdec.kernels.attention_tiles import AttentionTiles, TileShape, make_tiles
from specdec.kernels.batch import Batch
from specdec.kernels.segment import Segment
from specdec.kernels.step_tables import StepTables, TableSizes
from tests.kernels.device import DEVICE

FAST = TileShape(group=2, block_m=16, block_n=64, num_splits=2, split_size=0, words=2)
FIXED = dataclasses.replace(FAST, split_size=512)


def make_batch(seed: int) -> Batch:
    """Two to four requests: chunks and trees of up to 40 nodes over random blocks."""
    rng = random.Random(seed)
    segments: list[Segment] = []
    for _ in range(rng.randrange(2, 5)):
        count = rng.choice((1, 3, 20, 40))
        masks: list[int] = [1]
        for node in range(1, count):
            masks.append(masks[rng.randrange(max(0, node - 3), node)] | 1 << node)
        blocks = [rng.randrange(50) for _ in range(5)]
        start = sum(s.num_rows for s in segments)
        tree = tuple(masks) if rng.random() < 0.6 else None
        segments.append(Segment(start, count, rng.randrange(60), blocks, tree))
    positions = [p for s in segments for p in s.positions]
    rows = range(len(positions))
    return Batch(
        token_ids=tuple(rng.randrange(99) for _ in rows),
        positions=tuple(positions),
        slots=tuple(rng.randrange(1000) for _ in rows),
        segments=tuple(segments),
        logit_rows=tuple(row for row in rows if rng.random() < 0.5),
        first_logit=(),
    )


def sizes(shape: TileShape) -> TableSizes:
    return TableSizes(
        num_rows=192,
        num_tiles=64,
        num_segments=8,
        table_width=9,
        num_tails=192,
        num_logits=192,
        shape=shape,
    )


def test_a_load_leaves_nothing_of_the_batch_before() -> None:
    for shape in (FAST, FIXED):
        tables = StepTables(sizes(shape), DEVICE)
        addresses = [tables.token_ids.data_ptr(), tables.tiles.ancestors.data_ptr()]
        for seed in range(8):
            batch = make_batch(seed)
            tables.load(batch)
            fresh = StepTables(sizes(shape), DEVICE)
            fresh.load(batch)
            assert torch.equal(tables._buffer, fresh._buffer)
        assert addresses == [tables.token_ids.data_ptr(), tables.tiles.ancestors.data_ptr()]


def test_tables_hold_the_batch_and_its_tiles() -> None:
    for shape in (FAST, FIXED):
        tables = StepTables(sizes(shape), DEVICE)
        for seed in range(8):
            batch = make_batch(seed)
            tables.load(batch)
            count = batch.num_rows
            assert tuple(tables.token_ids[:count].tolist()) == batch.token_ids
            assert tuple(tables.slots[:count].tolist()) == batch.slots
            assert tuple(tables.tiles.positions[:count].tolist()) == batch.positions
            assert tuple(tables.logit_rows[: len(batch.logit_rows)].tolist()) == batch.logit_rows
            tiles = make_tiles(batch.segments, shape, num_rows=192, device=DEVICE)
            for field in dataclasses.fields(AttentionTiles):
                if field.name == "shape":
                    continue
                want, got = (getattr(t, field.name) for t in (tiles, tables.tiles))
                room = tuple(slice(n) for n in want.shape)
                assert torch.equal(got[room], want), field.name


def test_padding_writes_nothing_and_reads_nothing() -> None:
    tables = StepTables(sizes(FIXED), DEVICE)
    batch = make_batch(3)
    tables.load(batch)
    tiles, last = tables.tiles, 8 - 1
    assert (tables.slots[batch.num_rows :] == -1).all()
    made = make_tiles(batch.segments, FIXED, num_rows=192, device=DEVICE)
    assert (tiles.tile_segments[len(made.tile_segments) :] == last).all()
    assert not tiles.num_rows[last] and not tiles.shared_lens[last] and not tiles.num_own[last]
    assert (tiles.tail_rows[len(made.tail_rows) :] == -1).all()


def test_words_with_the_sign_bit_survive_the_32_bit_buffer() -> None:
    masks = [1]
    for node in range(1, 100):
        masks.append(masks[-1] | 1 << node)
    tree = (*masks[:-1], masks[-2] | 1 << 99)
    tables = StepTables(sizes(FAST), DEVICE)
    segment = Segment(0, 100, 5, [1, 2, 3, 4], tree)
    tables.load(Batch((0,) * 100, segment.positions, tuple(range(100)), (segment,), (0,), (0, 1)))
    words = tables.tiles.ancestors[:100].tolist()
    assert [w % 2**64 | (v % 2**64) << 64 for w, v in words] == list(tree)
    assert any(w < 0 for w, _ in words)
