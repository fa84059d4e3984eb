"""NativeStructs: what the host states to the C++ in kernels/native, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_uint32, c_uint64, c_void_p
from typing import ClassVar


class CLinear(ctypes.Structure):
    """Linear of kernels/native/model.hpp."""

    _fields_: ClassVar = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("out", c_int32),
        ("in_", c_int32),
        ("format", c_int32),
        ("reserved", c_int32),
    ]


class CLayer(ctypes.Structure):
    """Layer of kernels/native/model.hpp."""

    _fields_: ClassVar = [
        ("qkv", CLinear),
        ("output", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("window", c_int32),
        ("reserved", c_int32),
    ]


class CModel(ctypes.Structure):
    """Model of kernels/native/model.hpp."""

    _fields_: ClassVar = [
        ("layers", ctypes.POINTER(CLayer)),
        ("final_norm", c_void_p),
        ("embedding", CLinear),
        ("head", CLinear),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("eps", c_float),
        ("scale", c_float),
    ]


class CCache(ctypes.Structure):
    """Cache of kernels/native/model.hpp."""

    _fields_: ClassVar = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("format", c_int32),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("reserved", c_int32),
    ]


class CSegment(ctypes.Structure):
    """Segment of kernels/native/model.hpp."""

    _fields_: ClassVar = [
        ("start", c_int32),
        ("num_rows", c_int32),
        ("root", c_int32),
        ("blocks", c_int32),
        ("paths", c_int32),
    ]


class CStep(ctypes.Structure):
    """Step of kernels/native/model.hpp."""

    _fields_: ClassVar = [
        ("token_ids", ctypes.POINTER(c_int32)),
        ("positions", ctypes.POINTER(c_int32)),
        ("slots", ctypes.POINTER(c_int32)),
        ("segments", ctypes.POINTER(CSegment)),
        ("blocks", ctypes.POINTER(c_int32)),
        ("paths", ctypes.c_char_p),
        ("logit_rows", ctypes.POINTER(c_int32)),
        ("logits", c_void_p),
        ("hidden", c_void_p),
        ("num_rows", c_int32),
        ("num_segments", c_int32),
        ("num_logits", c_int32),
        ("reserved", c_int32),
    ]


class CCounts(ctypes.Structure):
    """Counts of kernels/native/choice.hpp."""

    _fields_: ClassVar = [
        ("seen", c_void_p),
        ("right", c_void_p),
        ("memory", c_double),
        ("prior", c_double),
    ]


class CAcceptance(ctypes.Structure):
    """Acceptance of kernels/native/choice.hpp."""

    _fields_: ClassVar = [
        *((name, CCounts) for name in ("by_score", "by_kind", "by_cell")),
        *((name, c_void_p) for name in ("kind_mean", "cell_mean", "own", "own_seen", "watch")),
        *((name, c_void_p) for name in ("claims", "score_bins", "depth_bins")),
        *((name, c_int32) for name in ("num_sources", "num_scores", "num_temperatures")),
        *((name, c_int32) for name in ("num_ranks", "cells_per_kind")),
        *((name, c_int32) for name in ("last_score_bin", "last_depth_bin", "reserved")),
        *((name, c_double) for name in ("least", "most", "unexpected")),
        *((name, c_double) for name in ("own_prior", "doubted_prior", "own_decay")),
        *((name, c_double) for name in ("change", "common_change", "after_change")),
        *((name, c_double) for name in ("merit_decay", "most_merit")),
    ]


class CTree(ctypes.Structure):
    """Tree of kernels/native/choice.hpp."""

    _fields_: ClassVar = [
        *((name, c_int32) for name in ("size", "slot", "node_budget", "max_depth")),
        *((name, c_int32) for name in ("source", "is_mixed", "temperature")),
        *((name, c_int32) for name in ("num_kept", "surprise")),
    ]


class CNode(ctypes.Structure):
    """Node of kernels/native/choice.hpp."""

    _fields_: ClassVar = [
        *((name, c_int32) for name in ("parent", "tree", "source", "depth", "num_children")),
        *((name, c_int32) for name in ("pair", "kind", "cell", "own")),
        *((name, ctypes.c_bool) for name in ("is_chosen", "is_judged")),
        *((name, c_double) for name in ("expected", "worth", "gain", "right")),
    ]


class CChoice(ctypes.Structure):
    """Choice of kernels/native/choice.hpp."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("trees", "token_ids", "parents", "sources", "scores")),
        *((name, c_void_p) for name in ("cheapest", "nodes", "kept", "kept_parents")),
        *((name, c_void_p) for name in ("values", "by_level")),
        *((name, c_int32) for name in ("num_drafters", "num_levels")),
        ("least_worth", c_double),
        ("costs", c_void_p),
        *((name, c_int32) for name in ("num_trees", "room")),
        *((name, c_double) for name in ("price", "margin_price", "exponent", "worth")),
        ("num_nodes", c_int32),
        ("deepest", c_int32),
    ]


class CDraw(ctypes.Structure):
    """Draw of kernels/native/sampling.hpp."""

    _fields_: ClassVar = [
        ("seed", c_uint64),
        ("position", c_uint32),
        ("factor", c_float),
        ("top_k", c_int32),
        ("min_p_gap", c_float),
        ("top_p", c_double),
    ]


STRUCTS = (
    CLinear, CLayer, CModel, CCache, CSegment, CStep, CAcceptance, CChoice, CTree, CNode, CDraw,
)  # fmt: skip
