"""Expressions in messages, in the user's own notation: ``ids[b, kv_idx] != 0``."""

from __future__ import annotations

from typing import Any

from sympy.core.relational import Relational
from sympy.printing.str import StrPrinter

from flashgen.symbols import BitAnd, BitOr, BitXor, FloorDiv, FloorMod, ShiftLeft, ShiftRight

#: The nodes that are printed in parentheses.
_CLOSED = BitAnd | BitOr | BitXor | ShiftLeft | ShiftRight
_COMPARED = {"Eq": "==", "Ne": "!="}


class _Shown(StrPrinter):  # type: ignore[misc]
    """sympy's own text, except for operations for which sympy has no operator."""

    def parenthesize(self, item: Any, level: int, strict: bool = False) -> str:
        """Quotients bind like products, which sympy does not know."""
        if isinstance(item, FloorDiv | FloorMod):
            return f"({self._print(item)})"
        return str(super().parenthesize(item, level, strict))

    def _as_ordered_terms(self, expr: Any, order: Any = None) -> list[Any]:
        terms = super()._as_ordered_terms(expr, order=order)
        return sorted(terms, key=lambda term: bool(term.as_coeff_Mul()[0] < 0))

    def _operands(self, symbol: str, operands: Any) -> str:
        texts = [self._print(x) if x.is_Atom or _is_call(x) else _closed(self._print(x))
                 for x in operands]  # fmt: skip
        return f" {symbol} ".join(texts)

    def _print_Load(self, expr: Any) -> str:
        tensor, *indices = map(self._print, expr.args)
        return f"{tensor}[{', '.join(indices)}]"

    def _print_FloorDiv(self, expr: Any) -> str:
        return self._operands("//", expr.args)

    def _print_FloorMod(self, expr: Any) -> str:
        return self._operands("%", expr.args)

    def _print_BitAnd(self, expr: Any) -> str:
        return f"({self._operands('&', expr.args)})"

    def _print_BitOr(self, expr: Any) -> str:
        return f"({self._operands('|', expr.args)})"

    def _print_BitXor(self, expr: Any) -> str:
        return f"({self._operands('^', expr.args)})"

    def _print_ShiftLeft(self, expr: Any) -> str:
        return f"({self._operands('<<', expr.args)})"

    def _print_ShiftRight(self, expr: Any) -> str:
        return f"({self._operands('>>', expr.args)})"

    def _print_Truncate(self, expr: Any) -> str:
        return f"int({self._print(expr.args[0])})"

    def _print_Floor(self, expr: Any) -> str:
        return f"floor({self._print(expr.args[0])})"

    def _print_Abs(self, expr: Any) -> str:
        return f"abs({self._print(expr.args[0])})"

    def _print_Relational(self, expr: Any) -> str:
        symbol = _COMPARED.get(type(expr).__name__) or expr.rel_op
        left, right = (
            _closed(self._print(side)) if isinstance(side, Relational) else self._print(side)
            for side in (expr.lhs, expr.rhs)
        )
        return f"{left} {symbol} {right}"

    def _print_And(self, expr: Any) -> str:
        return self._operands("&", sorted(expr.args, key=_rank))

    def _print_Or(self, expr: Any) -> str:
        return self._operands("|", sorted(expr.args, key=_rank))

    def _print_Not(self, expr: Any) -> str:
        return f"~({self._print(expr.args[0])})"

    def _print_Piecewise(self, expr: Any) -> str:
        *branches, (otherwise, _) = expr.args
        text = str(self._print(otherwise))
        for value, when in reversed(branches):
            text = f"where({self._print(when)}, {self._print(value)}, {text})"
        return text


def _is_call(expr: Any) -> bool:
    """Whether text needs no parentheses: ``ids[b, kv_idx]``, ``(a & b)``, ``abs(x)``."""
    return bool(expr.is_Function) and not isinstance(expr, FloorDiv | FloorMod)


def _closed(text: str) -> str:
    return f"({text})"


def _rank(condition: Any) -> tuple[int, str]:
    return (condition.count_ops(), str(condition))


def shown(expr: Any) -> str:
    """``expr`` for a message."""
    text = str(_Shown({"full_prec": False}).doprint(expr))
    return text[1:-1] if isinstance(expr, _CLOSED) else text
