"""BatchBuilder: rows of several requests one after the other, each where its request has it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.batch_builder import BatchBuilder
from specdec.kernels.segment import ancestor_masks

BLOCK = 16


@st.composite
def parts(draw: st.DrawFn) -> dict[str, object]:
    """One request's rows: a chunk or a tree at some root, in blocks in any order."""
    num_rows, root = draw(st.integers(1, 12)), draw(st.integers(0, 40))
    num_blocks = -(-(root + num_rows) // BLOCK)
    is_tree = draw(st.booleans())
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, num_rows)]
    rows = st.lists(st.integers(0, num_rows - 1), max_size=num_rows)
    return {
        "table": draw(st.permutations(range(num_blocks))),
        "token_ids": draw(st.lists(st.integers(0, 99), min_size=num_rows, max_size=num_rows)),
        "root": root,
        "ancestors": ancestor_masks(parents) if is_tree else None,
        "wanted": draw(st.none() | rows),
    }


@settings(deadline=None)
@given(st.lists(parts(), max_size=5))
def test_every_row_stands_where_its_request_has_it(made: list[dict[str, object]]) -> None:
    builder = BatchBuilder(BLOCK)
    for part in made:
        builder.add(**part)  # type: ignore[arg-type]  # mixed keywords
    batch = builder.build()
    rows = list(zip(batch.token_ids, batch.positions, batch.slots, strict=True))
    logit_rows, first_logit = [], [0]
    for part, segment in zip(made, batch.segments, strict=True):
        table, token_ids, root = part["table"], part["token_ids"], part["root"]
        assert isinstance(table, list) and isinstance(token_ids, list) and isinstance(root, int)
        masks, wanted = part["ancestors"], part["wanted"]
        for row, token_id in enumerate(token_ids):
            place = root + row
            depth = masks[row].bit_count() - 1 if isinstance(masks, tuple) else row
            slot = table[place // BLOCK] * BLOCK + place % BLOCK
            assert rows[segment.start + row] == (token_id, root + depth, slot)
        assert (segment.num_rows, segment.root) == (len(token_ids), root)
        assert list(segment.block_ids) == table and segment.ancestors == masks
        if isinstance(wanted, list):
            logit_rows += [segment.start + row for row in wanted]
            first_logit.append(len(logit_rows))
    assert batch.num_rows == sum(segment.num_rows for segment in batch.segments)
    assert list(batch.logit_rows) == logit_rows and list(batch.first_logit) == first_logit
    starts = [segment.start for segment in batch.segments]
    assert starts == sorted(starts) and starts[:1] in ([], [0])


def test_the_example_of_the_class() -> None:
    builder = BatchBuilder(block_size=32)
    builder.add([7, 2], [5, 8, 9], root=40, ancestors=(0b1, 0b11, 0b101), wanted=range(3))
    batch = builder.build()
    assert batch.positions == (40, 41, 41) and batch.slots == (72, 73, 74)
    assert batch.logit_rows == (0, 1, 2) and batch.first_logit == (0, 3)
