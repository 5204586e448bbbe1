"""BackwardCode: the text of one kernel of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.plan.code import KernelCode
from flashgen.plan.learned import ElementSlope
from flashgen.plan.text import mentioned
from flashgen.symbolic.placement import Assignment

#: What a tile of queries changes: such lines stand inside the loop over them.
_OF_QUERIES = ("q_first", "q_idx")


@dataclass(frozen=True)
class BackwardCode:
    """The text of one kernel.

    Attributes:
        code: mask and score.
        slope: the derivative of the score by the scaled product, for each element; ``""`` where it
            is the same for all.
        guarded: whether slopes may be infinite, or no number, of pairs that are hidden.
        learned: what it adds to gradients of tensors.
    """

    code: KernelCode
    slope: str
    guarded: bool
    learned: tuple[ElementSlope, ...] = ()

    @property
    def diagonals(self) -> tuple[ElementSlope, ...]:
        """What is learned by distance: its gradients are summed up along diagonals."""
        return tuple(item for item in self.learned if item.over == "diagonals")

    @property
    def slope_of_products(self) -> bool:
        """Whether slopes of elements depend on the products, which may be no numbers."""
        return bool(mentioned(["scores", *(a.name for a in self.code.elements)], [self.slope]))

    def reads(self, name: str) -> bool:
        """Whether a variable of the kernel is mentioned."""
        code = self.code
        lines = (*code.scalars, *code.rows, *code.columns, *code.elements, *code.masked)
        texts = [*(line.code for line in lines), code.score, *code.conditions, self.slope]
        texts += [text for table in code.tables for text in vars(table).values()]
        texts += code.promise.conditions if code.promise is not None else ()
        texts += [text for item in self.learned for text in (*item.indices, item.slope)]
        return bool(mentioned([name], texts))

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
            if mentioned((*_OF_QUERIES, *moving), [line.code]):
                moving.add(line.name)
        return frozenset(moving)


def _lines(code: KernelCode) -> tuple[Assignment, ...]:
    return (*code.scalars, *code.rows, *code.columns, *code.masked)
