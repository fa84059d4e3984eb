"""Guard: results are allocated between words that no kernel may write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

MARGIN = 16384  # numbers on either side: no block of lanes is wider
POISON = 77.0


@contextmanager
def guarded_results(module: Any) -> Iterator[None]:
    """Within it `torch.empty` of `module` gives guarded tensors; at its end they are checked."""
    guarded: list[Tensor] = []

    def empty(*shape: Any, **options: Any) -> Tensor:
        inner = torch.empty(*shape, **options)
        whole = torch.full((inner.numel() + 2 * MARGIN,), POISON, dtype=inner.dtype)
        guarded.append(whole.to(inner.device))
        return guarded[-1][MARGIN:-MARGIN].view(inner.shape)

    class Torch:
        """The module's `torch`, but for `empty`."""

        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    with patch.object(module, "torch", Torch()):
        yield
    assert guarded
    for whole in guarded:
        assert (whole[:MARGIN] == POISON).all()
        assert (whole[-MARGIN:] == POISON).all()
        assert not (whole[MARGIN:-MARGIN] == POISON).any()  # every result was written


def surrounded(inner: Tensor, value: float = float("nan")) -> Tensor:
    """A copy whose neighbours in memory are `value`: what must not be read."""
    whole = inner.new_full((inner.numel() + 2 * MARGIN,), value)
    whole[MARGIN:-MARGIN] = inner.flatten()
    return whole[MARGIN:-MARGIN].view(inner.shape)
