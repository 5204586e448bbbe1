"""packed: the shared memory of a block of a Gluon kernel, whose buffers are always alive.

Triton places such buffers one behind the other, the largest first, each where its alignment allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.budget.buffers import round_up
from flashgen.budget.targets import get_target
from flashgen.budget.usage import SramUsage
from flashgen.config import HOPPER
from flashgen.symbols import evaluate


@dataclass(frozen=True)
class Buffer:
    """A place in shared memory.

    Attributes:
        part: the part of `SramUsage` that counts it.
        size: its bytes.
        alignment: its start is a multiple of this.
    """

    part: str
    size: Any
    alignment: int = 16


def packed(
    tiles: Iterable[Buffer],
    others: Iterable[Buffer],
    end: Iterable[Buffer],
    values: Mapping[str, int],
) -> SramUsage:
    """The shared memory of a block on Hopper.

    Args:
        tiles: the largest buffers, whose sizes are multiples of any alignment: any order will do.
        others: the small buffers, in the kernel's order: of two of equal size the first comes
            first.
        end: the buffers behind all of these.
        values: the number behind every symbol of sizes.
    """
    small = sorted(others, key=lambda buffer: -evaluate(buffer.size, values))
    total: Any = sympy.Integer(0)
    parts: dict[str, Any] = {}
    formulas: dict[str, Any] = {}
    for buffer in (*tiles, *small, *end):
        begin, total = total, round_up(total, buffer.alignment) + buffer.size
        parts[buffer.part] = parts.get(buffer.part, 0) + total - begin
        formulas[buffer.part] = formulas.get(buffer.part, 0) + buffer.size
    return SramUsage(
        total=evaluate(total, values),
        parts=tuple((name, evaluate(size, values)) for name, size in parts.items()),
        phase="loop",
        limit=get_target(HOPPER).max_shared,
        formula=total,
        formulas=tuple(formulas.items()),
    )
