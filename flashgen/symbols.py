"""The sympy vocabulary of flashgen: its symbols, integer division, comparisons, evaluation."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import sympy

B, H = sympy.symbols("b h", integer=True)
Q_IDX, KV_IDX = sympy.symbols("q_idx kv_idx", integer=True)
Q_FIRST, Q_LAST = sympy.symbols("q_first q_last", integer=True)
Q_LEN, KV_LEN = sympy.symbols("q_len kv_len", integer=True)

KV_FIRST, KV_LAST = sympy.symbols("kv_first kv_last", integer=True)
BATCH, Q_HEADS, KV_HEADS = sympy.symbols("batch num_q_heads num_kv_heads", integer=True)
#: scale * q·k of one query and one key: what a score function is given.
SCORE = sympy.Symbol("score", real=True)

#: The symbols that flashgen itself gives a meaning; none of these is ever negative.
SYMBOLS = (
    Q_IDX, KV_IDX, Q_FIRST, Q_LAST, KV_FIRST, KV_LAST, KV_LEN, Q_LEN, B, H,
    BATCH, Q_HEADS, KV_HEADS,
)  # fmt: skip


class FloorDiv(sympy.Function):  # type: ignore[misc]
    """``a // b`` rounded down. sympy's own ``floor(a / b)`` would leave the integers."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        """Fold numbers and a division by one; anything else stays as written."""
        if b == 1:
            return a
        return sympy.Integer(a // b) if a.is_Integer and b.is_Integer else None


#: How many heads of q share a head of keys.
GROUP = FloorDiv(Q_HEADS, KV_HEADS)


class FloorMod(sympy.Function):  # type: ignore[misc]
    """``a % b`` with the sign of ``b``, on integers: ``a - b * (a // b)``."""

    nargs = 2
    is_integer = True

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        """Fold numbers and a modulus of one; anything else stays as written."""
        if b == 1:
            return sympy.Integer(0)
        return sympy.Integer(a % b) if a.is_Integer and b.is_Integer else None


class _Bits(sympy.Function):  # type: ignore[misc]
    """An operation on the bits of two integers."""

    nargs = 2
    is_integer = True
    of: Callable[[int, int], int]

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        """Fold numbers; anything else stays as written."""
        return sympy.Integer(cls.of(int(a), int(b))) if a.is_Integer and b.is_Integer else None


class BitAnd(_Bits):
    """``a & b`` on the bits of two integers."""

    of = staticmethod(operator.and_)


class BitOr(_Bits):
    """``a | b`` on the bits of two integers."""

    of = staticmethod(operator.or_)


class BitXor(_Bits):
    """``a ^ b`` on the bits of two integers."""

    of = staticmethod(operator.xor)


class ShiftLeft(_Bits):
    """``a << n``, for n from 0 on. By a number it is a product."""

    of = staticmethod(operator.lshift)

    @classmethod
    def eval(cls, a: Any, n: Any) -> Any:
        """By a number it is another node."""
        return a * 2**n if n.is_Integer else None


class ShiftRight(_Bits):
    """``a >> n`` rounded down, for n from 0 to 31. By a number it is a quotient."""

    of = staticmethod(operator.rshift)

    @classmethod
    def eval(cls, a: Any, n: Any) -> Any:
        """By a number it is another node, but for 2**31, which 32 bits do not have."""
        return FloorDiv(a, 2**n) if n.is_Integer and n < 31 else None


class Product(sympy.Function):  # type: ignore[misc]
    """``x @ M`` in a feature map: an element of the product of a vector with a declared tensor."""

    nargs = 2
    is_real = True

    def _sympystr(self, printer: Any) -> str:
        return f"({' @ '.join(map(printer.doprint, self.args))})"


class Truncate(sympy.Function):  # type: ignore[misc]
    """A number without its fraction, as an integer: what ``.to(torch.int32)`` does."""

    nargs = 1
    is_integer = True

    @classmethod
    def eval(cls, x: Any) -> Any:
        """An integer is itself, a number is cut; anything else stays."""
        if x.is_integer:
            return x
        return sympy.Integer(math.trunc(float(x))) if x.is_number else None


class Floor(sympy.Function):  # type: ignore[misc]
    """A float rounded down, as a float: no 32 bits have to hold it."""

    nargs = 1

    @classmethod
    def eval(cls, x: Any) -> Any:
        """An integer is itself, a number is rounded; anything else stays."""
        if x.is_integer:
            return x
        return sympy.Integer(math.floor(float(x))) if x.is_number else None

    def _eval_is_real(self) -> bool:
        return True


class Load(sympy.Function):  # type: ignore[misc]
    """``tensor[i, j, ...]``: the first argument is the symbol of a declared tensor.

    It is an integer where that symbol is. An element of a boolean tensor is 0 or 1; as a condition
    it stands as ``Ne(Load(...), 0)``.
    """

    def _eval_is_integer(self) -> Any:
        return self.args[0].is_integer

    def _eval_is_real(self) -> bool:
        return True


class _OverTile(sympy.Function):  # type: ignore[misc]
    """An extreme of an expression in q_idx (or kv_idx) over the tile's rows (or columns).

    That position is a bound variable, as in a sum: the extreme depends on the tile's position.
    """

    nargs = 1

    @classmethod
    def eval(cls, expr: Any) -> Any:
        """What is the same in every row is its own extreme."""
        return None if {Q_IDX, KV_IDX} & expr.free_symbols else expr

    def _eval_is_integer(self) -> Any:
        return self.args[0].is_integer

    def _eval_is_real(self) -> bool:
        return True

    @property
    def positions(self) -> tuple[Any, Any, Any]:
        """The position that runs over the tile, its first and its last value."""
        of_rows = Q_IDX in self.args[0].free_symbols
        return (Q_IDX, Q_FIRST, Q_LAST) if of_rows else (KV_IDX, KV_FIRST, KV_LAST)

    @property
    def free_symbols(self) -> set[Any]:
        """The symbols that its value depends on."""
        position, *ends = self.positions
        symbols: set[Any] = self.args[0].free_symbols - {position}
        return symbols.union(ends)

    def over(self, values: Mapping[str, Any]) -> list[Any]:
        """The values of the expression in the rows, or columns, of the tile."""
        position, first, last = self.positions
        begin, end = values[first.name], values[last.name] + 1
        step = _step(self.args[0], position)
        tile = (begin, *range(begin - begin % step + step, end, step))  # the others repeat these
        return [evaluate(self.args[0], {**values, position.name: i}) for i in tile]


@lru_cache(maxsize=1024)
def _step(expr: Any, position: Any) -> int:
    """Positions between two multiples of this number have equal values."""
    if isinstance(expr, FloorDiv) and expr.args[0] == position and expr.args[1].is_Integer:
        return abs(int(expr.args[1]))
    if expr == position:
        return 1
    return math.gcd(*(_step(arg, position) for arg in expr.args))


class RowMin(_OverTile):
    """The least value that an expression takes over the tile."""


class RowMax(_OverTile):
    """The greatest value that an expression takes over the tile."""


def evaluate(expr: Any, values: Mapping[str, Any]) -> Any:
    """The number or bool that ``expr`` stands for, given the value of every symbol by name.

    The value of a tensor is anything that a tuple of ints indexes.

    Raises:
        KeyError: a symbol without a value.
        TypeError: a node outside flashgen's vocabulary.
    """
    return _evaluator(expr)(values)


@lru_cache(maxsize=1 << 14)  # one expression has many values; its nodes are looked at once
def _evaluator(expr: Any) -> Callable[[Mapping[str, Any]], Any]:
    """What `evaluate` does with the values."""
    if expr.is_Symbol:
        return operator.itemgetter(expr.name)
    if expr.is_Number:
        number = int(expr) if expr.is_Integer else float(expr)
        return lambda values: number
    if isinstance(expr, Load):
        tensor, indices = expr.args[0].name, tuple(map(_evaluator, expr.args[1:]))
        return lambda values: values[tensor][tuple(index(values) for index in indices)]
    if isinstance(expr, _OverTile):
        extreme = min if isinstance(expr, RowMin) else max
        return lambda values: extreme(expr.over(values))
    if isinstance(expr, sympy.Piecewise):
        # What is not chosen is not looked at.
        return lambda values: next(evaluate(e, values) for e, c in expr.args if evaluate(c, values))
    rule = _VALUE_OF.get(expr.func)
    if rule is None:
        raise TypeError(f"{expr.func.__name__} is not in flashgen's vocabulary: {expr}")
    parts = tuple(map(_evaluator, expr.args))
    return lambda values: rule(*[part(values) for part in parts])


_VALUE_OF: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *terms: sum(terms),
    sympy.Mul: lambda *factors: math.prod(factors),
    sympy.Pow: operator.pow,
    sympy.Min: min,
    sympy.Max: max,
    sympy.Abs: abs,
    FloorDiv: operator.floordiv,
    FloorMod: operator.mod,
    BitAnd: operator.and_,
    BitOr: operator.or_,
    BitXor: operator.xor,
    ShiftLeft: operator.lshift,
    ShiftRight: operator.rshift,
    Truncate: math.trunc,
    Floor: math.floor,
    sympy.exp: math.exp,
    sympy.log: math.log,
    sympy.tanh: math.tanh,
    sympy.erf: math.erf,
    sympy.atan: math.atan,
    sympy.sin: math.sin,
    sympy.cos: math.cos,
    sympy.Ge: operator.ge,
    sympy.Gt: operator.gt,
    sympy.Le: operator.le,
    sympy.Lt: operator.lt,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.And: lambda *conditions: all(conditions),
    sympy.Or: lambda *conditions: any(conditions),
    sympy.Not: operator.not_,
    sympy.ITE: lambda when, a, b: a if when else b,
    type(sympy.true): lambda: True,
    type(sympy.false): lambda: False,
}
