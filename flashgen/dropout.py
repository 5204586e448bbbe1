"""The arguments of a call with dropout: the share of weights that it drops, and the seed.

Weights share random numbers: see `flashgen.philox`.
"""

from __future__ import annotations

from typing import Any

from flashgen.declared import Param

#: The probability with which candidates are ranked and measured.
TYPICAL_P = 0.1


class DropoutP(Param):
    """The probability that a weight is dropped, at least 0 and below 1."""

    __slots__ = ()

    name = "dropout_p"
    default = 0.0
    doc = ""

    @property
    def declaration(self) -> tuple[Any, ...]:
        """What makes two declarations the same parameter."""
        return ("DropoutP",)


class Seed(Param):
    """The seed that decides which weights are dropped: an int64 tensor of one element, or an int.

    Without one, a call draws it from the default generator of q's device.
    """

    __slots__ = ()

    name = "seed"
    default = None
    doc = ""

    @property
    def declaration(self) -> tuple[Any, ...]:
        """What makes two declarations the same parameter."""
        return ("Seed",)


#: Both, in the order that `attention` takes them.
DROPOUT: tuple[Param, ...] = (DropoutP(), Seed())
