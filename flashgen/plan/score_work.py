"""score_work: what the score function costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from flashgen.plan.code import KernelCode
from flashgen.symbolic.nodes import Spread
from flashgen.symbolic.printer.text import is_negative, negated
from flashgen.symbols import Load

_FUNCTIONS = (sympy.tanh, sympy.exp, sympy.log, sympy.sin, sympy.cos)
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
