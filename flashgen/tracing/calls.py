"""Calls a user's function with symbols."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from traceback import extract_tb
from typing import Any

import sympy

from flashgen.errors import FlashgenError, MaskError
from flashgen.tracing.expr import Expr, bound
from flashgen.tracing.rows import Elementwise
from flashgen.tracing.user_code import users_line

#: The allowed names of each argument, flashgen's own first, then FlexAttention's.
_SPELLINGS = {"score": "score", "b": "b", "h": "h", "q_idx": "q_idx", "kv_idx": "kv_idx"}
_SPELLINGS |= {"batch": "b", "head": "h", "token_q": "q_idx", "token_kv": "kv_idx"}


def called(kind: str, label: str) -> str:
    """The name of a mask or a score in messages: a lambda's is its kind alone."""
    return kind if label == kind else f"{kind} {label}"


def traced_call(function: Callable[..., Any], symbols: tuple[Any, ...], label: str) -> Any:
    """The result of the function for symbols: an `Expr`, or any other value.

    The function is called twice, to check that both results are the same.

    Args:
        function: the user's.
        symbols: sympy symbols, one an argument.
        label: the function's name in errors without a line of it, ``"mask near"``.

    Raises:
        MaskError: the function fails on symbols, or its second call returns another expression.
    """
    kind, _, _ = label.partition(" ")
    arguments = ", ".join(symbol.name for symbol in symbols)
    check_order(function, symbols, label)
    try:
        with bound(None):
            result, again = (function(*map(Expr, symbols)) for _ in range(2))
    except FlashgenError:
        raise
    except Exception as error:
        where = users_line(extract_tb(error.__traceback__)) or label
        remedy = f"a {kind} is a function ({arguments}) of symbols"
        if _makes_one(function):
            remedy = f"call it, as {function.__name__}(...): what it returns is the {kind}"
        for owner, attribute in (("Mask", "mask_mod"), ("Score", "score_mod")):
            if str(error) == f"'{owner}' object is not callable":
                remedy = f"call its .{attribute}, or join it to others outside of the function"
        raise MaskError(f"{where}: {type(error).__name__}: {error}; {remedy}") from error
    if isinstance(result, Elementwise):
        raise MaskError(
            f"{label} returned {len(result)} values, {result}; "
            "join them by .any(), .all() or .sum()"
        )
    if getattr(result, "sym", result) != getattr(again, "sym", again):
        shown = " and then ".join(f"`{x}`" for x in (result, again))
        raise MaskError(
            f"{label} returned {shown} for the same arguments; a kernel holds one of them: draw "
            "what is random beforehand, and declare it as a Tensor or a Constant"
        )
    if isinstance(result, bool):
        return Expr(sympy.true if result else sympy.false)
    if isinstance(result, int | float):
        return Expr(sympy.sympify(result))
    return result


def check_order(function: Callable[..., Any], symbols: tuple[Any, ...], label: str) -> None:
    """Raises MaskError if an argument has the name of another one: arguments go by position.

    Args:
        function: the user's.
        symbols: the arguments of the call.
        label: the function's name in errors, ``"mask near"``.
    """
    try:
        given = signature(function, follow_wrapped=False).bind(*symbols).arguments
    except (TypeError, ValueError):
        return  # it has no signature, or a call fails and says why
    for name, symbol in given.items():
        if name in _SPELLINGS and symbol in symbols and symbol.name != _SPELLINGS[name]:
            raise MaskError(
                f"{label} takes ({', '.join(given)}), and its argument `{name}` would be "
                f"{symbol.name}; name them in the order "
                f"({', '.join(symbol.name for symbol in symbols)})"
            )


def _makes_one(function: Callable[..., Any]) -> bool:
    """Whether a function is one of flashgen's that return masks or scores, such as `causal`."""
    module, name = (getattr(function, at, "") for at in ("__module__", "__qualname__"))
    return module.startswith("flashgen.") and name.isidentifier()
