"""Noise made by the native library is that of PyTorch's operations, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import noise
from specdec.kernels import native_library
from tests.toy import compiled_native

CPU = torch.device("cpu")
seeds = st.sampled_from([0, 1, 2**32, 2**64 - 1]) | st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**20)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """The native library; `noise` is left as it was."""
    try:
        loaded = native_library.load(compiled_native())
    except native_library.NativeUnavailable as reason:
        pytest.skip(str(reason))
    before = noise._native
    noise.use_native(loaded)
    yield
    noise.use_native(before)


def both(make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    library, native = noise._native, make()
    noise.use_native(None)
    try:
        return native, make()
    finally:
        noise.use_native(library)


@given(seed=seeds, position=positions, vocab_size=st.integers(1, 300) | st.just(49152))
def test_of_the_whole_vocabulary(seed: int, position: int, vocab_size: int) -> None:
    native, plain = both(lambda: noise.gumbel_all(seed, position, vocab_size, CPU))
    assert torch.equal(native, plain)


@given(
    seed=seeds,
    where=st.lists(positions, min_size=1, max_size=5),
    width=st.integers(1, 40),
    data=st.data(),
)
def test_of_single_tokens(seed: int, where: list[int], width: int, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 2**18), min_size=width, max_size=width))
    token_ids = torch.tensor([ids] * len(where))
    native, plain = both(lambda: noise.gumbel_at(seed, torch.tensor(where), token_ids))
    assert torch.equal(native, plain)
    native, plain = both(lambda: noise.gumbel(seed, where[0], token_ids[0]))
    assert torch.equal(native, plain)


def test_of_a_million_tokens() -> None:
    """Both tails of the words: the octaves near 0 and near 1 take different branches."""
    native, plain = both(lambda: noise.gumbel_all(3, 9, 2**20, CPU))
    assert torch.equal(native, plain)
    assert native.max() > 12 and native.min() < -2.5
