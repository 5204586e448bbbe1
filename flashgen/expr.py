"""Expr: the symbolic integer or boolean that a mask function is called with.

A mask function is called once, with an `Expr` for each of its arguments; what it returns is the
predicate. The same function also runs on numbers and on torch tensors, which is what the eager
oracle does: inside ``with bound({"left": 1024, "q_len": 5, "kv_len": 7})`` every `Expr` stands for
its value, so that ``q_idx - left`` is tensor arithmetic. Neither torch nor triton is imported.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import extract_stack
from typing import Any, cast

import sympy

from flashgen.errors import MaskError
from flashgen.operations import OPERATIONS, TORCH_NAMES
from flashgen.symbols import KV_LEN, Q_LEN, SYMBOLS, evaluate
from flashgen.user_code import users_line

#: Names a declared parameter cannot take: flashgen's own symbols and the arguments of `attention`.
RESERVED_NAMES = frozenset(
    ["q", "k", "v", "scale", "return_lse", *(symbol.name for symbol in SYMBOLS)]
)

_VALUES: ContextVar[Mapping[str, int] | None] = ContextVar("flashgen_values", default=None)


class Expr:
    """A symbolic integer or boolean, with the run-time parameters it mentions.

    Attributes:
        sym: the sympy expression.
        params: the declared `Int` parameters in it, in the order of first use.
    """

    __slots__ = ("params", "sym")

    def __init__(self, sym: Any, params: tuple[Int, ...] = ()) -> None:
        self.sym = sym
        self.params = params

    @property
    def is_boolean(self) -> bool:
        """Whether this is a condition rather than an integer."""
        return isinstance(self.sym, sympy.logic.boolalg.Boolean) and not self.sym.is_Symbol

    def __add__(self, other: Any) -> Expr:
        return _apply("+", self, other)

    def __radd__(self, other: Any) -> Expr:
        return _apply("+", other, self)

    def __sub__(self, other: Any) -> Expr:
        return _apply("-", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return _apply("-", other, self)

    def __mul__(self, other: Any) -> Expr:
        return _apply("*", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return _apply("*", other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return _apply("//", self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return _apply("//", other, self)

    def __mod__(self, other: Any) -> Expr:
        return _apply("%", self, other)

    def __rmod__(self, other: Any) -> Expr:
        return _apply("%", other, self)

    def __truediv__(self, other: Any) -> Expr:
        raise _mistake("`/` leaves the integers", "write `//`")

    def __neg__(self) -> Expr:
        return _apply("neg", self)

    def __abs__(self) -> Expr:
        return _apply("abs", self)

    def __ge__(self, other: Any) -> Expr:
        return _apply(">=", self, other)

    def __gt__(self, other: Any) -> Expr:
        return _apply(">", self, other)

    def __le__(self, other: Any) -> Expr:
        return _apply("<=", self, other)

    def __lt__(self, other: Any) -> Expr:
        return _apply("<", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return _apply("==", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return _apply("!=", self, other)

    def __and__(self, other: Any) -> Expr:
        return _apply("&", self, other)

    def __rand__(self, other: Any) -> Expr:
        return _apply("&", other, self)

    def __or__(self, other: Any) -> Expr:
        return _apply("|", self, other)

    def __ror__(self, other: Any) -> Expr:
        return _apply("|", other, self)

    def __xor__(self, other: Any) -> Expr:
        return _apply("^", self, other)

    def __rxor__(self, other: Any) -> Expr:
        return _apply("^", other, self)

    def __invert__(self) -> Expr:
        return _apply("~", self)

    def __bool__(self) -> bool:
        if self.sym in (sympy.true, sympy.false):
            return bool(self.sym)
        raise _mistake(
            f"the truth of `{self}` is not known while the mask is traced",
            "write & for `and`, | for `or`, ~ for `not`, "
            "and (a <= x) & (x < b) for a chained comparison",
        )

    def __hash__(self) -> int:
        return hash(self.sym)

    def __str__(self) -> str:
        return str(self.sym)

    def __repr__(self) -> str:
        return f"Expr({self.sym})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch calls when an `Expr` is an operand or an argument of one of its functions."""
        name = getattr(func, "__name__", str(func))
        if name in TORCH_NAMES and not kwargs:
            return _apply(TORCH_NAMES[name], *args)
        if _VALUES.get() is not None:
            return func(*map(concrete, args), **(kwargs or {}))
        known = ", ".join(sorted(TORCH_NAMES))
        raise _mistake(f"torch's `{name}` cannot be traced", f"known are the operators and {known}")


class Int(Expr):
    """A run-time integer: a keyword argument of the generated ``attention``.

    Args:
        name: the argument's name.
        default: its value when the call leaves it out; None makes it required.
        min: the least value accepted. The generated ``attention`` raises ValueError below it, and
            the derived loop bounds rely on it.
        doc: one line for the generated docstring.
    """

    __slots__ = ("default", "doc", "min", "name")

    def __init__(
        self, name: str, default: int | None = None, *, min: int = 0, doc: str = ""
    ) -> None:
        if not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED_NAMES:
            raise MaskError(
                f"Int({name!r}): not usable as an argument's name; "
                f"take an identifier that is no keyword and none of {sorted(RESERVED_NAMES)}"
            )
        if default is not None and default < min:
            raise MaskError(f"Int({name!r}): default={default} is below min={min}; raise it")
        super().__init__(sympy.Symbol(name, integer=True), (self,))
        self.name, self.default, self.min, self.doc = name, default, min, doc

    @property
    def declaration(self) -> tuple[str, int | None, int]:
        """``(name, default, min)``: what makes two declarations the same parameter."""
        return (self.name, self.default, self.min)

    def __repr__(self) -> str:
        return f"Int({self.name!r}, {self.default}, min={self.min})"


#: Run-time lengths of the query and of the key/value sequence, for use in a mask function.
q_len = Expr(Q_LEN)
kv_len = Expr(KV_LEN)


@contextmanager
def bound(values: Mapping[str, int] | None) -> Iterator[None]:
    """Inside, every `Expr` stands for its value: ``values`` gives one for each symbol's name.

    ``bound(None)`` goes back to symbols, which is what tracing does.
    """
    token = _VALUES.set(values)
    try:
        yield
    finally:
        _VALUES.reset(token)


def concrete(value: Any) -> Any:
    """The value that an `Expr` stands for inside `bound`; anything else as it is."""
    if not isinstance(value, Expr):
        return value
    values = _VALUES.get() or {}
    missing = sorted(s.name for s in value.sym.free_symbols if s.name not in values)
    if missing:
        raise MaskError(f"`{value}`: no value was given for {', '.join(missing)}")
    return evaluate(value.sym, values)


def _apply(name: str, *operands: Any) -> Expr:
    """One operation: on values inside `bound`, otherwise on symbols."""
    operation = OPERATIONS[name]
    if _VALUES.get() is not None:
        result = operation.concrete(*map(concrete, operands))
        # `~` of a plain bool would be an integer.
        return _constant(result) if isinstance(result, bool) else cast(Expr, result)
    exprs = [_operand(operand, name, operation.takes_integers) for operand in operands]
    if name in ("//", "%"):
        _check_divisor(exprs[1])
    params: dict[str, Int] = {}
    for param in (param for expr in exprs for param in expr.params):
        first = params.setdefault(param.name, param)
        if first.declaration != param.declaration:
            raise _mistake(
                f"two parameters are named {param.name!r}: {first!r} and {param!r}",
                "declare it once and use it twice, or rename one",
            )
    return Expr(operation.symbolic(*(expr.sym for expr in exprs)), tuple(params.values()))


def _operand(value: Any, operation: str, takes_integers: bool) -> Expr:
    """``value`` as an `Expr` of the kind that the operation takes."""
    if isinstance(value, bool):
        value = _constant(value)
    elif hasattr(value, "__index__") and not hasattr(value, "__torch_function__"):
        value = Expr(sympy.Integer(operator.index(value)))
    if not isinstance(value, Expr):
        raise _mistake(
            f"`{operation}` was given a {type(value).__module__}.{type(value).__qualname__}",
            "a mask works on its arguments, whole numbers, q_len, kv_len and declared Int "
            "parameters",
        )
    if takes_integers and value.is_boolean:
        raise _mistake(
            f"`{operation}` takes integers and was given the condition `{value}`",
            "combine conditions with &, | and ~",
        )
    if not takes_integers and not value.is_boolean:
        raise _mistake(
            f"`{operation}` takes conditions and was given the integer `{value}`",
            "compare it first, as in `x != 0`; comparisons beside & and | need parentheses",
        )
    return value


def _constant(value: bool) -> Expr:
    return Expr(sympy.true if value else sympy.false)


def _check_divisor(divisor: Expr) -> None:
    """Integer division is defined here for divisors known to be positive."""
    at_least = divisor.sym if divisor.sym.is_Integer else getattr(divisor, "min", 0)
    if divisor.sym not in (Q_LEN, KV_LEN) and at_least < 1:
        raise _mistake(
            f"the divisor `{divisor}` may be zero or negative",
            "divide by a positive number or by an Int declared with min=1",
        )


def _mistake(problem: str, remedy: str) -> MaskError:
    """A `MaskError` that shows the line of the user's own code that is being run."""
    where = users_line(extract_stack())
    return MaskError(f"{where + ': ' if where else ''}{problem}; {remedy}")
