"""NativeLinear: one matrix packed for the C++ products."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from specdec.kernels.native_library import GROUP, LANES
from specdec.kernels.native_structs import CLinear
from specdec.native_cache import aligned_zeros
from specdec.native_weights import FORMATS

_ROWS_AT_ONCE = 1024  # converted to fp32 and packed together


class NativeLinear:
    """y = x W^T, computed by the threads of a forward that `NativeModel` has opened.

    weight: [out_features, in_features], kept in `precision`; x: [num_rows, in_features]; y: fp32.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        forward: ctypes.c_void_p,
        weight: Tensor,
        precision: str,
        *,
        owner: object,
    ) -> None:
        """`owner` closes the forward when it is collected, so it is kept."""
        self._owner = owner
        self.out_features, self.in_features = weight.shape
        self._library, self._forward = library, forward
        kind, num_panels = FORMATS[precision], -(-self.out_features // LANES)
        self._panels = aligned_zeros(
            num_panels * library.specdec_panel_bytes(kind, self.in_features)
        )
        for first in range(0, self.out_features, _ROWS_AT_ONCE):
            rows = weight[first : first + _ROWS_AT_ONCE].float().contiguous()
            library.specdec_pack(
                kind, rows.data_ptr(), len(rows), self.in_features, first, self._panels.ctypes.data
            )
        self._described = CLinear(
            panels=self._panels.ctypes.data,
            bias=None,
            out=num_panels * LANES,
            in_=-(-self.in_features // GROUP) * GROUP,
            format=kind,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return self._panels.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        missing = self._described.in_ - self.in_features
        rows = torch.nn.functional.pad(x.float(), (0, missing)).contiguous()
        out = torch.empty(len(rows), self._described.out)
        self._library.specdec_multiply(
            self._forward,
            ctypes.byref(self._described),
            rows.data_ptr(),
            len(rows),
            out.data_ptr(),
        )
        return out[:, : self.out_features]
