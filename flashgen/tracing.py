"""Calls a user's function once, with symbols."""

from __future__ import annotations

from collections.abc import Callable
from traceback import extract_tb
from typing import Any

import sympy

from flashgen.errors import FlashgenError, MaskError
from flashgen.expr import Expr, bound
from flashgen.user_code import users_line


def called(kind: str, label: str) -> str:
    """What a message calls a mask or a score: a lambda's label is its kind alone."""
    return kind if label == kind else f"{kind} {label}"


def traced_call(function: Callable[..., Any], symbols: tuple[Any, ...], label: str) -> Any:
    """What the function returns for symbols: an `Expr`, or whatever it is.

    Args:
        function: the user's.
        symbols: sympy symbols, one an argument.
        label: what to call the function where none of its lines is at fault, ``"mask near"``.

    Raises:
        MaskError: it fails on symbols.
    """
    kind, _, _ = label.partition(" ")
    arguments = ", ".join(symbol.name for symbol in symbols)
    try:
        with bound(None):
            result = function(*map(Expr, symbols))
    except FlashgenError:
        raise
    except Exception as error:
        where = users_line(extract_tb(error.__traceback__)) or label
        remedy = f"a {kind} is a function ({arguments}) of symbols"
        if _makes_one(function):
            remedy = f"call it, as {function.__name__}(...): what it returns is the {kind}"
        raise MaskError(f"{where}: {type(error).__name__}: {error}; {remedy}") from error
    if isinstance(result, bool):
        return Expr(sympy.true if result else sympy.false)
    if isinstance(result, int | float):
        return Expr(sympy.sympify(result))
    return result


def _makes_one(function: Callable[..., Any]) -> bool:
    """Whether it is one of flashgen's own, as `causal` is, which return masks and scores."""
    module, name = (getattr(function, at, "") for at in ("__module__", "__qualname__"))
    return module.startswith("flashgen.") and name.isidentifier()
