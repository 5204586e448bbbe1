"""What a call of a variant with dropout chooses: how many weights are dropped, and which.

Not every weight has its random number to itself: `flashgen.philox` says how they share them.
"""

from __future__ import annotations

from typing import Any

from flashgen.declared import Param

#: What candidates are ranked and measured with.
TYPICAL_P = 0.1


class DropoutP(Param):
    """The probability that a weight is dropped, from 0 to before 1."""

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
