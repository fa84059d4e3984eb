"""Kernel cases of the ops between matrix products: norms, silu(gate) * up, rotation, KV write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdec.evals.kernel.case import Dims, Expected, Place, Prepared, Results
from specdec.kernels import reference
from specdec.rope import RopeConfig

EPS = 1e-5
MAX_LEN = 4096  # positions in the rotation's tables


@dataclass(frozen=True)
class RmsNorm:
    """RMS norm of an fp32 residual stream, with the sum before it if `has_delta`."""

    rows: int
    dim: int
    dtype: torch.dtype
    has_delta: bool = False

    @property
    def op(self) -> str:
        return "add_rms_norm" if self.has_delta else "rms_norm"

    @property
    def label(self) -> str:
        return f"{self.rows} x {self.dim}"

    @property
    def num_bytes(self) -> int:
        """x and out; with a delta also that and the sum; the weight once."""
        per_number = 4 + self.dtype.itemsize
        return self.rows * self.dim * per_number * (1 + self.has_delta) + 4 * self.dim

    @property
    def num_flops(self) -> int:
        """Square, sum, scale, weight; with a delta one more addition."""
        return self.rows * self.dim * (4 + self.has_delta)

    def prepare(self, place: Place) -> Prepared:
        shape = (place.num_sets(self.num_bytes), self.rows, self.dim)
        x, weight = place.randn(*shape), place.randn(shape[0], self.dim)
        delta = place.randn(*shape, dtype=self.dtype)
        sets = list(zip(x, delta, weight, strict=True))
        return Prepared(
            [partial(self._run, place, *tensors) for tensors in sets],
            lambda: self._expect(*sets[0]),
        )

    def _run(self, place: Place, x: Tensor, delta: Tensor, weight: Tensor) -> Results:
        if place.uses_kernels:
            from specdec.kernels import norm_rope

            if self.has_delta:
                return norm_rope.add_rms_norm(x, delta, weight, EPS, self.dtype)
            return (norm_rope.rms_norm(x, weight, EPS, self.dtype),)
        total = x + delta if self.has_delta else x
        normed = reference.rms_norm(total, weight, EPS).to(self.dtype)
        return (total, normed) if self.has_delta else (normed,)

    def _expect(self, x: Tensor, delta: Tensor, weight: Tensor) -> Sequence[Expected]:
        total = x.double() + delta.double() if self.has_delta else x.double()
        scale = torch.rsqrt(total.square().mean(1, keepdim=True) + EPS)
        plain = reference.rms_norm(total.float(), weight, EPS).to(self.dtype)
        normed = Expected(total * scale * weight.double(), plain)
        return [Expected(total, total.float()), normed] if self.has_delta else [normed]


@dataclass(frozen=True)
class SiluMul:
    """silu(gate) * up of a fused [rows, 2 * dim]."""

    rows: int
    dim: int
    dtype: torch.dtype
    op: str = "silu_mul"

    @property
    def label(self) -> str:
        return f"{self.rows} x {self.dim}"

    @property
    def num_bytes(self) -> int:
        return 3 * self.rows * self.dim * self.dtype.itemsize

    @property
    def num_flops(self) -> int:
        """Negation, exponential, addition, division, product."""
        return 5 * self.rows * self.dim

    def prepare(self, place: Place) -> Prepared:
        num_sets = place.num_sets(self.num_bytes)
        sets = place.randn(num_sets, self.rows, 2 * self.dim, dtype=self.dtype)
        return Prepared([partial(self._run, place, x) for x in sets], lambda: self._expect(sets[0]))

    def _run(self, place: Place, gate_up: Tensor) -> Results:
        if place.uses_kernels:
            from specdec.kernels import norm_rope

            return (norm_rope.silu_mul(gate_up),)
        return (reference.silu_mul(gate_up),)

    def _expect(self, gate_up: Tensor) -> Sequence[Expected]:
        gate, up = gate_up.double().chunk(2, dim=1)
        exact = gate / (1 + torch.exp(-gate)) * up
        return [Expected(exact, reference.silu_mul(gate_up))]


@dataclass(frozen=True)
class RopeWrite:
    """Rotation of q and k, and the write of k and v to scattered slots of a cache full of NaN."""

    rows: int
    dims: Dims
    dtype: torch.dtype
    op: str = "rope_write"

    @property
    def label(self) -> str:
        return f"{self.rows} x {self._num_heads} heads of {self.dims.head_dim}"

    @property
    def _num_heads(self) -> int:
        return self.dims.num_heads + 2 * self.dims.num_kv_heads

    @property
    def num_bytes(self) -> int:
        """q, k and v read and written, a row of both tables, position and slot."""
        numbers = self._num_heads * self.dims.head_dim
        per_row = 2 * numbers * self.dtype.itemsize + 2 * self.dims.head_dim * 4 + 8
        return self.rows * per_row

    @property
    def num_flops(self) -> int:
        """Two products and a sum per number of q and k."""
        num_rotated = self.dims.num_heads + self.dims.num_kv_heads
        return 3 * self.rows * num_rotated * self.dims.head_dim

    def prepare(self, place: Place) -> Prepared:
        dims, num_sets = self.dims, place.num_sets(self.num_bytes)
        num_blocks = -(-self.rows // dims.block_size) + 1
        cache_shape = (num_blocks, dims.num_kv_heads, dims.block_size, dims.head_dim)
        qkv = place.randn(num_sets, self.rows, self._num_heads * dims.head_dim, dtype=self.dtype)
        caches = torch.full(
            (num_sets, 2, *cache_shape), float("nan"), dtype=self.dtype, device=place.device
        )
        rope = RopeConfig(500000.0, "default", {}, dims.head_dim, MAX_LEN)
        cos, sin = (table.to(place.device) for table in rope.tables(MAX_LEN))
        positions = place.integers(torch.randperm(MAX_LEN)[: self.rows].tolist())
        order = torch.randperm(num_blocks * dims.block_size)
        slots = place.integers(order[: self.rows].tolist())
        tables = (cos, sin, positions, slots)
        return Prepared(
            [partial(self._run, place, qkv[i], caches[i], *tables) for i in range(num_sets)],
            lambda: self._expect(qkv[0], caches[0], *tables),
        )

    def _run(
        self,
        place: Place,
        qkv: Tensor,
        caches: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> Results:
        k_cache, v_cache = caches
        if place.uses_kernels:
            from specdec.kernels import kv_slots

            q = kv_slots.rope_write(
                qkv, cos, sin, positions, slots, k_cache, v_cache, num_heads=self.dims.num_heads
            )
            return q, k_cache, v_cache
        q, k, v = self._rotated(qkv, cos, sin, positions)
        block_size = self.dims.block_size
        places = reference.slot_rows(slots.long(), self.dims.num_kv_heads, block_size).flatten()
        reference.write_kv(k_cache, v_cache, places, k, v)
        return q, k_cache, v_cache

    def _expect(
        self,
        qkv: Tensor,
        caches: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> Sequence[Expected]:
        def results(dtype: torch.dtype) -> Results:
            tables = (cos.to(dtype), sin.to(dtype))
            q, k, v = self._rotated(qkv.to(dtype), *tables, positions)
            k_cache, v_cache = caches.to(dtype, copy=True)
            block_size = self.dims.block_size
            for cache, new in ((k_cache, k), (v_cache, v)):
                cache[slots // block_size, :, slots % block_size] = new
            return q, k_cache, v_cache

        pairs = zip(results(torch.float64), results(self.dtype), strict=True)
        return [Expected(exact, plain) for exact, plain in pairs]

    def _rotated(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in the dtype of the arguments, by the reference."""
        dims = self.dims
        heads = qkv.view(qkv.shape[0], -1, dims.head_dim)
        num_rotated = dims.num_heads + dims.num_kv_heads
        rows = positions.long()
        turned = reference.rope(heads[:, :num_rotated], cos[rows, None], sin[rows, None])
        return turned[:, : dims.num_heads], turned[:, dims.num_heads :], heads[:, num_rotated:]
