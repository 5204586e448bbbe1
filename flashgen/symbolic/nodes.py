"""Further nodes of kernels' expressions: column bitmasks, and tiles of one value.

Bit i of number j says whether column 8 * i + j is visible: see `column_bitmask`.
"""

from __future__ import annotations

import sympy


class _OfTile(sympy.Function):  # type: ignore[misc]
    """A node that is not a number, whatever its arguments are."""

    is_number = False


class Spread(_OfTile):
    """A score that does not depend on the products, for each element of a tile."""

    nargs = 1


class AsBits(_OfTile):
    """The bits of a condition that all columns share."""

    nargs = 1


class AtLeast(_OfTile):
    """The bits of a column's position being at least a value that all columns share."""

    nargs = 2


class Below(_OfTile):
    """The bits of a column's position being below a value that all columns share."""

    nargs = 2


class BothBits(_OfTile):
    """The bits that are set in all arguments."""


class EitherBits(_OfTile):
    """The bits that are set in any argument."""


class OtherBits(_OfTile):
    """The bits that are not set in the argument."""

    nargs = 1
