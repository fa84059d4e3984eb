"""Tree walk: the accepted path of every draft tree, from the token chosen at each of its nodes.

The walk of `specdec.verification`'s coupled rule: from the root, go to the first child that
carries the node's chosen token y, stop where there is none; the last y is the bonus token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.variant import Variant

MAX_NODES = 256  # per tree, root included
MAX_PATH = MAX_NODES - 1  # accepted nodes: a chain, root excluded
_MIN_WIDTH = 64  # two lanes each: narrower rows save nothing


@dataclass(frozen=True)
class TreeWalk:
    """What q walks gave, in one tensor, so that the host reads it with one copy.

    `buffer` int32 [q, 3 + 2 * max_path]: accepted length, is finite, the tokens, the path; -1 where
    a row has no more of them. The properties are views of it.
    """

    buffer: Tensor

    @property
    def num_accepted(self) -> Tensor:
        """Accepted length per tree. int32 [q]."""
        return self.buffer[:, 0]

    @property
    def is_finite(self) -> Tensor:
        """1 where all logits of the tree are finite; a tree at 0 has failed. int32 [q]."""
        return self.buffer[:, 1]

    @property
    def tokens(self) -> Tensor:
        """Accepted tokens and then the bonus token: num_accepted + 1. int32 [q, max_path + 1]."""
        return self.buffer[:, 2 : 3 + self.max_path]

    @property
    def path(self) -> Tensor:
        """Accepted nodes as indices within the tree, root excluded. int32 [q, max_path]."""
        return self.buffer[:, 3 + self.max_path :]

    @property
    def max_path(self) -> int:
        """The longest path that the buffer can hold."""
        return (self.buffer.shape[1] - 3) // 2


# The longest path changes with every step: compiled for a few widths, and for any length.
@triton.jit(do_not_specialize=["max_path"])
def _walk(
    choices: tl.tensor,
    is_finite: tl.tensor,
    token_ids: tl.tensor,
    parents: tl.tensor,
    first_node: tl.tensor,
    buffer: tl.tensor,
    max_path: tl.tensor,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
) -> None:
    """Program (tree). buffer: int32 [q, 3 + 2 * max_path]; WIDTH is at least its row's length."""
    tree = tl.program_id(0)
    first = tl.load(first_node + tree)
    num_nodes = tl.load(first_node + tree + 1) - first
    row_len = 3 + 2 * max_path
    buffer += tree * row_len
    columns = tl.arange(0, WIDTH)
    tl.store(buffer + columns, tl.full((WIDTH,), -1, tl.int32), mask=columns < row_len)
    # Other threads of the program store into the same row below.
    tl.debug_barrier()

    nodes = tl.arange(0, NODES)
    is_node = nodes < num_nodes
    parent = tl.load(parents + first + nodes, mask=is_node, other=-1)
    token = tl.load(token_ids + first + nodes, mask=is_node, other=-1)
    finite = tl.load(is_finite + first + nodes, mask=is_node, other=1)
    all_finite = tl.min((finite != 0).to(tl.int32), axis=0)

    node = tl.zeros((), tl.int32)
    length = tl.zeros((), tl.int32)
    chosen = tl.load(choices + first)
    child = tl.min(tl.where((parent == 0) & (token == chosen), nodes, NODES), axis=0)
    while (child < NODES) & (length < max_path) & (all_finite != 0):
        tl.store(buffer + 2 + length, chosen)
        tl.store(buffer + 3 + max_path + length, child)
        node = child
        length += 1
        chosen = tl.load(choices + first + node)
        child = tl.min(tl.where((parent == node) & (token == chosen), nodes, NODES), axis=0)
    tl.store(buffer + 2 + length, chosen)
    tl.store(buffer, length)
    tl.store(buffer + 1, all_finite)


def tree_walk(
    choices: Tensor,
    is_finite: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    first_node: Tensor,
    max_path: int = MAX_PATH,
) -> TreeWalk:
    """Walk q draft trees at once; the nodes of tree t are [first_node[t], first_node[t + 1]).

    choices: int32 [n], the token chosen at each node; is_finite: int32 [n], whether the node's
    logits are; token_ids, parents: int32 [n], what each node carries and its parent's index within
    the tree, -1 for the root; first_node: int32 [q + 1]. A tree has 1 to 256 nodes. A walk ends
    after `max_path` nodes: then its bonus token may be one that was drafted.

    A tree with a logit that is not finite accepts nothing; its one token is not to be used.
    """
    num_trees = len(first_node) - 1
    assert 0 <= max_path <= MAX_PATH
    buffer = torch.empty((num_trees, 3 + 2 * max_path), dtype=torch.int32, device=choices.device)
    if num_trees:
        _walk[(num_trees,)](
            choices,
            is_finite,
            token_ids,
            parents,
            first_node,
            buffer,
            max_path,
            WIDTH=max(_MIN_WIDTH, triton.next_power_of_2(buffer.shape[1])),
            NODES=MAX_NODES,
            num_warps=1,
        )
    return TreeWalk(buffer)


def variants() -> Iterator[Variant]:
    """The compiled forms: short paths and the longest."""
    for width in (_MIN_WIDTH, 1024):
        yield Variant(
            f"tree_walk {width}",
            _walk,
            {
                "choices": "*i32",
                "is_finite": "*i32",
                "token_ids": "*i32",
                "parents": "*i32",
                "first_node": "*i32",
                "buffer": "*i32",
                "max_path": "i32",
            },
            {"WIDTH": width, "NODES": MAX_NODES},
            {"num_warps": 1},
        )
