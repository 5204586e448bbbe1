"""What torch's functions and tensor methods mean for a symbolic value, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Apply = Callable[..., Any]

#: Names that are one of flashgen's operations.
OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/", "divide": "/", "pow": "**",
    "floor_divide": "//", "remainder": "%", "neg": "neg", "abs": "abs", "absolute": "abs",
    "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
    "minimum": "minimum", "maximum": "maximum", "tanh": "tanh", "exp": "exp", "exp2": "exp2",
    "log": "log", "log2": "log2", "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin", "cos": "cos",
    "sigmoid": "sigmoid", "trunc": "truncate",
    "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!=",
    "logical_and": "&", "logical_or": "|", "logical_xor": "^", "logical_not": "~",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_not": "~",
    "where": "where",
}  # fmt: skip


def _clamp(apply: Apply, x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else apply("maximum", x, min)
    return x if max is None else apply("minimum", x, max)


def _div(apply: Apply, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "trunc":
        return apply("truncate", apply("/", a, b))
    return apply("/" if rounding_mode is None else "//", a, b)


def _to(apply: Apply, x: Any, dtype: Any) -> Any:
    """To a float type it changes nothing: numbers are real until they are printed."""
    name = str(dtype)
    if "float" in name:
        return apply("+", x, 0)
    return apply("!=", x, 0) if "bool" in name else apply("truncate", x)


def _new(value: int) -> Apply:
    """A scalar of one value, as FlexAttention's `and_masks` and `or_masks` begin with."""

    def new(apply: Apply, x: Any, size: tuple[int, ...], *, dtype: Any = None) -> Any:
        if tuple(size):
            raise TypeError(f"a tensor of shape {tuple(size)} is not traced, a scalar () is")
        number = apply("+", value, 0)
        return number if dtype is None else _to(apply, number, dtype)

    return new


#: Names with arguments of their own: functions of (apply, *args, **kwargs).
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda apply, x, max: apply("minimum", x, max),
    "relu": lambda apply, x, inplace=False: apply("maximum", x, 0),
    "square": lambda apply, x: apply("*", x, x),
    "reciprocal": lambda apply, x: apply("/", 1, x),
    "div": _div,
    "new_ones": _new(1),
    "new_zeros": _new(0),
    "to": _to,
    "type": _to,
    "float": lambda apply, x: apply("+", x, 0),
    "double": lambda apply, x: apply("+", x, 0),
    "int": lambda apply, x: apply("truncate", x),
    "long": lambda apply, x: apply("truncate", x),
    "bool": lambda apply, x: apply("!=", x, 0),
}

KNOWN = tuple(sorted(OPERATORS.keys() | FUNCTIONS.keys()))


def call(name: str, apply: Apply, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of that name, by ``apply(operation, *operands)``; KeyError if it is unknown.

    Raises:
        TypeError: arguments that this function is not known to take.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name](apply, *args, **kwargs)
    operation = OPERATORS[name]
    if name == "where" and kwargs.keys() == {"other"}:
        args, kwargs = (*args, kwargs["other"]), {}
    if kwargs:
        raise TypeError(f"{name} is not traced with {', '.join(f'{key}=' for key in kwargs)}")
    return apply(operation, *args)
