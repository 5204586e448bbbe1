"""Range: how large a softmax's weights may become before a row gets another reference."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The range of a softmax's weights, in powers of 2.

    Attributes:
        first: the largest weight of a row's first tile of keys.
        raise_above: the sum of a row's weights above which its reference is raised.
        most: the largest sum in range: above it, the tile of queries is computed again.
        usual: a sum after its reference has been raised.
        alone: how much larger than all others together a key's weight is that counts as a row's
            only one; for ranges that let weights grow past the reference.
        steep: the spread of the scores in a row's first tile from which every step takes new
            maxima. At half of that, and after tiles that hide keys, the next step does.
        look: steps before the first check of the sums.
        last_grows: whether the last step takes new maxima. It sees the first keys, often the ones
            that all rows attend to, for which little range is left.
    """

    first: int
    raise_above: int
    most: int
    usual: int
    steep: int
    look: int
    alone: int = 0
    last_grows: bool = False


#: bfloat16 has the exponents of float32: later weights may be 2^152 times as large as the first
#: ones, with values up to 2^38, or 2^-62 times as large. float16 ends at 2^16, and loses digits
#: below 2^-14. A key that outweighs the others by 2^12 has their sum's digits in bfloat16, but for
#: one row of thirty.
RANGES = {
    "bfloat16": Range(first=-64, raise_above=-40, most=88, usual=-56, steep=150, look=16, alone=12),
    "float16": Range(first=0, raise_above=10, most=15, usual=8, steep=22, look=8, last_grows=True),
}
