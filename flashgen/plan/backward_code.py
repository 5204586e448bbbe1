"""BackwardCode: what one kernel of the backward pass computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.plan.code import KernelCode, codes_of
from flashgen.plan.learned import ElementSlope
from flashgen.symbolic.hoisting import Assignment
from flashgen.symbolic.printer.code import Code, read_by

#: What a tile of queries changes: such lines stand inside the loop over them.
_OF_QUERIES = ("q_first", "q_idx")


@dataclass(frozen=True)
class BackwardCode:
    """What one kernel computes.

    Attributes:
        code: mask and score.
        slope: the derivative of the score by the scaled product, for each element; None where it
            is the same for all.
        guarded: whether slopes may be infinite, or no number, of pairs that are hidden.
        learned: what it adds to gradients of tensors.
    """

    code: KernelCode
    slope: Code | None
    guarded: bool
    learned: tuple[ElementSlope, ...] = ()

    @property
    def diagonals(self) -> tuple[ElementSlope, ...]:
        """What is learned by distance: its gradients are summed up along diagonals."""
        return tuple(item for item in self.learned if item.over == "diagonals")

    @property
    def slope_of_products(self) -> bool:
        """Whether slopes of elements depend on the products, which may be no numbers."""
        return self.is_of_products(self.slope)

    def is_of_products(self, slope: Code | None) -> bool:
        """Whether a slope does."""
        elements = {line.name for line in self.code.elements}
        return not read_by((slope,)).isdisjoint({"scores", *elements})

    def reads(self, name: str) -> bool:
        """Whether a variable of the kernel is read."""
        return name in self._read

    @cached_property
    def _read(self) -> frozenset[str]:
        code = self.code
        lines = codes_of(code.scalars, code.rows, code.columns, code.elements, code.masked)
        read = [*lines, code.score, *code.conditions, self.slope]
        read += [found for table in code.tables for found in table.codes]
        read += code.promise.conditions if code.promise is not None else ()
        read += [found for item in self.learned for found in (*item.indices, item.slope)]
        return read_by(read)

    @cached_property
    def lines_of_head(self) -> tuple[Assignment, ...]:
        """Assignments of a kernel over tiles of keys that are made once for a head."""
        return tuple(a for a in _lines(self.code) if a.name not in self._moving_lines)

    @cached_property
    def lines_of_tile(self) -> tuple[Assignment, ...]:
        """Assignments of a kernel over tiles of keys that are made for each tile of queries."""
        return tuple(a for a in _lines(self.code) if a.name in self._moving_lines)

    @cached_property
    def _moving_lines(self) -> frozenset[str]:
        moving: set[str] = set()
        for line in _lines(self.code):
            if not line.code.names.isdisjoint({*_OF_QUERIES, *moving}):
                moving.add(line.name)
        return frozenset(moving)


def _lines(code: KernelCode) -> tuple[Assignment, ...]:
    return (*code.scalars, *code.rows, *code.columns, *code.masked)
