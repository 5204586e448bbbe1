"""Step cost: the loads and the arithmetic of a step of the loop over keys besides its products.

Layouts, shared memory and time depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import sympy
from sympy.core.relational import Relational

from flashgen.plan.arguments import KernelTensor
from flashgen.plan.code import KernelCode
from flashgen.plan.dtypes import ITEMSIZES
from flashgen.plan.kernel import KernelPlan
from flashgen.symbolic.hoisting import Assignment
from flashgen.symbolic.nodes import Spread
from flashgen.symbolic.printer.arithmetic import ordered_terms
from flashgen.symbolic.printer.text import is_negative, negated
from flashgen.symbolic.varies_over import SCORES
from flashgen.symbols import KV_IDX, Q_IDX, Load

Axis = Literal["rows", "columns", "scores"]


@dataclass(frozen=True)
class TileLoad:
    """Elements of a tensor that a step needs.

    Attributes:
        tensor: its name.
        itemsize: bytes of an element.
        over: one element for each of the ``"rows"``, read before the loop, the ``"columns"``, or
            the ``"scores"``.
        masked: only masked tiles read them.
        added: a value computed from them is the first term added to the raw products.
        beside: the direction of contiguous elements: ``"rows"``, as in ``table[q_idx - kv_idx]``,
            ``"columns"``, also if none are contiguous, or ``"both"``, also if that is known only
            when the kernel runs.
        as_index: they are indices into another tensor.
    """

    tensor: str
    itemsize: int
    over: Axis
    masked: bool
    added: bool
    beside: Literal["rows", "columns", "both"]
    as_index: bool


def tile_loads(plan: KernelPlan) -> tuple[TileLoad, ...]:
    """The loads of a step: those of the score, then those of the mask alone."""
    return _tile_loads(plan.code, plan.kernel_arguments.tensors)


def unordered_comparisons(plan: KernelPlan) -> Mapping[Axis, int]:
    """How many comparisons read elements of rows, and of columns, if ids are out of order.

    None if the mask reads an element for each score: the select is then outside of the branch.
    """
    return _unordered_comparisons(plan.code)


@lru_cache(maxsize=256)
def _unordered_comparisons(code: KernelCode) -> Mapping[Axis, int]:
    if code.promise is None or code.loads_elements:
        return {"rows": 0, "columns": 0}
    parts = [
        part
        for condition in code.promise.conditions
        for part in condition.expr.atoms(Relational) or {condition.expr}
    ]
    rows, columns = (
        sum(any(position in load.free_symbols for load in part.atoms(Load)) for part in parts)
        for position in (Q_IDX, KV_IDX)
    )
    return {"rows": rows, "columns": columns}


def shift_itemsizes(plan: KernelPlan) -> tuple[int, ...]:
    """Bytes of an element of each load that the shift makes of rows."""
    shift = plan.code.shift
    sizes = _itemsizes(plan.kernel_arguments.tensors)
    loads = _loads([shift.expr], {}) if shift is not None else []
    return tuple(sizes[_tensor(load)] for load in loads if Q_IDX in load.free_symbols)


@lru_cache(maxsize=256)
def _tile_loads(code: KernelCode, tensors: tuple[KernelTensor, ...]) -> tuple[TileLoad, ...]:
    sizes = _itemsizes(tensors)
    rows, columns = _by_name(code.rows), _by_name((*code.columns, *code.masked))
    named = rows | columns | _by_name(code.elements)
    score = [code.score.expr] if code.score is not None else []
    of_score = _loads(score, named)
    loads = dict.fromkeys((*of_score, *_loads((c.expr for c in code.conditions), named)))
    added = _loads(map(_first_addend, score), named)
    indices = _loads((index for load in loads for index in load.args[1:]), named)
    over: dict[Any, Axis] = dict.fromkeys(loads, "scores")
    over |= dict.fromkeys(_loads(rows.values(), {}), "rows")
    over |= dict.fromkeys(_loads(columns.values(), {}), "columns")
    return tuple(
        TileLoad(
            tensor=_tensor(load),
            itemsize=sizes[_tensor(load)],
            over=over[load],
            masked=load not in of_score,
            added=load in added,
            beside="both" if _loads(load.args[-1:], named) else _beside(load.args[-1]),
            as_index=load in indices,
        )
        for load in loads
    )


def _itemsizes(tensors: Iterable[KernelTensor]) -> dict[str, int]:
    return {tensor.name: ITEMSIZES[tensor.dtype] for tensor in tensors}


def _tensor(load: Any) -> str:
    return str(load.args[0].name)


def _beside(index: Any) -> Literal["rows", "columns", "both"]:
    if _step(index, Q_IDX) != 1:
        return "columns"
    return "both" if _step(index, KV_IDX) == 1 else "rows"


def _step(index: Any, position: Any) -> int | None:
    """What ``index`` grows by from one position to the next; None where that is not known."""
    if position not in index.free_symbols:
        return 0
    if index.is_Add:
        steps = [_step(term, position) for term in index.args]
        return None if None in steps else sum(filter(None, steps))
    return 1 if index == position else -1 if index == -position else None


def _first_addend(score: Any) -> Any:
    """``x`` of ``scores + x + ...``; a number where the score begins in another way."""
    terms = ordered_terms(score) if score.is_Add else []
    added = SCORES in terms and not any(map(is_negative, terms))
    return terms[1] if added else sympy.Integer(0)


def _loads(roots: Iterable[Any], named: Mapping[str, Any]) -> list[Any]:
    """What is loaded in these expressions and in those that they name, each once."""
    waiting, found, seen = list(roots), dict[Any, None](), set()
    while waiting:
        for node in sympy.preorder_traversal(waiting.pop(0)):
            if isinstance(node, Load):
                found[node] = None
            elif node.is_Symbol and node.name in named and node.name not in seen:
                seen.add(node.name)
                waiting.append(named[node.name])
    return list(found)


def _by_name(assignments: Iterable[Assignment]) -> dict[str, Any]:
    return {a.name: a.code.expr for a in assignments}


# The score function's own instructions.

_FUNCTIONS = (sympy.tanh, sympy.exp, sympy.log, sympy.sin, sympy.cos, sympy.erf)
#: Of what takes one operation less than it has parts.
_JOINING = sympy.Min | sympy.Max | sympy.And | sympy.Or


@dataclass(frozen=True)
class ScoreWork:
    """What the score function costs for an element of the scores, hoisted parts not counted.

    Attributes:
        instructions: arithmetic, comparisons, choices.
        functions: hyperbolic tangents, exponentials and the like.
    """

    instructions: int
    functions: int


@lru_cache(maxsize=256)
def score_work(code: KernelCode) -> ScoreWork:
    """The work of the score function."""
    if code.score is None:
        return ScoreWork(0, 0)
    parts = (code.score, *(line.code for line in code.elements if 0 in line.used_by))
    work = sum((_work(part.expr) for part in parts), Counter[str]())
    return ScoreWork(work["instructions"], work["functions"])


def _work(expr: Any) -> Counter[str]:
    """Of an expression, as it is printed."""
    if expr.is_number:
        return Counter(instructions=int(bool(expr < 0)))
    if expr.is_Pow:
        return _of_power(*expr.args)
    args, own = expr.args, Counter(instructions=1)
    if expr.is_Symbol or isinstance(expr, Load):
        own = Counter()
    elif isinstance(expr, _FUNCTIONS):
        own = Counter(functions=1)
    elif expr.is_Add:
        own = Counter(instructions=len(args) - 1 + all(map(is_negative, args)))
        args = [negated(term) if is_negative(term) else term for term in args]
    elif expr.is_Mul and is_negative(expr):
        args = [negated(expr)]
    elif expr.is_Mul:
        args = [x.base if x.is_Pow and x.exp == -1 else x for x in args if x != 1.0]
        own = Counter(instructions=len(args) - 1)
    elif isinstance(expr, _JOINING):
        own = Counter(instructions=len(args) - 1)
    elif isinstance(expr, sympy.Piecewise):
        own = Counter(instructions=len(args) - 1)
        args = [part for branch in args for part in branch if part is not sympy.true]
    elif isinstance(expr, Spread):
        own = Counter(instructions=2)
    return sum(map(_work, args), own)


def _of_power(base: Any, exponent: Any) -> Counter[str]:
    """Of repeated multiplication and a square root; else of 2 to a power."""
    if not (exponent.is_number and float(2 * exponent).is_integer()):
        logarithm = Counter(instructions=0 if base == 2 else 1 if base.is_number else 2)
        return _work(exponent) + _work(base) + logarithm + Counter(functions=1)
    rooted = exponent != int(exponent)
    times = int(abs(exponent)) + rooted
    inverted = exponent < 0 and exponent != -0.5  # whose root has an instruction of its own
    return sum([_work(base)] * times, Counter(instructions=times - 1 + rooted + bool(inverted)))
