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

#: What an argument may be called, flashgen's own names first, then those of FlexAttention.
_SPELLINGS = {"score": "score", "b": "b", "h": "h", "q_idx": "q_idx", "kv_idx": "kv_idx"}
_SPELLINGS |= {"batch": "b", "head": "h", "token_q": "q_idx", "token_kv": "kv_idx"}


def called(kind: str, label: str) -> str:
    """What a message calls a mask or a score: a lambda's label is its kind alone."""
    return kind if label == kind else f"{kind} {label}"


def traced_call(function: Callable[..., Any], symbols: tuple[Any, ...], label: str) -> Any:
    """What the function returns for symbols: an `Expr`, or whatever it is.

    It is called twice, to see that it returns the same.

    Args:
        function: the user's.
        symbols: sympy symbols, one an argument.
        label: what to call the function where none of its lines is at fault, ``"mask near"``.

    Raises:
        MaskError: it fails on symbols, or returns another expression the second time.
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
    """Raises MaskError where an argument is called what another one is: they go by position.

    Args:
        function: the user's.
        symbols: what it is called with.
        label: what to call the function, ``"mask near"``.
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
    """Whether it is one of flashgen's own, as `causal` is, which return masks and scores."""
    module, name = (getattr(function, at, "") for at in ("__module__", "__qualname__"))
    return module.startswith("flashgen.") and name.isidentifier()
