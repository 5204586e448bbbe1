"""split_space: configurations of a backward pass in Gluon, in one kernel or two."""

from __future__ import annotations

from flashgen.config import HOPPER
from flashgen.kernels.backward_hopper.space import hopper_backward_space
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.shared_memory import worst_queries_usage
from flashgen.kernels.base import Space


def split_space(names: HopperBackwardSplit) -> Space:
    """The candidates of the kernel over tiles of keys; none where its pass has no such kernels.

    The Gluon kernel over tiles of queries has one configuration, which has to fit as well.
    """
    beside = ""
    if not names.why_not and names.both_in_gluon:
        beside = worst_queries_usage(names).shortage(HOPPER)
    return hopper_backward_space(names, beside)
