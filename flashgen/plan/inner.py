"""What a step of the loop over keys reads and computes besides its products, from its text.

Layouts, shared memory and time depend on it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from flashgen.plan.arguments import KernelTensor
from flashgen.plan.code import KernelCode
from flashgen.plan.dtypes import ITEMSIZES
from flashgen.plan.kernel import KernelPlan
from flashgen.plan.text import mentioned
from flashgen.symbolic.placement import Assignment

_GATHER = re.compile(r"_at_\d+d")
_FUNCTIONS = ("_tanh", "tl.exp", "tl.math.exp2", "tl.log", "tl.math.log2", "tl.sin", "tl.cos")

Axis = Literal["rows", "columns", "scores"]


@dataclass(frozen=True)
class TileLoad:
    """Elements of a tensor that a step needs.

    Attributes:
        tensor: its name.
        itemsize: bytes of an element.
        over: what has an element each: ``"rows"``, read before the loop, ``"columns"``, or
            ``"scores"``.
        masked: only tiles that need the mask read them.
        added: what becomes of them is added to the raw products, before anything else is.
        beside: whose lie side by side: those of neighbouring ``"rows"``, as of
            ``table[q_idx - kv_idx]``, ``"columns"``, also where none do, or ``"both"``, also where
            it is only known when the kernel runs.
        as_index: they say which elements of another tensor to read.
    """

    tensor: str
    itemsize: int
    over: Axis
    masked: bool
    added: bool
    beside: Literal["rows", "columns", "both"]
    as_index: bool


@dataclass(frozen=True)
class ScoreWork:
    """What the score function costs for an element of the scores, hoisted parts not counted.

    Attributes:
        instructions: arithmetic, comparisons, choices.
        functions: hyperbolic tangents, exponentials and the like.
    """

    instructions: int
    functions: int


def tile_loads(plan: KernelPlan) -> tuple[TileLoad, ...]:
    """The loads of a step: those of the score, then those of the mask alone."""
    return _tile_loads(plan.code, plan.kernel_arguments.tensors)


def shift_itemsizes(plan: KernelPlan) -> tuple[int, ...]:
    """Bytes of an element of each load that the shift makes of rows."""
    shift = plan.code.shift
    sizes = {tensor.name: ITEMSIZES[tensor.dtype] for tensor in plan.kernel_arguments.tensors}
    calls = {ast.unparse(call): call for call in _gathers([_parse(shift)] if shift else [], {})}
    return tuple(
        sizes[ast.unparse(call.args[0])]
        for text, call in calls.items()
        if mentioned(["offs_m"], [text])
    )


@lru_cache(maxsize=256)
def score_work(code: KernelCode) -> ScoreWork:
    """The work of the score function."""
    trees = [_parse(a.code) for a in code.elements if 0 in a.used_by and code.score]
    trees += [_parse(code.score)] if code.score else []
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    functions = sum(name in _FUNCTIONS for name in calls)
    others = sum(not _GATHER.fullmatch(name) for name in calls) - functions
    arithmetic = sum(isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare) for node in nodes)
    return ScoreWork(arithmetic + others, functions)


@lru_cache(maxsize=256)
def _tile_loads(code: KernelCode, tensors: tuple[KernelTensor, ...]) -> tuple[TileLoad, ...]:
    sizes = {tensor.name: ITEMSIZES[tensor.dtype] for tensor in tensors}
    rows, columns = _trees(code.rows), _trees((*code.columns, *code.masked))
    named = rows | columns | _trees(code.elements)
    score = [_parse(code.score)] if code.score else []
    of_score = _gathers(score, named)
    calls = dict.fromkeys((*of_score, *_gathers(map(_parse, code.conditions), named)))
    added = _gathers(map(_first_addend, score), named)
    indices = _gathers((index for call in calls for index in call.args[1:]), named)
    over: dict[ast.Call, Axis] = {call: "scores" for call in calls}
    over |= dict.fromkeys(_gathers(rows.values(), {}), "rows")
    over |= dict.fromkeys(_gathers(columns.values(), {}), "columns")
    return tuple(
        TileLoad(
            tensor=ast.unparse(call.args[0]),
            itemsize=sizes[ast.unparse(call.args[0])],
            over=over[call],
            masked=call not in of_score,
            added=call in added,
            beside="both" if _gathers(call.args[-1:], named) else _beside(call.args[-1]),
            as_index=call in indices,
        )
        for call in calls
    )


def _beside(index: ast.expr) -> Literal["rows", "columns", "both"]:
    if _step(index, "q_idx") != 1:
        return "columns"
    return "both" if _step(index, "kv_idx") == 1 else "rows"


def _step(index: ast.expr, position: str) -> int | None:
    """What ``index`` grows by from one position to the next; None where that is not known."""
    if isinstance(index, ast.Name):
        return int(index.id == position)
    if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Add | ast.Sub):
        left, right = _step(index.left, position), _step(index.right, position)
        if left is None or right is None:
            return None
        return left + right if isinstance(index.op, ast.Add) else left - right
    names = {node.id for node in ast.walk(index) if isinstance(node, ast.Name)}
    return None if position in names else 0


def _first_addend(score: ast.expr) -> ast.expr:
    """``x`` of ``scores + x + ...``; a number where the score begins in another way."""
    while isinstance(score, ast.BinOp) and isinstance(score.op, ast.Add):
        for one, other in ((score.left, score.right), (score.right, score.left)):
            if isinstance(one, ast.Name) and one.id == "scores":
                return other
        score = score.left
    return ast.Constant(0)


def _gathers(roots: Iterable[ast.expr], trees: Mapping[str, ast.expr]) -> list[ast.Call]:
    """Calls that gather, in the trees at these roots and in those that they name."""
    waiting, found, seen = list(roots), [], set()
    while waiting:
        for node in ast.walk(waiting.pop(0)):
            if isinstance(node, ast.Call) and _GATHER.fullmatch(ast.unparse(node.func)):
                found.append(node)
            elif isinstance(node, ast.Name) and node.id in trees and node.id not in seen:
                seen.add(node.id)
                waiting.append(trees[node.id])
    return found


def _trees(assignments: Iterable[Assignment]) -> dict[str, ast.expr]:
    return {a.name: _parse(a.code) for a in assignments}


def _parse(code: str) -> ast.expr:
    return ast.parse(code, mode="eval").body
