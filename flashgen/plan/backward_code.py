"""BackwardCode: the code of one kernel of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.plan.code import KernelCode, codes_of
from flashgen.plan.score_gradient import InputGradient
from flashgen.symbolic.hoisting import Assignment
from flashgen.symbolic.printer.code import Code, read_by

#: What a tile of queries changes: such lines stand inside the loop over them.
_OF_QUERIES = ("q_first", "q_idx")


@dataclass(frozen=True)
class BackwardCode:
    """The code of one kernel.

    Attributes:
        code: mask and score.
        score_gradient: the derivative of the score by the scaled product, for each element; None
            where it is the same for all.
        guarded: whether derivatives of hidden pairs may be infinite or NaN.
        input_gradients: the input gradients that it sums.
    """

    code: KernelCode
    score_gradient: Code | None
    guarded: bool
    input_gradients: tuple[InputGradient, ...] = ()

    @property
    def diagonals(self) -> tuple[InputGradient, ...]:
        """Input gradients by distance: they are summed up along diagonals."""
        return tuple(item for item in self.input_gradients if item.over == "diagonals")

    @property
    def gradient_of_products(self) -> bool:
        """Whether derivatives of elements depend on the products, which may be NaN."""
        return self.is_of_products(self.score_gradient)

    def is_of_products(self, derivative: Code | None) -> bool:
        """Whether a derivative depends on the products."""
        elements = {line.name for line in self.code.elements}
        return not read_by((derivative,)).isdisjoint({"scores", *elements})

    def reads(self, name: str) -> bool:
        """Whether a variable of the kernel is read."""
        return name in self._read

    @cached_property
    def _read(self) -> frozenset[str]:
        code = self.code
        places = (code.scalars, code.rows, code.columns, code.elements, code.distances, code.masked)
        lines = codes_of(*places)
        read = [*lines, code.score, *code.conditions, self.score_gradient]
        read += [found for table in code.tables for found in table.codes]
        read += code.promise.conditions if code.promise is not None else ()
        read += [found for item in self.input_gradients for found in (*item.indices, item.partial)]
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
