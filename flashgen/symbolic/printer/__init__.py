"""Source text of a sympy expression, for a Triton kernel, for eager PyTorch or for a person.

Strict: a node that is not listed is an error, never a guess. Integer arithmetic stays integer and
is converted as a whole where it meets floats, conditions print with ``&`` and ``|`` and full
parentheses, and terms come in the order that a person writes: positions, then lengths and
parameters, then the constant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import sympy

from flashgen.symbolic.arctangent import with_polynomials
from flashgen.symbolic.nodes import (
    AsBits,
    AtLeast,
    Below,
    BothBits,
    EitherBits,
    OtherBits,
    Spread,
)
from flashgen.symbolic.printer import arithmetic, functions
from flashgen.symbolic.printer.code import Code
from flashgen.symbolic.printer.core import Printer
from flashgen.symbolic.printer.dialects import TRITON, Plain, Torch
from flashgen.symbolic.varies_over import DISTANCE, SCORES, ToFloat
from flashgen.symbols import (
    KV_IDX,
    Q_IDX,
    SCORE,
    SYMBOLS,
    B,
    BitAnd,
    BitOr,
    BitXor,
    FloorDiv,
    FloorMod,
    H,
    Load,
    RowMax,
    RowMin,
    ShiftLeft,
    ShiftRight,
    Truncate,
)

RULES = {
    sympy.Add: arithmetic.print_sum,
    sympy.Mul: arithmetic.print_product,
    sympy.Pow: arithmetic.print_power,
    FloorDiv: arithmetic.print_quotient,
    FloorMod: arithmetic.print_remainder,
    BitAnd: arithmetic.print_bits("&"),
    BitOr: arithmetic.print_bits("|"),
    BitXor: arithmetic.print_bits("^"),
    ShiftLeft: arithmetic.print_bits("<<"),
    ShiftRight: arithmetic.print_bits(">>"),
    sympy.Min: functions.print_extreme,
    sympy.Max: functions.print_extreme,
    sympy.Abs: functions.print_absolute,
    sympy.And: functions.print_junction,
    sympy.Or: functions.print_junction,
    sympy.Not: functions.print_opposite,
    sympy.ITE: functions.print_conditional,
    sympy.Piecewise: functions.print_select,
    Load: functions.print_load,
    Truncate: functions.print_truncated,
    ToFloat: functions.print_converted,
    RowMin: functions.print_reduction("min"),
    RowMax: functions.print_reduction("max"),
    Spread: functions.print_spread,
    AsBits: functions.print_as_bits,
    AtLeast: functions.print_bits_of("_at_least"),
    Below: functions.print_bits_of("_below"),
    BothBits: arithmetic.print_bits("&"),
    EitherBits: arithmetic.print_bits("|"),
    OtherBits: functions.print_other_bits,
    **dict.fromkeys(functions.FUNCTIONS, functions.print_function),
    **dict.fromkeys(functions.COMPARISONS, functions.print_comparison),
}
NONNEGATIVE = frozenset(symbol.name for symbol in SYMBOLS)
TILE = frozenset(symbol.name for symbol in (Q_IDX, KV_IDX, SCORE, SCORES, DISTANCE))
_TENSORS = frozenset(symbol.name for symbol in (Q_IDX, KV_IDX, SCORE, B, H))


def triton_code(
    expr: Any,
    names: Mapping[str, str] | None = None,
    nonnegative: Collection[str] = (),
    tensors: Collection[str] = (),
    *,
    approximate: bool = True,
) -> Code:
    """``expr`` as code of a kernel.

    Args:
        expr: a sympy expression: a number or a condition.
        names: the text for a symbol, as ``{"q_idx": "offs_m[:, None]"}``; others print their name.
            ``"q_rows"`` is the text for q_idx inside `RowMin` and `RowMax`: a vector of the tile's
            rows that ends at the last row.
        nonnegative: parameters known to be >= 0. Triton's ``//`` and ``%`` round towards zero, as
            C's do: an operand that may be negative gets a correction.
        tensors: symbols, besides the indices and the score, that are tensors in the kernel.
        approximate: whether ``tanh`` may use the hardware's instruction if APPROX is set.
    """
    printer = Printer(
        TRITON, RULES, names or {}, NONNEGATIVE | set(nonnegative), TILE | set(tensors),
        approximate,
    )  # fmt: skip
    return Code(with_polynomials(expr), printer)


def triton_source(expr: Any, *args: Any, **knowledge: Any) -> str:
    """``expr`` as Triton source; see `triton_code`.

    Raises:
        TypeError: a node that the printer does not know.
    """
    return triton_code(expr, *args, **knowledge).text()


def torch_code(
    expr: Any, names: Mapping[str, str] | None = None, tensors: Collection[str] = ()
) -> Code:
    """``expr`` as eager PyTorch, computed in the ``dtype`` of the function it stands in.

    b, h, q_idx and kv_idx are integer tensors, the score is a tensor of ``dtype``, and tensors are
    the user's; lengths and other parameters are Python numbers, but for those in ``tensors``. The
    code reads ``torch`` and ``math``.
    """
    return Code(expr, Printer(Torch(), RULES, names or {}, frozenset(), _TENSORS | set(tensors)))


def torch_source(
    expr: Any, names: Mapping[str, str] | None = None, tensors: Collection[str] = ()
) -> str:
    """The text of ``expr`` as eager PyTorch; see `torch_code`.

    Raises:
        TypeError: a node that the printer does not know.
    """
    return torch_code(expr, names, tensors).text()


def plain_source(expr: Any, names: Mapping[str, str] | None = None) -> str:
    """``expr`` for a person to read, as in ``30 * tanh(score / 30)``.

    Raises:
        TypeError: a node that the printer does not know.
    """
    return Printer(Plain(), RULES, names or {}, NONNEGATIVE, frozenset()).text(expr)


def python_source(expr: Any) -> str:
    """``expr`` on Python's own numbers: no index is a tensor, and no element is read.

    Raises:
        TypeError: a node that the printer does not know.
    """
    return Printer(Torch(), RULES, {}, frozenset(), frozenset()).text(expr)
