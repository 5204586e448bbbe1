"""Expr: the symbolic number or condition that mask and score functions are called with.

Such a function is called with an `Expr` for each of its arguments; what it returns is the
predicate or the score. The same function also runs on numbers and on torch tensors, which is what
the eager oracle does: inside ``with bound({"left": 1024, "q_len": 5, "kv_len": 7})`` every `Expr`
stands for its value, so that ``q_idx - left`` is tensor arithmetic. Neither torch nor triton is
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import sympy

from flashgen.declared import Param
from flashgen.errors import MaskError
from flashgen.symbols import KV_LEN, Q_LEN, Load, evaluate
from flashgen.tracing.captured import captured
from flashgen.tracing.indicators import as_number, condition_of, is_bit, is_condition
from flashgen.tracing.kinds import (
    CONDITION,
    INTEGER,
    check_divisor,
    check_kinds,
    check_shift,
    check_size,
    kind_of,
)
from flashgen.tracing.operations import BITWISE, COMPARISONS, JOINS, OPERATIONS
from flashgen.tracing.rows import Elementwise, elementwise
from flashgen.tracing.shown import shown
from flashgen.tracing.torch_names import ATTRIBUTES, KNOWN, call
from flashgen.tracing.user_code import instead_of, mistake, name_of, undecided, untraceable

_VALUES: ContextVar[Mapping[str, Any] | None] = ContextVar("flashgen_values", default=None)


class Expr:
    """A symbolic number or condition, with the declared parameters that it mentions.

    Attributes:
        sym: the sympy expression.
        params: the declared `Int`, `Float`, `Tensor` and `Constant` in it, in the order of first
            use.
    """

    __slots__ = ("params", "sym")

    # numpy's numbers leave arithmetic with an `Expr` to the `Expr`.
    __array_ufunc__ = None

    def __init__(self, sym: Any, params: tuple[Param, ...] = ()) -> None:
        self.sym = sym
        self.params = params

    @property
    def kind(self) -> str:
        """``"condition"``, ``"integer"`` or ``"number"``."""
        return kind_of(self.sym)

    def __add__(self, other: Any) -> Expr:
        return apply("+", self, other)

    def __radd__(self, other: Any) -> Expr:
        return apply("+", other, self)

    def __sub__(self, other: Any) -> Expr:
        return apply("-", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return apply("-", other, self)

    def __mul__(self, other: Any) -> Expr:
        return apply("*", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return apply("*", other, self)

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Param) or not hasattr(other, "shape"):
            return NotImplemented  # it is a declared tensor's own, or none
        raise mistake(
            f"`{self} @` a tensor: what a product is with has to be declared",
            "write x @ Tensor('M', (head_dim, columns)) in a feature map, and pass it to calls",
        )

    def __floordiv__(self, other: Any) -> Expr:
        return apply("//", self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return apply("//", other, self)

    def __mod__(self, other: Any) -> Expr:
        return apply("%", self, other)

    def __rmod__(self, other: Any) -> Expr:
        return apply("%", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return apply("/", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return apply("/", other, self)

    def __pow__(self, other: Any) -> Expr:
        return apply("**", self, other)

    def __rpow__(self, other: Any) -> Expr:
        return apply("**", other, self)

    def __lshift__(self, other: Any) -> Expr:
        return apply("<<", self, other)

    def __rlshift__(self, other: Any) -> Expr:
        return apply("<<", other, self)

    def __rshift__(self, other: Any) -> Expr:
        return apply(">>", self, other)

    def __rrshift__(self, other: Any) -> Expr:
        return apply(">>", other, self)

    def __neg__(self) -> Expr:
        return apply("neg", self)

    def __abs__(self) -> Expr:
        return apply("abs", self)

    def __ge__(self, other: Any) -> Expr:
        return apply(">=", self, other)

    def __gt__(self, other: Any) -> Expr:
        return apply(">", self, other)

    def __le__(self, other: Any) -> Expr:
        return apply("<=", self, other)

    def __lt__(self, other: Any) -> Expr:
        return apply("<", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return apply("==", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return apply("!=", self, other)

    def __and__(self, other: Any) -> Expr:
        return apply("&", self, other)

    def __rand__(self, other: Any) -> Expr:
        return apply("&", other, self)

    def __or__(self, other: Any) -> Expr:
        return apply("|", self, other)

    def __ror__(self, other: Any) -> Expr:
        return apply("|", other, self)

    def __xor__(self, other: Any) -> Expr:
        return apply("^", self, other)

    def __rxor__(self, other: Any) -> Expr:
        return apply("^", other, self)

    def __invert__(self) -> Expr:
        return apply("~", self)

    def __bool__(self) -> bool:
        if self.sym in (sympy.true, sympy.false):
            return bool(self.sym)
        raise undecided(self.sym)

    def __index__(self) -> NoReturn:
        raise mistake(
            f"`{self}` picks from a list or a tensor while the function is traced",
            "declare it, as in table = Tensor('table', ('batch', 'kv_len'), dtype='int32'), "
            "and index that, or Constant('table', values) of values that never change",
        )

    def __float__(self) -> NoReturn:
        raise mistake(
            f"`{self}` is no number while the function is traced",
            "write torch's function, or flashgen's, for one of `math`'s",
        )

    __int__ = __float__

    def __getattr__(self, name: str) -> Any:
        """A tensor's methods and attributes, as in ``(q_idx - kv_idx).abs()``."""
        if name in ATTRIBUTES:
            return ATTRIBUTES[name](self.kind)
        if name.startswith("_") or name not in KNOWN:
            raise AttributeError(f"a symbolic value has no `{name}`; {instead_of(name)}")
        return lambda *args, **kwargs: call(name, apply, (self, *args), kwargs)

    def __hash__(self) -> int:
        return hash(self.sym)

    def __str__(self) -> str:
        return shown(self.sym)

    def __repr__(self) -> str:
        return f"Expr({self})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The method that torch calls when an argument of one of its functions is an `Expr`."""
        name = name_of(func)
        named = dict(kwargs or {})
        if any(isinstance(arg, Elementwise) for arg in args):
            return Elementwise.__torch_function__(func, types, args, named)
        if is_bound() and name not in KNOWN:
            values = {key: concrete(value) for key, value in named.items()}
            return func(*map(concrete, args), **values)
        if name not in KNOWN:
            # An operator has the name "approx::tanh"; its __name__ is "tanh.default".
            raise untraceable(getattr(func, "_name", name), args)
        return call(name, apply, args, named)


#: Run-time lengths of the query and of the key/value sequence, for use in a mask function.
q_len = Expr(Q_LEN)
kv_len = Expr(KV_LEN)


@contextmanager
def bound(values: Mapping[str, Any] | None) -> Iterator[None]:
    """A context in which every `Expr` stands for its value: ``values``, by the symbol's name.

    ``bound(None)`` goes back to symbols, as tracing does.
    """
    token = _VALUES.set(values)
    try:
        yield
    finally:
        _VALUES.reset(token)


def bound_values() -> Mapping[str, Any] | None:
    """The values that each `Expr` stands for now, by its symbol's name; None: it is a symbol."""
    return _VALUES.get()


def is_bound() -> bool:
    """Whether an `Expr` stands for its value now."""
    return _VALUES.get() is not None


def values_now() -> Mapping[str, Any]:
    """The values of `bound` by their symbols' names; none outside of it."""
    return _VALUES.get() or {}


def concrete(value: Any) -> Any:
    """The value that an `Expr` stands for inside `bound`; anything else unchanged."""
    if not isinstance(value, Expr):
        return value
    values = values_now()
    missing = sorted(s.name for s in value.sym.free_symbols if s.name not in values)
    if missing:
        raise MaskError(f"`{value}`: no value was given for {', '.join(missing)}")
    return evaluate(value.sym, values)


def apply(name: str, *operands: Any) -> Expr:
    """One of `OPERATIONS`, on values inside `bound` and on symbols outside of it."""
    if any(isinstance(operand, Elementwise) for operand in operands):
        return elementwise(lambda *each: apply(name, *each), *operands)  # type: ignore[return-value]
    operation = OPERATIONS[name]
    if is_bound():
        result = operation.concrete(*map(concrete, operands))
        # `~` of a plain bool would be an integer.
        return (
            Expr(sympy.true if result else sympy.false)
            if isinstance(result, bool)
            else cast(Expr, result)
        )
    exprs = [_expr(operand, name) for operand in operands]
    if name in BITWISE and all(expr.kind == INTEGER for expr in exprs):
        operation = BITWISE[name]
    syms = [expr.sym for expr in exprs]
    if name in BITWISE and any(map(is_condition, syms)):
        syms = [condition_of(sym) if is_bit(sym) else sym for sym in syms]
    check_kinds(name, operation.takes, syms)
    check_size(name, syms)
    params = merged_params(exprs)
    if name in ("//", "%") and all(as_number(sym).is_integer for sym in syms):
        syms[1] = _known_positive(as_number(syms[1]), params)
        check_divisor(syms[1], _least_values(params))
    if name in ("<<", ">>"):
        check_shift(name, as_number(syms[0]), as_number(syms[1]), _least_values(params))
    if name == "where" and exprs[1].kind == CONDITION:
        when, a, b = syms
        return Expr((when & a) | (~when & b), params)
    if name in JOINS and all(map(is_condition, syms)):
        return Expr(JOINS[name](*syms), params)
    if operation.takes != CONDITION and name != "where" and name not in COMPARISONS:
        syms = [as_number(sym) for sym in syms]
    if operation.divides:
        syms.append({symbol for symbol, least in _least_values(params).items() if least >= 1})
    return Expr(operation.symbolic(*syms), params)


def _known_positive(divisor: Any, params: Iterable[Param]) -> Any:
    """A divisor; elements of positive constants become at least 1 for an index outside.

    Such an element reads 0, also in columns behind the last key, and 0 is no divisor.
    """
    constants: list[Any] = [param for param in params if hasattr(param, "elements")]
    positive = {c.sym for c in constants if not c.is_float and min(c.elements.flat) >= 1}
    loads = (load for load in divisor.atoms(Load) if load.args[0] in positive)
    return divisor.xreplace({load: sympy.Max(load, 1) for load in loads})


def _least_values(params: Iterable[Param]) -> dict[Any, int]:
    """The least value of each `Int` among the parameters, by its symbol."""
    # The min of an `Expr` that is no `Int` is torch's method.
    return {p.sym: p.min for p in params if isinstance(p, Expr) and isinstance(p.min, int)}


def as_condition(seen: Any) -> Any:
    """The result of a mask as a condition, if it is one: torch accepts bits as conditions, too."""
    if isinstance(seen, Expr) and is_bit(seen.sym):
        return Expr(condition_of(seen.sym), seen.params)
    if is_bound() and str(getattr(seen, "dtype", "")).startswith("torch.int"):
        return seen != 0
    return seen


def merged_params(exprs: Iterable[Expr]) -> tuple[Param, ...]:
    """The parameters of all expressions, in the order of first use.

    Raises:
        MaskError: two different declarations of one name.
    """
    params: dict[str, Param] = {}
    for param in (param for expr in exprs for param in expr.params):
        first = params.setdefault(param.name, param)
        if first.declaration != param.declaration:
            raise mistake(
                f"two parameters are named {param.name!r}: {first!r} and {param!r}",
                "declare it once and use it twice, or give one another name"
                + (": Constant('another', values)" if hasattr(param, "elements") else ""),
            )
    return tuple(params.values())


def _expr(value: Any, operation: str) -> Expr:
    """An operand as an `Expr`."""
    return value if isinstance(value, Expr) else Expr(captured(value, operation))
