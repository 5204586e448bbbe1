"""The place of a mistake in the user's own code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from traceback import FrameSummary, extract_stack
from typing import Any

from flashgen.errors import MaskError
from flashgen.symbols import BitAnd, BitOr, BitXor
from flashgen.tracing.shown import shown

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: Files that call the user's functions, or check their results: their callers are not at fault.
_CALLERS = (os.path.join(_PACKAGE, "tracing", "calls.py"), f"{_PACKAGE}spec.py")


def users_line(frames: Sequence[FrameSummary]) -> str:
    """The innermost line of a stack that is neither flashgen's nor torch's, for a message.

    ``"specs/mine.py:7: `if q_idx > 5:`"``, or "" without such a line.
    """
    for frame in reversed(frames):
        name = os.path.abspath(frame.filename)
        if name in _CALLERS:
            break
        if not name.startswith((_PACKAGE, _torch_folder())):
            return f"{frame.filename}:{frame.lineno}: `{frame.line}`"
    return ""


@cache
def _torch_folder() -> str:
    """The folder of torch, without importing it; flashgen's own folder if torch is missing."""
    spec = find_spec("torch")
    return os.path.dirname(spec.origin) + os.sep if spec and spec.origin else _PACKAGE


def mistake(problem: str, remedy: str) -> MaskError:
    """A `MaskError` that shows the line of the user's own code that is being run."""
    where = users_line(extract_stack())
    return MaskError(f"{where + ': ' if where else ''}{problem}; {remedy}")


def undecided(sym: Any) -> MaskError:
    """The mistake of asking for the truth of a sympy expression, as `and` and `if` do."""
    remedy = (
        "write & for `and`, | for `or`, ~ for `not`, where(condition, a, b) for `if`, "
        "minimum and maximum for `min` and `max`, "
        "and (a <= x) & (x < b) for a chained comparison"
    )
    if any(node.free_symbols for node in sym.atoms(BitAnd, BitOr, BitXor)):
        # Python reads `a >= b & c > d` as `a >= (b & c) > d`.
        remedy = (
            "put parentheses around comparisons beside &, | and ^, which bind first, as in "
            "(a >= b) & (c > d), and write where(condition, a, b) for `if`"
        )
    return mistake(f"the truth of `{shown(sym)}` is not known while the function is traced", remedy)


def name_of(function: Any) -> str:
    """The name of a torch function or operator: ``"ge"`` for ``aten.ge.Tensor``."""
    if getattr(function, "namespace", "") == "aten":
        function = getattr(function, "overloadpacket", function)
    return getattr(function, "__name__", str(function))


def untraceable(name: str, arguments: Sequence[Any]) -> MaskError:
    """The mistake of passing symbols to a function of torch that flashgen does not know.

    Args:
        name: the function's name.
        arguments: the arguments of the call.
    """
    if name == "__getitem__":
        index = arguments[1] if isinstance(arguments[1], tuple) else arguments[1:]
        return mistake(
            f"a tensor that is not declared is indexed by `{', '.join(map(str, index))}`",
            "declare it, as in ids = Tensor('ids', ('batch', 'kv_len'), dtype='int32'), "
            "and index that: the call passes the tensor, or declare it as Constant('ids', ids), "
            "and the module holds it",
        )
    return mistake(f"torch's `{name}` cannot be traced", instead_of(name))


#: What to write for functions of torch that have a meaning for single values.
_INSTEAD = {
    "all": "join conditions by &",
    "any": "join conditions by |",
    "isin": "write (x == 1) | (x == 2)",
    "isclose": "write abs(a - b) <= tolerance",
    "round": "write (x + 0.5).int() of an x that is not negative",
    "erfc": "write 1 - erf(x)",
    "asin": "write atan(x * rsqrt(1 - x * x))",
    "acos": "write pi / 2 - atan(x * rsqrt(1 - x * x))",
    "atan2": "write atan(y / x) of an x that is positive",
    "asinh": "write log(x + sqrt(x * x + 1))",
    "acosh": "write log(x + sqrt(x * x - 1))",
    "atanh": "write (log1p(x) - log1p(-x)) / 2",
    "logit": "write log(x) - log1p(-x)",
    "xlogy": "write x * log(y) of a y that is positive",
    "selu": "write 1.0507 * elu(x, 1.67326)",
    "celu": "write where(x > 0, x, alpha * expm1(x / alpha))",
    "prelu": "write where(x > 0, x, weight[h] * x)",
    "softshrink": "write sign(x) * relu(abs(x) - limit)",
    "hardshrink": "write where(abs(x) > limit, x, 0)",
    "isnan": "write nan_to_num(x), which puts 0 in place of NaN",
    **dict.fromkeys(
        ("bucketize", "searchsorted"),
        "count the boundaries below, as (x > 5).int() + (x > 10).int(), or (limits < x).sum() of a "
        "short declared tensor",
    ),
    **dict.fromkeys(
        ("outer", "cross", "norm", "cdist"),
        "put it into q and k, whose products scores are, or write the terms",
    ),
    "item": "leave it out: a symbolic value is a single one",
    **dict.fromkeys(
        ("sum", "dot", "inner", "matmul", "mm", "mv", "bmm", "einsum", "mean"),
        "write the terms, as x[i, 0] * y[j, 0] + x[i, 1] * y[j, 1]",
    ),
    **dict.fromkeys(
        ("shape", "size", "numel", "ndim", "dim"),
        "sizes are q_len, kv_len, numbers and Int parameters",
    ),
    **dict.fromkeys(
        ("gather", "take", "index_select", "embedding"), "index a declared Tensor, as in t[b, i]"
    ),
}


def instead_of(name: str) -> str:
    """What to write where a function or method of torch is not known."""
    known = "known are the operators and functions of single values, as where, clamp, exp, sigmoid"
    return _INSTEAD.get(name, known)
