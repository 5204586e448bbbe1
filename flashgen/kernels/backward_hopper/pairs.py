"""A tensor with an element for each pair, in tiles that the producer loads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import sympy

from flashgen.plan.backward_code import BackwardCode
from flashgen.symbolic.hoisting import Assignment
from flashgen.symbolic.printer.code import Code
from flashgen.symbols import KV_IDX, Q_IDX, B, H, Load


def variable_of(tensor: str) -> str:
    """The kernel's variable that holds a tile of the tensor, with keys as rows."""
    return f"tile_of_{tensor}"


def with_tile(text: BackwardCode, tensor: str) -> BackwardCode:
    """The same code, which reads elements of the tensor, where pairs' own, from a tile."""
    element = Load(sympy.Symbol(tensor, real=True), B, H, Q_IDX, KV_IDX)
    held = {element: sympy.Symbol(variable_of(tensor), real=True)}
    code = replace(
        text.code,
        elements=_lines(text.code.elements, held),
        score=_code(text.code.score, held),
    )
    gradients = (replace(x, partial=_code(x.partial, held)) for x in text.input_gradients)
    return replace(
        text,
        code=code,
        score_gradient=_code(text.score_gradient, held),
        input_gradients=tuple(gradients),
    )


def _lines(lines: Iterable[Assignment], held: dict[Any, Any]) -> tuple[Assignment, ...]:
    return tuple(
        replace(line, code=replace(line.code, expr=line.code.expr.xreplace(held))) for line in lines
    )


def _code(code: Code | None, held: dict[Any, Any]) -> Code | None:
    return code and replace(code, expr=code.expr.xreplace(held))
