"""Row invariance: how many rows a product needs before a row's result is its own business.

Libraries choose other kernels, hence other summation orders, for other numbers of rows. The range
in which they do not is found by trying, once per start, on this machine and these weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specdec.kernels.attention_group import ROW_TILE
from specdec.weights import PackedLinear

# oneDNN is slower with fewer than four rows (docs/lab-log.md), so they are not worth trying.
_CANDIDATES = (4, 8, 16, ROW_TILE)
# In bf16 another summation order shows in about one output of 5000: look at many.
_NUM_OUTPUTS = 2**17
# On a GPU libraries change kernels at many numbers of rows: products see this many, never others.
PINNED_ROWS = 64


def min_rows(products: Iterable[PackedLinear], dtype: torch.dtype) -> int:
    """The fewest rows from which on, up to ROW_TILE, all products give bit-equal rows.

    Tried for each number of rows among _CANDIDATES and for several places of a row.
    """
    return max(_min_rows(product, dtype) for product in products)


def padding(num_rows: int, min_rows: int, row_tile: int = ROW_TILE) -> int:
    """Rows to add so that no product sees fewer than `min_rows`, the rest after full tiles too.

    Example: 33 rows are a tile of 32 and a rest of one, which for `min_rows` 4 lacks three.
    """
    rest = num_rows % row_tile
    return 0 if num_rows and not rest else max(min_rows - rest, 0)


def _min_rows(product: PackedLinear, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    count = min(max(_NUM_OUTPUTS // product.out_features, ROW_TILE), 8 * ROW_TILE)
    x = torch.randn(count, product.in_features, generator=generator).to(dtype)
    expected = product(x)
    smallest = ROW_TILE
    for num_rows in reversed(_CANDIDATES):
        wanted = max(_NUM_OUTPUTS // product.out_features, num_rows)
        for start in range(0, min(wanted, count - num_rows + 1), num_rows):
            rows = slice(start, start + num_rows)
            if not torch.equal(product(x[rows].flip(0)).flip(0), expected[rows]):
                return smallest
        smallest = num_rows
    return smallest
