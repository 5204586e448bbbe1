"""HopperVisits: which tiles a Gluon kernel of the backward pass visits, as names in its text."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.loops import KeyTiles
from flashgen.symbolic.printer.code import Code


@dataclass(frozen=True)
class HopperVisits:
    """The names shared by two functions: one counts visits, the other finds a visit's tile.

    Attributes:
        tiles: the tiles to visit.
        of: ``"q"`` if the tiles hold queries, ``"kv"`` if they hold keys.
        masks: whether a masked tile evaluates any condition.
        differ: whether some visits are masked and others not: the end of the keys alone masks all
            tiles of queries alike.
    """

    tiles: KeyTiles
    of: str
    masks: bool
    differ: bool

    @property
    def splits(self) -> bool:
        """Whether masked tiles have a separate loop."""
        return self.masks and len(self.tiles.runs) == 1 and not self.tiles.listed

    @property
    def reads(self) -> tuple[str, ...]:
        """Further arguments for finding visits, besides lengths and parameters: lists of tiles."""
        return ("tiles_ptr",) * self.tiles.listed

    @property
    def runs(self) -> tuple[str, ...]:
        """The variables that describe visits: their number, their begin, which need no mask.

        For listed tiles: their number, how many need no mask and come first, if they are separated,
        and the list. If masked tiles come first: the number of masked tiles, the number of those
        before the unmasked ones, and the number of unmasked ones.
        """
        tiles, begin = self.tiles, f"{self.of}_begin"
        if tiles.listed:
            return ("visits", *("unmasked",) * tiles.separated, "listed_ptr")
        if self.splits:
            before = ("before",) * (self.differ and not tiles.from_key_0)
            begins = (begin,) * (not tiles.from_key_0)
            return ("visits", "masked_visits", *before, "unmasked", *begins)
        full = ("full_begin", "full_end") if self.differ else ()
        if tiles.from_key_0:
            return ("visits", *full[1:])
        if len(tiles.runs) == 1:
            return ("visits", begin, *full)
        names = [f"{name}{r.suffix}" for r in tiles.runs for name in (begin, "visits", *full)]
        return ("visits", *names)

    @property
    def count(self) -> str:
        """The number of visits, in terms of the variables of the printed bounds."""
        tiles = self.tiles
        if tiles.from_key_0:
            return f"{self.of}_end"
        if len(tiles.runs) == 1:
            return f"{self.of}_end - {self.of}_begin"
        return f"visits{tiles.runs[-1].suffix}"

    @property
    def bounds(self) -> tuple[Code | None, ...]:
        """The bounds: where visits begin and end, and which tiles need no mask."""
        return (*self.ends, *self._full)

    @property
    def ends(self) -> tuple[Code | None, ...]:
        """The bounds of the visits' begin and end, and the condition under which they fail."""
        if self.tiles.listed:
            return ()
        begins = () if self.tiles.from_key_0 else (run.begin for run in self.tiles.runs)
        ends = (code for run in self.tiles.runs for code in (run.end, run.condition))
        return (*begins, *ends, self.tiles.unordered)

    @property
    def lengths(self) -> tuple[str, ...]:
        """The end of visits where bounds do not hold."""
        given = self.tiles.unordered is not None and not self.tiles.listed
        return (f"{self.of}_len",) * given

    @property
    def _full(self) -> tuple[Code, ...]:
        if not self.differ or self.tiles.listed:
            return ()
        begins = () if self.tiles.from_key_0 else (run.full_begin for run in self.tiles.runs)
        return (*begins, *(run.full_end for run in self.tiles.runs))
