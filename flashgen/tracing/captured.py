"""Numbers and bools that a user's function captures, as sympy's."""

from __future__ import annotations

import math
import operator
from typing import Any

import sympy

from flashgen.tracing.rows import Elementwise
from flashgen.tracing.user_code import mistake


def captured(value: Any, operation: str) -> Any:
    """A Python, numpy or 0-dim torch number or bool, as sympy's.

    Args:
        value: anything but an `Expr`.
        operation: the operation of which it is an operand, for the error.

    Raises:
        MaskError: the value is no number, or a number that can change.
    """
    if isinstance(value, Elementwise):
        raise value.unfinished()
    value = _scalar(value)
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if not hasattr(value, "__torch_function__"):
        if hasattr(value, "__index__"):
            return sympy.Integer(operator.index(value))
        if hasattr(value, "__float__"):
            if math.isnan(float(value)):
                raise mistake(f"`{operation}` was given NaN", "give it a number")
            whole = operation in ("//", "%") and float(value).is_integer()
            return sympy.Integer(int(value)) if whole else sympy.Float(float(value))
    raise mistake(
        f"`{operation}` was given a {type(value).__module__}.{type(value).__qualname__}",
        "such a function works on its arguments, plain numbers, q_len, kv_len and declared Int, "
        "Float and Tensor parameters: declare what it captures, as a Constant where it never "
        "changes, or take a number out with .item()",
    )


def _scalar(value: Any) -> Any:
    """The number in a tensor or an array without dimensions, unless it is learned."""
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    if getattr(value, "requires_grad", False):
        raise mistake(
            "a tensor that requires a gradient is captured",
            "declare it, as in x = Tensor('x', (1,)), and write x[0], or take .item() of it",
        )
    return value.item()
