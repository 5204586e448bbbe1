"""HopperBackwardSplit: variables of the Gluon templates of a split backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.backward_hopper_split.queries import HopperQueries


@dataclass(frozen=True)
class HopperBackwardSplit(HopperBackward):
    """The kernel over tiles of keys, and the kernel over tiles of queries beside it.

    Attributes:
        backward: the backward pass.
    """

    @property
    def of_queries(self) -> HopperQueries:
        """The Gluon kernel over tiles of queries."""
        return HopperQueries(self.backward, self.width, self.segmented, self.queries_learn)
