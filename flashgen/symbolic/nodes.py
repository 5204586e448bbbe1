"""Nodes of kernels' expressions besides a user's own: column bitmasks, tiles of one value.

Bit i of a number for j says whether column 8 * i + j is seen: see `column_bitmask`.
"""

from __future__ import annotations

import sympy


class _OfTile(sympy.Function):  # type: ignore[misc]
    """What is no number, whatever it is made of."""

    is_number = False


class Spread(_OfTile):
    """A score that is not of the products, for each element of a tile."""

    nargs = 1


class AsBits(_OfTile):
    """The bits of a condition that all columns share."""

    nargs = 1


class AtLeast(_OfTile):
    """The bits of a column's position being at least something that all columns share."""

    nargs = 2


class Below(_OfTile):
    """The bits of its being below that."""

    nargs = 2


class BothBits(_OfTile):
    """The bits of what is seen by all."""


class EitherBits(_OfTile):
    """The bits of what is seen by any."""


class OtherBits(_OfTile):
    """The bits of what is not seen."""

    nargs = 1
