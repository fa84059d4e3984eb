"""The C++ forward: its logits are the oracle's, and the same bits however they are computed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.weights import TensorSource
from tests.native_oracle import ToyTensors, expected_logits
from tests.native_session import (
    KV_PRECISIONS,
    MAX_LEN,
    PRECISIONS,
    SMALL,
    Job,
    NativeSession,
    Rows,
)

FAMILIES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
WINDOWS = [1, 2, 15, 16, 17, 40, 100, 255, 256, 257, 300]  # across tiles of 16 and chunks of 256

RATIOS = st.sampled_from([15, 16, 17])  # query heads of a key head: around a tile of 16

precisions = pytest.mark.parametrize("precision", PRECISIONS)
kv_precisions = pytest.mark.parametrize("kv", KV_PRECISIONS)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json; few of its sizes are multiples of 16 or 32."""
    num_kv_heads, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 7) | RATIOS)
    fields = {
        "architectures": [draw(st.sampled_from(FAMILIES))],
        "vocab_size": draw(st.integers(2, 150)),
        "hidden_size": draw(st.integers(5, 120)),
        "intermediate_size": draw(st.integers(5, 300)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": num_kv_heads * ratio,
        "num_key_value_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([16, 32, 48, 64, 80, 128])),
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }
    if draw(st.booleans()):
        fields["sliding_window"] = draw(st.sampled_from(WINDOWS))
        fields["use_sliding_window"] = True
        fields["max_window_layers"] = 1  # of Qwen; Mistral has one in every layer
    else:
        fields["sliding_window"] = None
    return fields


jobs = st.builds(
    Job,
    num_known=st.integers(1, 90) | st.integers(230, 600),
    cuts=st.lists(st.integers(1, 599), max_size=4).map(tuple),
    num_nodes=st.sampled_from([1, 1, 2, 6, 17, 40]),
    reach=st.sampled_from([1, 3, 40]),
    seed=st.integers(0, 9999),
)
batches = st.lists(jobs, min_size=1, max_size=3)
num_threads = st.integers(1, 3)
block_sizes = st.sampled_from([16, 32, 48])


def session(
    fields: dict[str, Any],
    precision: str,
    kv: str,
    num_threads: int = 1,
    block_size: int = 16,
    source: TensorSource | None = None,
) -> NativeSession:
    """With room for three requests."""
    num_blocks = 3 * -(-MAX_LEN // block_size)
    return NativeSession(
        fields,
        precision,
        kv,
        num_threads=num_threads,
        block_size=block_size,
        num_blocks=num_blocks,
        source=source,
    )


@precisions
@kv_precisions
def test_logits_are_the_oracles(precision: str, kv: str) -> None:
    @settings(max_examples=8, deadline=None)
    @given(shapes(), batches, num_threads, block_sizes)
    def check(fields: dict[str, Any], batch: list[Job], num_threads: int, block_size: int) -> None:
        got = session(fields, precision, kv, num_threads, block_size).run(batch)
        for job, logits in zip(batch, got, strict=True):
            tokens = job.token_ids(fields["vocab_size"])
            want, tolerance = expected_logits(fields, precision, kv, tokens, job.parents)
            torch.testing.assert_close(logits.double(), want, rtol=0, atol=tolerance)

    check()


@precisions
@kv_precisions
def test_a_tokens_logits_are_the_same_bits_in_any_batch(precision: str, kv: str) -> None:
    """In any chunks, company and blocks, on any branch, with any number of threads."""

    @settings(max_examples=20, deadline=None)
    @given(shapes(), batches, num_threads, block_sizes, st.integers(0, 99))
    def check(
        fields: dict[str, Any], batch: list[Job], num_threads: int, block_size: int, seed: int
    ) -> None:
        got = session(fields, precision, kv, num_threads, block_size).run(batch, seed)
        for job, logits in zip(batch, got, strict=True):
            tokens, root = job.token_ids(fields["vocab_size"]), job.num_known - 1
            for path in job.leaf_paths:
                rows = [*range(root), *(root + node for node in path)]
                alone = session(fields, precision, kv).alone([tokens[row] for row in rows])
                assert torch.equal(logits[rows], alone)

    check()


@precisions
@kv_precisions
@pytest.mark.parametrize("window", [None, 250])
def test_token_by_token_as_in_one_chunk(precision: str, kv: str, window: int | None) -> None:
    """The buffers grow on the way back to one chunk; from its second run on they do not."""
    fields = SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    stepped = session(fields, precision, kv, num_threads=2)
    tokens, blocks = Job(270).token_ids(fields["vocab_size"]), range(20, 0, -1)
    single = [stepped.step(Rows([t], place, blocks))[0] for place, t in enumerate(tokens)]
    want = session(fields, precision, kv).alone(tokens)
    assert torch.equal(torch.cat(single), want)
    for num_rows in (2, 7, 33, 270, 270, 1):
        assert torch.equal(stepped.alone(tokens[:num_rows]), want[:num_rows])


@pytest.mark.parametrize("num_heads", [3, 4])
@pytest.mark.parametrize("intermediate_size", [48, 64])
@precisions
def test_buffers_that_grow_keep_their_padding(
    precision: str, num_heads: int, intermediate_size: int
) -> None:
    """Three heads of 16 and 48 features leave half a group of 32 empty."""
    sizes = {"num_attention_heads": num_heads, "intermediate_size": intermediate_size}
    fields = SMALL | sizes
    tokens = Job(40).token_ids(fields["vocab_size"])
    want = session(fields, precision, "fp32").alone(tokens)
    growing = session(fields, precision, "fp32")
    for num_rows in range(1, len(tokens) + 1):
        assert torch.equal(growing.alone(tokens[:num_rows]), want[:num_rows])


@pytest.mark.parametrize("place", range(5))
def test_a_path_anywhere_among_its_siblings(place: int) -> None:
    """Five branches of one root, which lies on and off the borders of tiles and chunks."""
    tokens = Job(300).token_ids(SMALL["vocab_size"])
    want = session(SMALL, "bf16", "bf16").alone(tokens)
    for root in (1, 14, 15, 16, 31, 240, 255, 256, 257):
        stepped = session(SMALL, "bf16", "bf16", num_threads=2)
        blocks = range(stepped.kv_cache.num_blocks)
        stepped.step(Rows(tokens[:root], 0, blocks))
        branch = range(1 + 4 * place, 5 + 4 * place)
        guesses = Job(21, seed=9).token_ids(SMALL["vocab_size"])
        for depth, node in enumerate(branch, start=1):
            guesses[node] = tokens[root + depth]
        guesses[0] = tokens[root]
        parents = [-1, *(0 if node % 4 == 1 else node - 1 for node in range(1, 21))]
        (logits,) = stepped.step(Rows(guesses, root, blocks, parents))
        assert torch.equal(logits[[0, *branch]], want[root : root + 5])


@precisions
@kv_precisions
def test_accepted_nodes_are_moved_into_place(precision: str, kv: str) -> None:
    """What follows has the bits of a request that was never a tree."""
    vocab_size = SMALL["vocab_size"]
    for seed, root in enumerate([1, 13, 30, 250, 256]):
        job = Job(root + 1, num_nodes=40, reach=4, seed=seed)
        tokens, blocks = job.token_ids(vocab_size), list(range(30))
        path = max(job.leaf_paths, key=len)
        assert path != list(range(len(path)))
        stepped = session(SMALL, precision, kv)
        stepped.step(Rows(tokens[:root], 0, blocks))
        tree = Rows(tokens[root:], root, blocks, job.parents)
        stepped.step(tree)
        slots = stepped.slots(tree)
        stepped.kv_cache.move([slots[node] for node in path], slots[: len(path)])
        accepted = [tokens[root + node] for node in path]
        follow = Job(5, seed=seed + 50).token_ids(vocab_size)
        (logits,) = stepped.step(Rows(follow, root + len(path), blocks))
        want = session(SMALL, precision, kv).alone(tokens[:root] + accepted + follow)
        assert torch.equal(logits, want[-len(follow) :])


@kv_precisions
def test_moves_read_everything_before_they_write(kv: str) -> None:
    """A request is moved to blocks that are its own in another order, at another offset."""
    tokens = Job(100).token_ids(SMALL["vocab_size"])
    want = session(SMALL, "fp32", kv).alone(tokens)
    stepped = session(SMALL, "fp32", kv)
    old = Rows(tokens[:90], 0, [3, 1, 4, 0, 5, 9])
    stepped.step(old)
    new = Rows(tokens[:90], 0, [1, 4, 0, 5, 3, 9, 2])
    stepped.kv_cache.move(stepped.slots(old), stepped.slots(new))
    stepped.kv_cache.move([], [])
    (logits,) = stepped.step(Rows(tokens[90:], 90, new.block_ids))
    assert torch.equal(logits, want[90:])


@kv_precisions
@pytest.mark.parametrize("window", [None, 20])
def test_scrubbed_blocks_are_as_good_as_new(kv: str, window: int | None) -> None:
    """NaN in every block but those of the request, which were scrubbed."""
    fields = SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    want = session(fields, "fp32", kv).run([Job(60, (17, 50), 20, 5)])
    stepped = session(fields, "fp32", kv)
    cache = stepped.kv_cache
    cache.data[:] = 0xFF  # NaN in fp32 and bf16
    cache.scales[:] = float("nan")
    blocks = [7, 2, 11, 3, 5]
    cache.scrub(blocks)
    kept = [block for block in range(cache.num_blocks) if block not in blocks]
    assert (cache.data[:, :, :, kept] == 0xFF).all()
    job = Job(60, (17, 50), 20, 5)
    tokens = job.token_ids(fields["vocab_size"])
    logits = [
        stepped.step(Rows(tokens[start:end], start, blocks))[0]
        for start, end in pairwise(job.bounds)
    ]
    logits += stepped.step(Rows(tokens[59:], 59, blocks, job.parents))
    assert torch.equal(torch.cat(logits), want[0])


@kv_precisions
def test_a_nan_stays_in_its_request(kv: str) -> None:
    """Its own logits are NaN, so that it is found; those beside it are what they were."""
    tokens = Job(40).token_ids(SMALL["vocab_size"])
    bad = [SMALL["vocab_size"] - 1] * 3

    class Poisoned(ToyTensors):
        """The last token's embedding is NaN."""

        def get(self, name: str) -> Tensor:
            tensor = super().get(name)
            if "embed_tokens" in name:
                tensor[-1] = float("nan")
            return tensor

    poisoned = session(SMALL, "fp32", kv, source=Poisoned(SMALL))
    good = [token if token != bad[0] else 0 for token in tokens]
    want = session(SMALL, "fp32", kv).alone(good)
    spoilt, fine = poisoned.step(Rows(bad, 0, [5]), Rows(good, 0, [1, 7, 2]))
    assert spoilt.isnan().all()
    assert torch.equal(fine, want)
    (later,) = poisoned.step(Rows([0], 3, [5]))
    assert later.isnan().all()


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("kv", [*KV_PRECISIONS, "auto"])
@precisions
def test_bytes_per_block(precision: str, kv: str, block_size: int) -> None:
    stepped = session(SMALL, precision, kv, block_size=block_size)
    cache = stepped.kv_cache
    per_block = stepped.model.kv_bytes_per_block(kv, block_size)
    assert per_block * cache.num_blocks == cache.data.nbytes + cache.scales.nbytes
    if kv == "auto":
        per_element = per_block // (2 * 2 * block_size * 16)  # layers, keys and values, dim
        assert per_element == (4 if precision == "fp32" else 2)
