"""KernelForward: the whole forward and a whole engine step, with random weights of an 8B Llama."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.cuda_graphs import Caller, CudaRecorder, Recorder
from specdec.evals.kernel.attention_cases import random_parents
from specdec.evals.kernel.timer import Timer
from specdec.kernels.batch import Batch
from specdec.kernels.segment import Segment, ancestor_masks
from specdec.kv_cache import KVCache, slot_at
from specdec.model import TargetModel
from specdec.model_config import ModelConfig
from specdec.target import TargetOutput
from specdec.weights import ModelWeights

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
CYCLE = 8  # tokens after which the model repeats itself
BLOCK_SIZE = 32
# Of each weight's natural size: the last token outweighs what the layers add.
_GAIN = 0.1


class RandomSource:
    """Random weights by name, made on the device: a TensorSource.

    The head is the embedding in another order, so that a greedy answer walks through CYCLE tokens
    again and again and an n-gram drafter has something to find.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._embedding: Tensor | None = None

    def get(self, name: str) -> Tensor:
        """See TensorSource."""
        c = self._config
        hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        rows_q, rows_kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
        if "norm" in name:
            return 1.0 + 0.1 * self._randn(hidden)
        if "embed_tokens" in name:
            self._embedding = self._randn(c["vocab_size"], hidden)
            return self._embedding
        if "lm_head" in name:
            assert self._embedding is not None
            token_ids = torch.arange(c["vocab_size"], device=self._device)
            before = token_ids // CYCLE * CYCLE + (token_ids - 1) % CYCLE
            return self._embedding[before.clamp(max=c["vocab_size"] - 1)]
        shapes = {
            "q_proj": (rows_q, hidden),
            "k_proj": (rows_kv, hidden),
            "v_proj": (rows_kv, hidden),
            "o_proj": (hidden, rows_q),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        shape = shapes[name.split(".")[-2]]
        return self._randn(*shape).mul_(_GAIN / shape[1] ** 0.5)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)


def random_model(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    row_tile: int | None,
) -> TargetModel:
    """A model of this shape; `row_tile` None = fast, else deterministic with that many rows."""
    shape = ModelConfig.from_checkpoint(config)
    source = RandomSource(config, dtype, device)
    weights = ModelWeights.load(shape, source, dtype, device, row_tile)
    return TargetModel(shape, weights, max_len)


def weight_bytes(config: Mapping[str, Any], itemsize: int) -> int:
    """Bytes of the weights that one forward reads: all but the embedding."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * dim * (2 * num_heads + 2 * num_kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    norms = hidden * (2 * config["num_hidden_layers"] + 1)
    products = config["num_hidden_layers"] * (attention + mlp) + config["vocab_size"] * hidden
    return int(products * itemsize + 4 * norms)


class KeepingRecorder:
    """Hands on to another recorder and keeps what replays each recording."""

    def __init__(self, recorder: Recorder[TargetOutput]) -> None:
        self._recorder = recorder
        self.replays: list[Callable[[], TargetOutput]] = []

    def record(self, step: Callable[[], TargetOutput]) -> Callable[[], TargetOutput]:
        """See Recorder."""
        self.replays.append(self._recorder.record(step))
        return self.replays[-1]


def keeping_recorder(device: torch.device) -> KeepingRecorder:
    """The recorder that serving uses on this device."""
    return KeepingRecorder(CudaRecorder() if device.type == "cuda" else Caller())


def tree_batch(context: int, nodes: int, vocab_size: int) -> Batch:
    """One request of `context` committed positions with a random tree, all logits wanted."""
    blocks = tuple(torch.randperm(-(-(context + nodes) // BLOCK_SIZE)).tolist())
    masks = ancestor_masks(random_parents(nodes, 0)) if nodes > 1 else None
    segment = Segment(0, nodes, context, blocks, masks)
    places = range(context, context + nodes)
    return Batch(
        token_ids=tuple(torch.randint(vocab_size, (nodes,)).tolist()),
        positions=segment.positions,
        slots=tuple(slot_at(blocks, place, BLOCK_SIZE) for place in places),
        segments=(segment,),
        logit_rows=tuple(range(nodes)),
        first_logit=(0, nodes),
    )


def forward_seconds(model: TargetModel, timer: Timer, *, context: int, nodes: int) -> float:
    """Time of a recorded forward of one tree behind `context` positions of random keys and values.

    Raises ValueError for logits that are not finite.
    """
    from specdec.device_forward import DeviceForward

    shape, device = model.config, model.weights.embedding.device
    kv_cache = KVCache(
        num_layers=shape.num_layers,
        num_blocks=-(-(context + nodes) // BLOCK_SIZE),
        num_kv_heads=shape.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=shape.head_dim,
        dtype=model.weights.dtype,
        device=device,
    )
    kv_cache.data.normal_()
    recorder = keeping_recorder(device)
    batch = tree_batch(context, nodes, shape.vocab_size)
    logits = DeviceForward(model, kv_cache, recorder)(batch).logits
    if not bool(logits.isfinite().all()):
        raise ValueError("logits are not finite")
    return timer.replay_seconds(recorder.replays[0])


@dataclass(frozen=True)
class EngineSteps:
    """Decode steps of a whole engine: seconds of each, and of the forward of its size alone."""

    step_seconds: Sequence[float]
    forward_seconds: Sequence[float]
    rows: Sequence[int]

    @property
    def other_seconds(self) -> float:
        """Median of what a step takes beside its forward."""
        pairs = zip(self.step_seconds, self.forward_seconds, strict=True)
        return statistics.median(step - forward for step, forward in pairs)


def engine_steps(
    model: TargetModel, timer: Timer, *, prompt_len: int, num_steps: int, node_budget: int = 16
) -> EngineSteps:
    """One greedy stream of random prompt tokens with the n-gram drafter; recording steps left out.

    A step's time includes what the host does while the device works. Keys and values that a
    commit moves are waited for in the next step.
    """
    from specdec.config import EngineConfig
    from specdec.device_forward import DeviceForward
    from specdec.drafters.ngram import NgramDrafter
    from specdec.engine import Engine
    from specdec.loading import LoadedModel
    from specdec.model_runner import ModelRunner
    from specdec.params import SamplingParams
    from specdec.request import Request

    shape, device = model.config, model.weights.embedding.device

    class KeepingRunner(ModelRunner):
        """Remembers every batch, and which of its steps recorded."""

        def __init__(self, kv_cache: KVCache) -> None:
            super().__init__(model, kv_cache)
            self.recorder = keeping_recorder(device)
            self.device_forward = DeviceForward(model, kv_cache, self.recorder)
            self.batches: list[Batch] = []
            self.num_recorded: list[int] = []

        def forward(self, batch: Batch) -> TargetOutput:
            self.batches.append(batch)
            output = self.device_forward(batch)
            self.num_recorded.append(len(self.recorder.replays))
            return output

    max_len = model.cos.shape[0]
    engine = Engine(
        EngineConfig(
            device=device.type,
            control="fixed",
            node_budget=node_budget,
            block_size=BLOCK_SIZE,
        ),
        loaded=LoadedModel(model, None, (), "random", max_len),
        drafter=NgramDrafter(),
    )
    kv_cache = engine.runner.kv_cache
    assert isinstance(kv_cache, KVCache)
    runner = KeepingRunner(kv_cache)
    engine.runner = runner
    prompt = tuple(torch.randint(shape.vocab_size, (prompt_len,)).tolist())
    engine.add(Request("bench", prompt, SamplingParams(max_tokens=max_len, ignore_eos=True)))
    seconds: list[float] = []
    is_decode: list[bool] = []
    while engine.has_work and sum(is_decode) < num_steps:
        started = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - started)
        batch = runner.batches[-1]
        is_decode.append(bool(outputs) and batch.num_rows == len(batch.logit_rows))
        if any(output.finish_reason == "error" for output in outputs):
            raise ValueError(f"the engine's step failed: {outputs[0].error}")

    replay_of: dict[object, Callable[[], TargetOutput]] = {}
    alone: dict[object, float] = {}
    kept: list[tuple[float, float, int]] = []
    before = 0
    for index, batch in enumerate(runner.batches):
        size, after = runner.device_forward.sizes(batch), runner.num_recorded[index]
        if after > before:
            replay_of[size] = runner.recorder.replays[after - 1]
        elif is_decode[index] and size in replay_of:
            if size not in alone:
                alone[size] = timer.replay_seconds(replay_of[size])
            kept.append((seconds[index], alone[size], batch.num_rows))
        before = after
    if not kept:
        raise ValueError("no decode step was replayed")
    return EngineSteps(*(list(column) for column in zip(*kept, strict=True)))
