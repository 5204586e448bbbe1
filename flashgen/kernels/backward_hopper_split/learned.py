"""LearnedOfQueries: what the Gluon kernel over tiles of queries sums for learned tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.plan.backward_code import BackwardCode
from flashgen.plan.score_gradient import InputGradient
from flashgen.symbolic.printer.code import Code, read_by

#: Distances of a block: a warp has one in each lane.
BLOCK = 32

#: What identifies a pair, in the kernel's names.
_PAIR = frozenset({"batch", "head", "q_idx", "kv_idx"})


@dataclass(frozen=True)
class LearnedOfQueries:
    """The sums, by where they are kept.

    Attributes:
        text: the kernel's code.
        width: columns that the kernel is written for.
    """

    text: BackwardCode
    width: int

    def __bool__(self) -> bool:
        return bool(self.text.input_gradients)

    @cached_property
    def rows(self) -> tuple[InputGradient, ...]:
        """Those with a sum for each query, in registers: of elements of a head, or of a query."""
        return tuple(x for x in self.text.input_gradients if x.over in ("heads", "rows"))

    @cached_property
    def diagonals(self) -> tuple[InputGradient, ...]:
        """Those with a sum for each distance of 64 queries, in memory."""
        return self.text.diagonals

    @cached_property
    def elements(self) -> tuple[InputGradient, ...]:
        """Those whose elements are found pair by pair, where registers have the pairs."""
        items = self.text.input_gradients
        return tuple(x for x in items if x.over == "elements" and x not in self.stored)

    @cached_property
    def stored(self) -> tuple[InputGradient, ...]:
        """Those with an element for each pair, whose rows are stored by way of shared memory.

        With 256 columns there is no room.
        """
        items = self.text.input_gradients if self.width < 256 else ()
        return tuple(x for x in items if x.once and read_by(x.indices) <= _PAIR)

    @cached_property
    def calls(self) -> tuple[tuple[int, bool], ...]:
        """For both, the dimension count, and `once`."""
        items = (*self.elements, *self.stored)
        return tuple(sorted({(len(x.indices), x.once) for x in items}))

    @cached_property
    def partials(self) -> tuple[InputGradient, ...]:
        """Those whose derivative reads the products, and is computed with the score."""
        return tuple(x for x in self.text.input_gradients if "scores" in read_by((x.partial,)))

    @cached_property
    def codes(self) -> tuple[Code | None, ...]:
        """The other derivatives, and indices: what registers' pairs need to add to the sums."""
        items = self.text.input_gradients
        partials = (x.partial for x in items if x not in self.partials)
        return (*partials, *(index for x in items if x not in self.stored for index in x.indices))

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """What this code reads of the lines that are assigned with the score."""
        code = self.text.code
        read = read_by(self.codes)
        names = (line.name for line in (*code.columns, *code.elements))
        return tuple(name for name in names if name in read)

    @property
    def made(self) -> tuple[str, ...]:
        """What is computed with the score, by name."""
        return (*self.lines, *(f"partial_of_{x.variable}" for x in self.partials))

    @property
    def of_products(self) -> bool:
        """Whether a derivative depends on the products, which may be NaN."""
        return any(self.text.is_of_products(x.partial) for x in self.text.input_gradients)

    @property
    def pointers(self) -> tuple[str, ...]:
        """The memory of the sums."""
        return tuple(f"{x.variable}_ptr" for x in self.text.input_gradients)

    def blocks_at_once(self, block_n: int) -> int:
        """Blocks of sums along diagonals that shared memory holds of each warp.

        All of a tile's, a power of two, where there is room; with 256 columns there is little.
        """
        return 2 if self.width == 256 else 2 * block_n // BLOCK
