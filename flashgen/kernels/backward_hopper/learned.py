"""HopperLearned: the gradients of learned tensors that the kernel over tiles of keys computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashgen.kernels.backward_hopper.split import HopperSplit
from flashgen.plan.dtypes import ITEMSIZES
from flashgen.plan.score_gradient import InputGradient, Over
from flashgen.symbolic.printer.code import Code


@dataclass(frozen=True)
class HopperLearned(HopperSplit):
    """What is learned, by where it is summed up: in registers, in memory, or for each pair."""

    @property
    def learned(self) -> tuple[str, ...]:
        """The parameters of the kernel for gradients of learned tensors, in their order."""
        of_items = (
            f"{item.variable}_{'desc' if item in self.pairs else 'ptr'}"
            for item in self.text.input_gradients
        )
        of_keys = (f"{self.learned_of_k}_ptr",) if self.learned_of_k else ()
        return (*of_items, *of_keys)

    @property
    def learned_of_q(self) -> str:
        """The sums that products of queries' features and gradients belong to; ``""`` for none."""
        return self._learned_of("rows")

    @property
    def learned_of_k(self) -> str:
        """The same of keys."""
        return self._learned_of("columns")

    def _learned_of(self, over: Over) -> str:
        return next((x.variable for x in self.backward.by_features if x.over == over), "")

    @property
    def tiled_itemsize(self) -> int:
        """Bytes of an element of the tensor whose tiles the producer loads, as it is declared."""
        of = {x.name: x.dtype for x in self.backward.plan.arguments if x.kind == "tensor"}
        return ITEMSIZES[of[self.tiled]]

    @property
    def pair_descriptors(self) -> tuple[str, ...]:
        """The parameters that are descriptors: of gradients of pairs."""
        return tuple(f"{item.variable}_desc" for item in self.pairs)

    @cached_property
    def partials(self) -> tuple[InputGradient, ...]:
        """Input gradients by derivatives that read products, and are computed with the score."""
        text = self.text
        return tuple(x for x in text.input_gradients if text.is_of_products(x.partial))

    @cached_property
    def lane_sums(self) -> tuple[InputGradient, ...]:
        """Input gradients with a sum for each key, in registers: of heads, or of keys."""
        return tuple(x for x in self.text.input_gradients if x.over in ("heads", "columns"))

    @property
    def distance_sums(self) -> tuple[InputGradient, ...]:
        """Input gradients with a sum for each distance, in memory."""
        return self.text.diagonals

    @property
    def pairs(self) -> tuple[InputGradient, ...]:
        """Input gradients with an element for each pair, which are stored."""
        return tuple(x for x in self.text.input_gradients if x.over == "elements")

    @property
    def distances_read(self) -> bool:
        """Whether the kernel goes along diagonals."""
        return bool(self.distance_sums or self.text.code.distances)

    @property
    def input_partials(self) -> tuple[Code | None, ...]:
        """Derivatives that are computed where they are used."""
        items = self.text.input_gradients
        return tuple(item.partial for item in items if item not in self.partials)
