"""StepTables: what the kernels read after a load is the batch, whatever was loaded before."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from specdec.kernels.attention_tiles import AttentionTiles, TileShape, make_tiles
from specdec.kernels.batch import Batch
from specdec.kernels.segment import Segment
from specdec.kernels.step_tables import StepTables, TableSizes
from tests.kernels.device import DEVICE, needs_gpu

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


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_table_is_aligned(count: int) -> None:
    """Also where their sizes are odd; and none overlaps the next."""
    odd = TableSizes(count, count, count + 2, count, count, count, FIXED)
    tables = StepTables(odd, DEVICE)
    of_tiles = [getattr(tables.tiles, f.name) for f in dataclasses.fields(AttentionTiles)]
    every = [tables.token_ids, tables.slots, tables.logit_rows]
    every += [table for table in of_tiles if isinstance(table, torch.Tensor)]
    assert len(every) == 15
    first = tables._buffer.data_ptr()
    assert all((table.data_ptr() - first) % 16 == 0 for table in every)
    every.sort(key=torch.Tensor.data_ptr)
    for before, after in itertools.pairwise(every):
        assert before.data_ptr() + before.nbytes <= after.data_ptr()


class Copied:
    """Stands for the event after a copy: what the mirror held when it was set and waited for."""

    def __init__(self, tables: StepTables) -> None:
        self._tables = tables
        self.history: list[tuple[str, torch.Tensor]] = []

    def record(self) -> None:
        self.history.append(("record", self._tables._mirror.clone()))

    def synchronize(self) -> None:
        self.history.append(("wait", self._tables._mirror.clone()))


def test_the_mirror_is_not_changed_before_it_was_copied() -> None:
    tables = StepTables(sizes(FAST), DEVICE)
    copied = Copied(tables)
    tables._copied = copied  # type: ignore[assignment]  # an event of a GPU
    for seed in (1, 2):
        tables.load(make_batch(seed))
    names, mirrors = zip(*copied.history, strict=True)
    assert names == ("wait", "record", "wait", "record")
    assert torch.equal(mirrors[1], mirrors[2]) and not torch.equal(mirrors[2], mirrors[3])


@needs_gpu
def test_loads_may_follow_each_other_unread() -> None:
    """The device is busy, so copies wait; each must still take its own batch."""
    tables, got = StepTables(sizes(FAST), DEVICE), []
    torch.cuda._sleep(500_000_000)
    for seed in range(3):
        tables.load(make_batch(seed))
        got.append(tables._buffer.clone())
    for seed, loaded in enumerate(got):
        fresh = StepTables(sizes(FAST), DEVICE)
        fresh.load(make_batch(seed))
        assert torch.equal(loaded, fresh._buffer)


def test_the_last_segment_stays_nobodys() -> None:
    """Padding tiles point at it; a batch that needs it is our own bug."""
    batch = make_batch(1)
    num_segments = len(batch.segments) + 1  # those of the batch and padding's
    for room in (num_segments, num_segments + 1):
        tables = StepTables(dataclasses.replace(sizes(FAST), num_segments=room), DEVICE)
        if room > num_segments:
            tables.load(batch)
            continue
        with pytest.raises(AssertionError):
            tables.load(batch)
