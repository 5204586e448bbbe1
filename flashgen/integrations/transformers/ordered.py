"""Masks of tensors that the device holds, rewritten into what bounds follow from.

Positions that count within packed sequences become positions, and images that see themselves become
numbers that ascend. Whether a tensor is such a one, the host asks the device, once a forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.integrations.layers.padding import waits
from flashgen.integrations.layers.recorded import CAUSAL, Node, conjunction, parts_of

#: A number that no sequence and no image has.
_NONE = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Ordered:
    """A condition, and the places of its tensors whose elements never fall along a sequence."""

    node: Node
    in_order: frozenset[int] = frozenset()


def ordered(node: Node, tensors: list[torch.Tensor], *, images: bool) -> Ordered:
    """The condition by positions, and by numbers that ascend, as far as its tensors allow.

    Args:
        node: what a mask function computes.
        tensors: that it reads; numbers that ascend are added to them.
        images: whether to look at images that see themselves.
    """
    if not waits():
        return Ordered(node)
    node = _by_positions(node, tensors)
    found: list[int] = []
    if images:
        parts = [_by_segments(part, tensors, found) for part in parts_of(node)]
        node = conjunction(parts)
    return Ordered(node, frozenset(found))


def is_packed(node: Node) -> bool:
    """Whether it says that query and key are of one of several sequences."""
    if node[0] != "eq" or node[2] != 0 or sorted(n for n, _ in node[1]) != [-1, 1]:
        return False
    (_, one), (_, other) = node[1]
    same = one[0] == other[0] == "load" and one[1] == other[1]
    return same and {one[2], other[2]} == {("b", "q"), ("b", "kv")}


def _by_positions(node: Node, tensors: list[torch.Tensor]) -> Node:
    """The condition with positions in place of those that count within packed sequences.

    There a difference of two is the difference of the indices: each is its neighbour's and 1. If
    all is one sequence, as transformers cannot tell where torch.compile traces it, they are not
    packed.
    """
    packed = [part for part in parts_of(node) if is_packed(part)]
    if not packed:
        return node
    ids = tensors[packed[0][1][0][1][1]]
    same = ids[:, 1:] == ids[:, :-1]
    one = bool(same.all())

    def counts(at: int) -> bool:
        x = tensors[at]
        if x.dim() != 2 or x.shape[-1] != ids.shape[-1]:
            return False
        return bool(((x[:, 1:] - x[:, :-1] == 1) | ~same).all())

    def moved(part: Node) -> Node:
        if part[0] in ("and", "or"):
            return (part[0], *map(moved, part[1:]))
        if part[0] != "le" or len(part[1]) != 2:
            return part
        (n, one), (m, other) = part[1]
        loads = one[0] == other[0] == "load" and one[1] == other[1] and n == -m
        if not loads or {one[2], other[2]} != {("b", "q"), ("b", "kv")} or not counts(one[1]):
            return part
        return ("le", ((n, (one[2][1],)), (m, (other[2][1],))), part[2])

    kept = [part if part in packed else moved(part) for part in parts_of(node)]
    if one and len(packed) == 1:
        kept.remove(packed[0])
    return conjunction(kept)


def _by_segments(part: Node, tensors: list[torch.Tensor], found: list[int]) -> Node:
    """``causal | (same image)``, where each image is one run of tokens, by one comparison.

    Tokens are numbered, those of an image with one number: a query sees the keys whose numbers are
    not above its own.
    """
    image = _image(part)
    if image is None:
        return part
    at, least = image
    ids = tensors[at]
    if ids.dim() != 2 or ids.shape[-1] == 0:
        return part
    # An id that is none of an image is that of no neighbour.
    inside = torch.ones_like(ids, dtype=torch.bool) if least is None else ids >= least
    begins = torch.ones_like(inside)
    begins[:, 1:] = (ids[:, 1:] != ids[:, :-1]) | ~inside[:, 1:]
    shown = torch.where(inside, ids.long(), _NONE).sort(-1).values
    images = (shown[:, 1:] != shown[:, :-1]).sum(-1) + (shown[:, 0] != _NONE)
    if bool(((begins & inside).sum(-1) != images).any()):
        return part
    found.append(len(tensors))
    tensors.append(begins.cumsum(-1, dtype=torch.int32))
    number = len(tensors) - 1
    key, query = (("load", number, ("b", position)) for position in ("kv", "q"))
    return ("le", ((1, key), (-1, query)), 0)


def _image(part: Node) -> tuple[int, int | None] | None:
    """The place of the ids in ``causal | (ids are equal & at least a number)``, and the number."""
    if part[0] != "or" or len(part) != 3 or CAUSAL not in part[1:]:
        return None
    other = part[2] if part[1] == CAUSAL else part[1]
    same = [x for x in parts_of(other) if is_packed(x)]
    rest = [x for x in parts_of(other) if not is_packed(x)]
    if len(same) != 1 or len(rest) > 1:
        return None
    at = same[0][1][0][1][1]
    if not rest:
        return at, None
    how, *terms = rest[0]
    if how != "le" or len(terms[0]) != 1:
        return None
    factor, atom = terms[0][0]
    if factor != -1 or atom[0] != "load" or atom[1] != at or atom[2] not in _OF_TOKENS:
        return None
    return at, terms[1]


_OF_TOKENS = (("b", "q"), ("b", "kv"))
