"""DeviceForward: the target forward as Triton kernels over static tables, recorded and replayed."""

from __future__ import annotations

from specdec.cuda_graphs import (
    ROW_BUCKETS,
    Caller,
    CudaRecorder,
    RecordedSteps,
    Recorder,
    row_bucket,
)
from specdec.kernels.attention_tiles import Processors, power_of_two, tile_shape
from specdec.kernels.batch import Batch
from specdec.kernels.segment import Segment
from specdec.kernels.step_tables import StepTables, TableSizes
from specdec.kernels.triton_step import TritonStep
from specdec.kv_cache import KVCache
from specdec.model import TargetModel
from specdec.target import TargetOutput

_LONG_CONTEXT = 4096  # of a rehearsal


class DeviceForward:
    """Runs batches on the model's device.

    Steps of up to 256 rows are recorded by the sizes of their tables: rows, tiles, segments and
    splits are rounded up to buckets, so that few recordings serve all steps. Larger ones, prefill
    chunks, are launched as they are. In deterministic mode (a model with a row tile) products see
    one number of rows and attention adds keys in the order of positions.

    Example: `DeviceForward(model, kv_cache)(runner.pack(plan, trees))`.
    """

    def __init__(
        self, model: TargetModel, kv_cache: KVCache, recorder: Recorder[TargetOutput] | None = None
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._device = kv_cache.data.device
        self._row_multiple = model.weights.row_tile or 1
        self._processors = Processors.of(self._device)
        on_gpu = self._device.type == "cuda"
        self._recorded = RecordedSteps(
            recorder or (CudaRecorder() if on_gpu else Caller()), self._make_tables, self._step
        )

    def __call__(self, batch: Batch) -> TargetOutput:
        """Logits and hidden states, valid until the next call."""
        sizes = self.sizes(batch)
        num_logits = len(batch.logit_rows)
        if sizes.num_rows <= ROW_BUCKETS[-1]:
            return self._recorded.run(sizes, lambda tables: tables.load(batch)).first(num_logits)
        tables = self._make_tables(sizes)
        tables.load(batch)
        return self._step(tables).first(num_logits)

    def warm_up(self, node_budget: int, token_budget: int) -> None:
        """Compile and record what a lone stream needs: prompt, plain steps, chains, trees, moves.

        At a short and at a longer context, where keys are split. Writes to the KV cache, so call it
        before anything is in there.
        """
        room = min(self._model.cos.shape[0], self._kv_cache.num_blocks * self._kv_cache.block_size)
        for end in sorted({min(room, 256), min(room, _LONG_CONTEXT)}):
            for num_rows in sorted({1, 2, 1 + node_budget}):
                if num_rows <= end:
                    self(self._rehearsal(num_rows, end, num_logits=num_rows))
                    if num_rows > 2:
                        self(self._rehearsal(num_rows, end, num_logits=num_rows, is_tree=True))
            self(self._rehearsal(min(token_budget, end), end, num_logits=1))
        self._kv_cache.move([0], [0])

    def _rehearsal(
        self, num_rows: int, end: int, *, num_logits: int, is_tree: bool = False
    ) -> Batch:
        """A batch of one request whose rows take the last places before `end`."""
        blocks = tuple(range(-(-end // self._kv_cache.block_size)))
        star = tuple(1 | 1 << node for node in range(num_rows))  # a root and its children
        root = end - num_rows
        segment = Segment(0, num_rows, root, blocks, star if is_tree else None)
        return Batch(
            token_ids=(0,) * num_rows,
            positions=segment.positions,
            slots=tuple(range(root, end)),
            segments=(segment,),
            logit_rows=tuple(range(num_rows - num_logits, num_rows)),
            first_logit=(0, num_logits),
        )

    def sizes(self, batch: Batch) -> TableSizes:
        """The tables' sizes, rounded up to buckets."""
        segments, heads = batch.segments, self._model.heads
        shape = tile_shape(
            segments,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            itemsize=self._model.weights.dtype.itemsize,
            is_deterministic=self._model.weights.row_tile is not None,
            processors=self._processors,
        )
        num_rows = row_bucket(batch.num_rows, self._row_multiple)
        step = shape.rows_per_tile
        num_tiles = sum(-(-s.num_rows // step) for s in segments)
        num_tiles += -(-(num_rows - batch.num_rows) // step)
        num_tails = 0
        if shape.is_deterministic:
            num_tails = sum(s.num_rows for s in segments if s.ancestors is not None)
        blocks = -(-self._model.cos.shape[0] // self._kv_cache.block_size)
        return TableSizes(
            num_rows=num_rows,
            num_tiles=power_of_two(num_tiles),
            num_segments=power_of_two(len(segments) + 2),  # padding's, and the one that is empty
            table_width=blocks + 1,
            num_tails=row_bucket(num_tails) if num_tails else 0,
            num_logits=row_bucket(len(batch.logit_rows), self._row_multiple),
            shape=shape,
        )

    def _make_tables(self, sizes: TableSizes) -> StepTables:
        return StepTables(sizes, self._device)

    def _step(self, tables: StepTables) -> TargetOutput:
        model = self._model
        ops = TritonStep(tables, model.heads, model.cos, model.sin)
        return model.forward(ops, self._kv_cache)
