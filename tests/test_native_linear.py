"""NativeLinear: a matrix of a caller's own, multiplied by the threads of a native forward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.native_linear import NativeLinear
from specdec.native_model import NativeModel
from tests.native_oracle import UNIT, bf16, stored
from tests.native_session import SMALL, NativeSession

PRECISIONS = ("fp32", "bf16", "int8")


@pytest.fixture(scope="module", params=PRECISIONS)
def model(request: pytest.FixtureRequest) -> NativeModel:
    return NativeSession(SMALL, request.param, "fp32", num_blocks=4, num_threads=2).model


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=40)
@given(
    num_rows=st.integers(1, 70),
    out_features=st.sampled_from([1, 15, 16, 17, 40, 1030]),
    in_features=st.sampled_from([1, 31, 32, 33, 64, 100]),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_the_stored_weight(
    model: NativeModel, num_rows: int, out_features: int, in_features: int, seed: int
) -> None:
    """Sizes that fill neither panels nor groups, and more rows than are packed at a time."""
    weight, x = random(seed, out_features, in_features), random(seed + 1, num_rows, in_features)
    linear = model.make_linear(weight)
    assert (linear.out_features, linear.in_features) == (out_features, in_features)
    y = linear(x)
    assert y.shape == (num_rows, out_features) and y.dtype == torch.float32
    if model.precision != "fp32":  # of a model of integers, too: heads are small
        weight, x = bf16(weight), bf16(x)
    want = x.double() @ weight.double().t()
    bound = (in_features + 2) * UNIT * (x.abs().double() @ weight.abs().double().t())
    assert ((y - want).abs() <= bound).all()


@pytest.mark.parametrize("precision", ["int8", "int4"])
@settings(deadline=None, max_examples=40)
@given(num_rows=st.integers(1, 70), num_groups=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_integers_times_rows_are_theirs_and_the_same_bits_alone(
    model: NativeModel, precision: str, num_rows: int, num_groups: int, seed: int
) -> None:
    """Groups of 32 features have a scale each; they are done several at a time."""
    weight, x = random(seed, 20, 32 * num_groups), bf16(random(seed + 1, num_rows, 32 * num_groups))
    linear = NativeLinear(model._library, model._forward, weight, precision, owner=model)
    y, packed = linear(x), stored(weight, precision)
    bound = (weight.shape[1] + 4) * UNIT * (x.abs().double() @ packed.magnitudes.t())
    assert ((y - x.double() @ packed.values.t()).abs() <= bound).all()
    for first, last in [(0, 1), (num_rows // 2, num_rows)]:
        assert torch.equal(linear(x[first:last]), y[first:last])


def test_a_row_does_not_depend_on_the_rows_beside_it(model: NativeModel) -> None:
    linear = model.make_linear(random(1, 50, 40))
    x = random(2, 70, 40)
    whole = linear(x)
    for first, last in [(0, 1), (3, 10), (7, 30), (15, 70), (31, 49)]:
        assert torch.equal(linear(x[first:last]), whole[first:last])


def test_inputs_of_any_layout_and_dtype_are_read_and_not_changed(model: NativeModel) -> None:
    linear = model.make_linear(random(1, 20, 32))
    x = random(2, 32, 6).bfloat16().float()
    want = linear(x.t().contiguous())
    assert torch.equal(linear(x.t()), want)
    assert torch.equal(linear(x.t().bfloat16()), want)
    assert torch.equal(x, random(2, 32, 6).bfloat16().float())


def test_weights_of_any_layout_are_packed_the_same(model: NativeModel) -> None:
    weight, x = random(1, 32, 20).bfloat16(), random(2, 3, 32)
    want = model.make_linear(weight.t().contiguous())(x)
    assert torch.equal(model.make_linear(weight.t())(x), want)
    assert torch.equal(model.make_linear(weight.t().float())(x), want)


def test_its_memory_is_that_of_its_panels(model: NativeModel) -> None:
    linear = model.make_linear(random(1, 33, 40))
    assert isinstance(linear, NativeLinear)
    itemsize = 4 if model.precision == "fp32" else 2
    assert linear.num_bytes == 48 * 64 * itemsize  # whole panels of 16 and groups of 32
