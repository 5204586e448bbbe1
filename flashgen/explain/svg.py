"""svg: a picture of tiles as a file of its own, legible on light and dark pages."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from flashgen.errors import FlashgenError
from flashgen.explain.account import Account
from flashgen.explain.picture import KINDS, Picture
from flashgen.files import write_atomically

#: Colours that show on a white page and on a black one, by name of `KINDS`.
COLOURS: Mapping[str, str] = {
    "skipped": "#8883",
    "masked": "#e8a33d",
    "for nothing": "#d9655f",
    "unmasked": "#4aa3df",
}

# The side of a cell, in units of so many pixels; less if there are many cells.
_CELL, _PIXELS, _MOST_PIXELS = 8, 4, 640

#: The most cells of a file, each way.
MOST_CELLS = 64

_MARGIN, _FONT, _LINE, _LETTERS = 7.0, 4.2, 0.2, 2.0


def svg(
    shown: Picture,
    title: str,
    seen: Sequence[Sequence[bool]] | None = None,
    *,
    head: str = 'xmlns="http://www.w3.org/2000/svg"',
) -> str:
    """The picture as text of an SVG file.

    Args:
        shown: the tiles.
        title: escaped for XML.
        seen: (q_len, kv_len), whether a query sees a key, to darken; None shows tiles alone.
        head: the first attributes: a file needs the namespace, a part of a page does not.
    """
    down, across = _CELL / shown.block_m, _CELL / shown.block_n
    height, width = shown.q_len * down, shown.kv_len * across
    pixels = min(_PIXELS, _MOST_PIXELS / max(height, width))
    size = _PIXELS / pixels  # for letters and margins, whose size is fixed
    left = _MARGIN * size
    full = [width + left + size, height + left + size]
    w, h, margin = (f"{x:g}" for x in (*full, -left))
    lines = [
        f'<svg {head} width="{pixels * full[0]:g}" '
        f'height="{pixels * full[1]:g}" viewBox="{margin} {margin} {w} {h}" '
        f'font-family="sans-serif" font-size="{_FONT * size:g}" fill="#888">',
        f"<title>{title}</title>",
        f'<text x="0" y="{-_LETTERS * size:g}">keys</text>',
        f'<text transform="translate({-_LETTERS * size:g} 0) rotate(-90)" '
        'text-anchor="end">queries</text>',
    ]
    for kind, name in KINDS.items():
        outline = "".join(
            _rectangle(x, y, min(_CELL * n, width - x), min(_CELL, height - y))
            for x, y, n in _runs([[cell == kind for cell in row] for row in shown.rows], _CELL)
        )
        if outline:
            lines.append(f'<path fill="{COLOURS[name]}" d="{outline}"/>')
    if seen is not None:
        outline = "".join(
            _rectangle(x * across, y * down, n * across, down) for x, y, n in _runs(seen, 1)
        )
        if outline:
            lines.append(f'<path fill="#000" fill-opacity=".45" d="{outline}"/>')
    rows, columns = (_edges(length, _CELL) for length in (height, width))
    grid = "".join(
        [f"M0 {y:g}h{width:g}" for y in rows] + [f"M{x:g} 0v{height:g}" for x in columns]
    )
    thin = f"{_LINE * size:g}".removeprefix("0")
    lines.append(f'<path stroke="#888" stroke-width="{thin}" d="{grid}"/>')
    return "\n".join([*lines, "</svg>", ""])


def write_svg(path: Path, accounts: Sequence[Account]) -> None:
    """Writes the picture of the mask of the only account.

    Raises:
        FlashgenError: there are several.
        OutputError: the file cannot be written.
    """
    content = svg_of(the_one("--svg", path, accounts))
    write_atomically(path, content, "choose another place with --svg")


def the_one(option: str, path: Path, accounts: Sequence[Account]) -> Account:
    """The only account.

    Raises:
        FlashgenError: there are several.
    """
    if len(accounts) != 1:
        names = ", ".join(account.variant for account in accounts)
        raise FlashgenError(
            f"{option}={path}: a picture is of one variant, and there are {names}; "
            "name a file that declares one"
        )
    return accounts[0]


def svg_of(account: Account) -> str:
    """The picture of the account's mask as text of an SVG file."""
    mask = account.mask
    title = html.escape(mask.label, quote=False)
    return svg(mask.picture.scaled(MOST_CELLS, MOST_CELLS), title)


def _edges(length: float, step: int) -> list[float]:
    """0, then a line at every step, and the end."""
    return [*(step * i for i in range(-int(-length // step))), length]


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z"


def _runs(rows: Sequence[Sequence[bool]], side: int) -> Iterator[tuple[int, int, int]]:
    """First column and row, times the side, and the number of cells of each run of set cells."""
    for y, row in enumerate(rows):
        x = 0
        for is_set, cells in groupby(row):
            width = len(list(cells))
            if is_set:
                yield x * side, y * side, width
            x += width
