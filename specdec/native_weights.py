"""NativeWeights: a checkpoint's tensors, packed once for the C++ forward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.gguf_conversion import GROUP_BYTES
from specdec.kernels.native_library import GROUP, LANES
from specdec.kernels.native_structs import CLayer, CLinear
from specdec.model_config import ModelConfig
from specdec.native_cache import aligned_zeros
from specdec.weights import TensorSource

FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}  # Format in kernels/native/model.hpp
_SLAB_BYTES = 64 * 2**20
_ALIGNMENT = 64
_ROWS_AT_ONCE = 1024  # converted to fp32 and packed together


class IntegerSource(Protocol):
    """Integer weights that a checkpoint was made from; `checkpoints.Weights`."""

    def __contains__(self, name: object) -> bool:
        """Whether there are integers for a tensor."""

    def get(self, name: str) -> Tensor:
        """GGUF blocks of the rows of the tensor, uint8 [out_features, bytes of a row]."""


class NativeWeights:
    """Owns the packed weights that `layers`, `embedding`, `head` and `final_norm` point to.

    In int8 and int4, groups of 32 input features share a scale (and in int4 a least value);
    the embedding and the head then are int8 (as in GGUF's Q4_1 files), activations bf16. Where
    `integers` has a tensor in that precision it is taken as it is, else it is rounded. The
    embedding is the `lender`'s where there is one.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        source: TensorSource,
        precision: str,
        integers: IntegerSource | None = None,
        lender: NativeWeights | None = None,
    ) -> None:
        self._library = library
        self._config = config
        self._source = source
        self._integers = integers
        self._kept: list[Tensor] = []
        self._slab = torch.empty(0, dtype=torch.uint8)
        precise = "int8" if precision == "int4" else precision
        self._lender = lender  # its memory must outlive this
        if lender is None:
            self.embedding = self._linear(["model.embed_tokens"], precise)
        else:
            self.embedding = lender.embedding
        self._num_unread = 0 if config.is_tied else self.num_kept_bytes
        self.head = self.embedding if config.is_tied else self._linear(["lm_head"], precise)
        self.final_norm = self._norm("model.norm")
        layers = [self._layer(index, precision) for index in range(config.num_layers)]
        self.layers = (CLayer * len(layers))(*layers)
        del self._source, self._integers  # files stay mapped, and count, as long as they are held

    @property
    def num_bytes(self) -> int:
        """Bytes that a forward reads: all but an embedding that is not the head, too."""
        return self.num_kept_bytes - self._num_unread

    @property
    def num_kept_bytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept)

    def _layer(self, index: int, precision: str) -> CLayer:
        config, root = self._config, f"model.layers.{index}"
        attn, mlp = f"{root}.self_attn", f"{root}.mlp"

        def linear(*names: str, has_bias: bool, is_interleaved: bool = False) -> CLinear:
            return self._linear(names, precision, has_bias=has_bias, is_interleaved=is_interleaved)

        return CLayer(
            qkv=linear(*(f"{attn}.{x}_proj" for x in "qkv"), has_bias=config.has_qkv_bias),
            output=linear(f"{attn}.o_proj", has_bias=config.has_output_bias),
            gate_up=linear(
                f"{mlp}.gate_proj",
                f"{mlp}.up_proj",
                has_bias=config.has_mlp_bias,
                is_interleaved=True,
            ),
            down=linear(f"{mlp}.down_proj", has_bias=config.has_mlp_bias),
            input_norm=self._norm(f"{root}.input_layernorm"),
            mlp_norm=self._norm(f"{root}.post_attention_layernorm"),
            q_norm=self._norm(f"{attn}.q_norm") if config.has_qk_norm else None,
            k_norm=self._norm(f"{attn}.k_norm") if config.has_qk_norm else None,
            window=config.windows[index] or 0,
        )

    def _linear(
        self,
        names: Sequence[str],
        precision: str,
        *,
        has_bias: bool = False,
        is_interleaved: bool = False,
    ) -> CLinear:
        """Stack the matrices' outputs, or alternate their panels."""
        blocks = self._blocks(names, precision)
        parts = blocks or [self._source.get(f"{name}.weight") for name in names]
        bias = [self._source.get(f"{name}.bias") for name in names] if has_bias else None
        if is_interleaved:
            parts = [_interleaved(parts)]
            bias = None if bias is None else [_interleaved(bias)]
        width = parts[0].shape[1]
        if blocks:
            width = width // GROUP_BYTES[precision] * GROUP
        num_panels = -(-sum(len(part) for part in parts) // LANES)
        kind = FORMATS[precision]
        panels = self._zeros(
            num_panels * self._library.specdec_panel_bytes(kind, width), torch.uint8
        )
        pack = self._library.specdec_pack_gguf if blocks else self._library.specdec_pack
        first = 0
        for part in parts:
            for rows in part.split(_ROWS_AT_ONCE):
                whole = (rows if blocks else rows.float()).contiguous()
                pack(kind, whole.data_ptr(), len(rows), width, first, panels.data_ptr())
                first += len(rows)
        return CLinear(
            panels=panels.data_ptr(),
            bias=None if bias is None else self._floats(torch.cat(bias), LANES),
            out=num_panels * LANES,
            in_=-(-width // GROUP) * GROUP,
            format=kind,
        )

    def _blocks(self, names: Sequence[str], precision: str) -> list[Tensor]:
        """GGUF blocks of the matrices where all have them in this precision, or nothing."""
        tensors = [f"{name}.weight" for name in names]
        held = self._integers
        if held is None or precision not in GROUP_BYTES or not all(t in held for t in tensors):
            return []
        parts = [held.get(tensor) for tensor in tensors]
        # Only one of the two kinds fits: a row of either is a whole number of groups.
        groups = self._source.get(tensors[0]).shape[1] // GROUP
        fits = all(part.shape[1] == groups * GROUP_BYTES[precision] for part in parts)
        return parts if fits else []

    def _norm(self, name: str) -> int:
        return self._floats(self._source.get(f"{name}.weight"), GROUP)

    def _floats(self, values: Tensor, multiple: int) -> int:
        """Keep values in fp32, padded with zeros to a multiple; returns their address."""
        kept = self._zeros(-(-len(values) // multiple) * multiple, torch.float32)
        kept[: len(values)] = values
        return kept.data_ptr()

    def _zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Zeros that live as long as the weights, at an address that is a multiple of 64."""
        num_bytes = size * dtype.itemsize
        if self._slab.numel() < num_bytes:
            self._slab = torch.from_numpy(aligned_zeros(max(num_bytes, _SLAB_BYTES)))
        kept = self._slab[:num_bytes].view(dtype)
        self._slab = self._slab[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        self._kept.append(kept)
        return kept


def _interleaved(parts: Sequence[Tensor]) -> Tensor:
    """Panels of LANES outputs, taken from the parts in turn; parts are padded to whole panels."""
    missing = -len(parts[0]) % LANES
    padded = [torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) for part in parts]
    return torch.stack([part.unflatten(0, (-1, LANES)) for part in padded], 1).flatten(0, 2)
