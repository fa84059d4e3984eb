"""NativeOracle: the target model in plain float64 PyTorch, rounding where the C++ forward does."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.segment import ancestor_masks
from specdec.model_config import ModelConfig
from specdec.weights import TensorSource

UNIT = 2.0**-24  # the greatest relative error of one operation in fp32
GROUP = 32  # input features that share a scale
EXP_ERROR = 8  # of exp and what stands beside it, in units


class ToyTensors:
    """Random tensors for a config.json, large enough that logits are far from uniform.

    A name always gives the same tensor.
    """

    def __init__(self, fields: Mapping[str, Any], seed: int = 0) -> None:
        self._fields, self._seed = fields, seed

    def get(self, name: str) -> Tensor:
        """The tensor, fp32; biases are half as large as what they are added to."""
        f = self._fields
        hidden, inner, dim = f["hidden_size"], f["intermediate_size"], f["head_dim"]
        rows_q, rows_kv = f["num_attention_heads"] * dim, f["num_key_value_heads"] * dim
        shapes = {
            "embed_tokens": (f["vocab_size"], hidden),
            "lm_head": (f["vocab_size"], hidden),
            "q_proj": (rows_q, hidden),
            "k_proj": (rows_kv, hidden),
            "v_proj": (rows_kv, hidden),
            "o_proj": (hidden, rows_q),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        generator = torch.Generator().manual_seed(self._seed * 7919 + zlib.crc32(name.encode()))
        *_, module, kind = name.split(".")
        if "norm" in module:
            size = dim if module in ("q_norm", "k_norm") else hidden
            return 1.0 + 0.1 * torch.randn(size, generator=generator)
        out, width = shapes[module]
        if kind == "bias":
            return 0.5 * torch.randn(out, generator=generator)
        weight: Tensor = 2.0 * torch.randn(out, width, generator=generator) / width**0.5
        return weight


class Stored(NamedTuple):
    """A weight as it is packed: its values, and the magnitudes that are summed to multiply with it.

    Both float64 [out, in].
    """

    values: Tensor
    magnitudes: Tensor


def stored(weight: Tensor, precision: str) -> Stored:
    """The packing rules of kernels/native/formats.hpp; `weight` is fp32 [out, in]."""
    if precision in ("fp32", "bf16"):
        values = (weight if precision == "fp32" else weight.bfloat16()).double()
        return Stored(values, values.abs())
    width = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    if precision == "int8":
        scale = _fp16(groups.abs().amax(2, keepdim=True) / 127)
        numbers = torch.where(scale > 0, groups / scale, 0.0).round().clamp(-127, 127)
        values = numbers.double() * scale.double()
        magnitudes = values.abs()
    else:
        low, high = torch.aminmax(groups, dim=2, keepdim=True)
        scale, least = _fp16((high - low) / 15), _fp16(low)
        numbers = torch.where(scale > 0, (groups - least) / scale, 0.0).round().clamp(0, 15)
        values = numbers.double() * scale.double() + least.double()
        # Multiplied as 128 + q, and 128 is taken off again.
        magnitudes = ((128 + numbers + 128) * scale + least.abs()).double()
    return Stored(values.flatten(1)[:, :width], magnitudes.flatten(1)[:, :width])


def bf16(x: Tensor) -> Tensor:
    """Rounded to bf16, to nearest even."""
    return x.float().bfloat16().to(x.dtype)


def _fp16(x: Tensor) -> Tensor:
    return x.half().float()


def rows_of(num_known: int, parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Positions [n] and visibility, bool [n, n], of known tokens and a tree below the last one."""
    root = num_known - 1
    visible = torch.ones(root + len(parents), root + len(parents), dtype=torch.bool).tril()
    for node, mask in enumerate(ancestor_masks(parents)):
        own = [mask >> other & 1 == 1 for other in range(len(parents))]
        visible[root + node, root:] = torch.tensor(own)
    return visible.sum(1) - 1, visible


class NativeOracle:
    """Logits of rows that see each other as a mask says, all in one dense forward.

    `is_rounded`: activations, keys, values and attention weights become bf16 or 8-bit integers
    where those of the C++ forward do. `is_blurred`: every result that is fp32 there errs by its
    a-priori bound (Higham 2002: n units of the magnitudes summed), with signs at random.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        precision: str,
        kv: str,
        *,
        is_rounded: bool = True,
        is_blurred: bool = False,
    ) -> None:
        self._config, self._source, self._precision, self._kv = config, source, precision, kv
        self._is_rounded = is_rounded
        self._signs = torch.Generator().manual_seed(0) if is_blurred else None

    def logits(self, token_ids: Sequence[int], positions: Tensor, visible: Tensor) -> Tensor:
        """float64 [n, vocab] for positions int64 [n] and visible bool [n, n]."""
        config = self._config
        embedding = "model.embed_tokens"
        x = self._stored(embedding, self._precise).values[list(token_ids)]
        for index in range(config.num_layers):
            root = f"model.layers.{index}"
            normed = self._norm(x, f"{root}.input_layernorm")
            mixed = self._attention(normed, index, positions, visible)
            name, has_bias = f"{root}.self_attn.o_proj", config.has_output_bias
            x = self._blur(x + self._linear(mixed, name, has_bias=has_bias), 1)
            normed = self._norm(x, f"{root}.post_attention_layernorm")
            gate, up = (
                self._linear(normed, f"{root}.mlp.{name}_proj", has_bias=config.has_mlp_bias)
                for name in ("gate", "up")
            )
            inner = self._blur(gate * torch.sigmoid(gate) * up, EXP_ERROR)
            name, has_bias = f"{root}.mlp.down_proj", config.has_mlp_bias
            x = self._blur(x + self._linear(inner, name, has_bias=has_bias), 1)
        head = embedding if config.is_tied else "lm_head"
        return self._linear(self._norm(x, "model.norm"), head, precision=self._precise)

    @property
    def _precise(self) -> str:
        """What the embedding and the head are in."""
        return "int8" if self._precision == "int4" else self._precision

    def _attention(self, x: Tensor, index: int, positions: Tensor, visible: Tensor) -> Tensor:
        """[n, num_heads * head_dim] before the output product."""
        config = self._config
        root, dim = f"model.layers.{index}.self_attn", config.head_dim
        cos, sin = (t[positions].double()[:, None] for t in config.rope.tables(len(positions)))

        def heads(kind: str) -> Tensor:
            name, has_bias = f"{root}.{kind}_proj", config.has_qkv_bias
            y: Tensor = self._linear(x, name, has_bias=has_bias).unflatten(1, (-1, dim))
            if kind == "v":
                return y
            if config.has_qk_norm:
                y = self._norm(y, f"{root}.{kind}_norm")
            swapped = y.roll(dim // 2, 2)
            turned = y * cos + swapped * sin
            return self._blur(turned, 3, (y * cos).abs() + (swapped * sin).abs())

        ratio = config.num_heads // config.num_kv_heads
        q = heads("q") * dim**-0.5
        if self._is_rounded and self._kv != "fp32":
            q = bf16(q)
        (k, k_scales), (v, v_scales) = (
            (t.repeat_interleave(ratio, 1) for t in self._cached(heads(kind))) for kind in "kv"
        )
        k = k * k_scales
        sizes = torch.einsum("rhd,khd->hrk", q.abs(), k.abs())
        scores = torch.einsum("rhd,khd->hrk", q, k)
        scores = self._blur(scores, dim + 2, sizes)
        window = config.windows[index]
        if window is not None:
            visible = visible & (positions > positions[:, None] - window)
        scores = scores.masked_fill(~visible, float("-inf"))
        weights = self._blur((scores - scores.amax(2, keepdim=True)).exp(), EXP_ERROR)
        total = weights.sum(2)
        weights = weights * v_scales[:, :, 0].t()[:, None]
        if self._is_rounded and self._kv != "fp32":
            weights = bf16(weights)
        sizes = torch.einsum("hrk,khd->hrd", weights, v.abs())
        mixed = self._blur(torch.einsum("hrk,khd->hrd", weights, v), len(v), sizes)
        mixed = self._blur(mixed / total[:, :, None], len(v)).transpose(0, 1)
        return torch.flatten(mixed, 1)

    def _cached(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys or values [n, num_kv_heads, head_dim] as cached, and their scales [n, heads, 1]."""
        scales = torch.ones_like(x[:, :, :1])
        if not self._is_rounded or self._kv == "fp32":
            return x, scales
        if self._kv == "bf16":
            return bf16(x), scales
        scales = x.abs().amax(2, keepdim=True) / 127
        return (x / scales).round(), scales

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._source.get(f"{name}.weight").double()
        mean = x.square().mean(-1, keepdim=True)
        return self._blur(x / (mean + self._config.norm_eps).sqrt() * weight, x.shape[-1])

    def _linear(
        self, x: Tensor, name: str, *, has_bias: bool = False, precision: str | None = None
    ) -> Tensor:
        weight = self._stored(name, precision or self._precision)
        if self._is_rounded and self._precision != "fp32":
            x = bf16(x)
        y = self._blur(x @ weight.values.t(), x.shape[1] + 2, x.abs() @ weight.magnitudes.t())
        return y + self._source.get(f"{name}.bias").double() if has_bias else y

    def _stored(self, name: str, precision: str) -> Stored:
        return stored(self._source.get(f"{name}.weight"), precision)

    def _blur(self, x: Tensor, num_units: int, magnitudes: Tensor | None = None) -> Tensor:
        """x, wrong by as much as `num_units` roundings of these magnitudes may make it."""
        if self._signs is None:
            return x
        signs = torch.randint(0, 2, x.shape, generator=self._signs) * 2 - 1
        return x + signs * num_units * UNIT * (x.abs() if magnitudes is None else magnitudes)


def expected_logits(
    fields: Mapping[str, Any],
    precision: str,
    kv: str,
    token_ids: Sequence[int],
    parents: Sequence[int],
) -> tuple[Tensor, float]:
    """Logits float64 [n, vocab] of known tokens and a tree below the last one, and a tolerance.

    `token_ids` are the known ones and then the tree's without its root. The tolerance is what all
    roundings to few bits do together, since a value between two may become either, and what the
    a-priori errors of fp32 do.
    """
    config, source = ModelConfig.from_checkpoint(fields), ToyTensors(fields)
    rows = rows_of(len(token_ids) - len(parents) + 1, parents)

    def logits(*, is_rounded: bool, is_blurred: bool) -> Tensor:
        oracle = NativeOracle(
            config, source, precision, kv, is_rounded=is_rounded, is_blurred=is_blurred
        )
        return oracle.logits(token_ids, *rows)

    want = logits(is_rounded=True, is_blurred=False)
    effects = [
        (logits(is_rounded=is_rounded, is_blurred=is_rounded) - want).abs().max().item()
        for is_rounded in (False, True)
    ]
    return want, sum(effects)
