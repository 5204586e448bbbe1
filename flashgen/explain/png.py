"""png: the picture of a mask in pixels, for viewers without SVG, with Python's own zlib."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from flashgen.explain.account import Account
from flashgen.explain.letters import HEIGHT, written
from flashgen.explain.picture import KINDS, Picture
from flashgen.explain.svg import COLOURS, MOST_CELLS, the_one
from flashgen.files import write_atomically

# The most pixels of a cell each way, and of all cells; a cell has at least one pixel.
_MOST_OF_A_CELL, _MOST = 32, 640

#: Pixels of a letter's pixel, and of the gap around words.
_SCALE, _GAP = 2, 6

#: Pixels left of the tiles and above them, for the axes.
LEFT = TOP = _SCALE * HEIGHT + 2 * _GAP

#: Red, green, blue and opacity: words and lines between cells, what is empty, then the kinds.
_LINE = (0x88, 0x88, 0x88, 0xFF)
_EMPTY = (0, 0, 0, 0)

#: Their numbers in the palette.
_DRAWN, _NOTHING = 0, 1
_NUMBERS = {kind: number for number, kind in enumerate(KINDS, start=2)}

Canvas = list[bytearray]


def png(shown: Picture, title: str) -> bytes:
    """The picture as a PNG file with a palette; skipped cells are transparent.

    Keys go across and queries down, each from 0 to their number; a legend names the kinds of tiles.

    Args:
        shown: the tiles; each cell is a square, except last cells that hold less.
        title: a title in the file.
    """
    side = min(_MOST_OF_A_CELL, max(1, _MOST // max(len(shown.rows), len(shown.rows[0]))))
    tiles = list(_tiles(shown, side))
    canvas = _canvas(shown, tiles)
    palette = [_LINE, _EMPTY, *(_colour(COLOURS[name]) for name in KINDS.values())]
    size = struct.pack(">IIBBBBB", len(canvas[0]), len(canvas), 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", size),
        (b"PLTE", bytes(part for colour in palette for part in colour[:3])),
        (b"tRNS", bytes(colour[3] for colour in palette)),
        (b"iTXt", b"Title\0\0\0\0\0" + title.encode()),
        # A byte ahead of each line of pixels gives its filter: none.
        (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in canvas))),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _canvas(shown: Picture, tiles: Sequence[bytes]) -> Canvas:
    """The tiles with their axes and legend."""
    height, width = len(tiles), len(tiles[0])
    legend = _legend({kind for row in shown.rows for kind in row})
    keys = _axis("keys", shown.kv_len, width)
    queries = _axis("queries", shown.q_len, height)
    across = LEFT + max(width, len(keys[0]), len(legend[0])) + _GAP
    down = TOP + max(height, len(queries[0])) + _GAP + len(legend) + _GAP
    canvas = [bytearray([_NOTHING]) * across for _ in range(down)]
    _paste(canvas, keys, LEFT, _GAP)
    upwards = [list(column) for column in zip(*queries, strict=True)][::-1]
    _paste(canvas, upwards, _GAP, TOP)
    _paste(canvas, tiles, LEFT, TOP)
    _paste(canvas, legend, LEFT, down - _GAP - len(legend))
    return canvas


def _axis(name: str, length: int, pixels: int) -> Canvas:
    """The axis' name between 0 and its length, along so many pixels, or more if they need it.

    That of the queries is read upwards: it begins with the length.
    """
    ends = ("0", f"{length:,}") if name == "keys" else (f"{length:,}", "0")
    first, middle, last = (written(text, _SCALE) for text in (ends[0], name, ends[1]))
    needed = sum(len(word[0]) for word in (first, middle, last)) + 4 * _GAP
    axis = [bytearray([_NOTHING]) * max(pixels, needed) for _ in first]
    _write(axis, first, 0, 0)
    free = len(axis[0]) - len(first[0]) - len(middle[0]) - len(last[0])
    _write(axis, middle, len(first[0]) + free // 2, 0)
    _write(axis, last, len(axis[0]) - len(last[0]), 0)
    return axis


def _legend(kinds: Set[str]) -> Canvas:
    """A square of each kind of tile beside its name."""
    side = _SCALE * (HEIGHT - 2)
    words = [(kind, written(name, _SCALE)) for kind, name in KINDS.items() if kind in kinds]
    width = sum(side + _GAP + len(word[0]) + 2 * _GAP for _, word in words)
    legend = [bytearray([_NOTHING]) * width for _ in range(_SCALE * HEIGHT)]
    x = 0
    for kind, word in words:
        square = [
            [_DRAWN if {i, j} & {0, side - 1} else _NUMBERS[kind] for i in range(side)]
            for j in range(side)
        ]
        _paste(legend, square, x, 0)
        _write(legend, word, x + side + _GAP, 0)
        x += side + _GAP + len(word[0]) + 2 * _GAP
    return legend


def _write(canvas: Canvas, word: Sequence[Sequence[bool]], x: int, y: int) -> None:
    _paste(canvas, [[_DRAWN if cell else _NOTHING for cell in row] for row in word], x, y)


def _paste(canvas: Canvas, part: Sequence[Sequence[int]], x: int, y: int) -> None:
    for number, row in enumerate(part):
        canvas[y + number][x : x + len(row)] = bytes(row)


def write_png(path: Path, accounts: Sequence[Account]) -> None:
    """Writes the picture of the mask of the only account.

    Raises:
        FlashgenError: there are several accounts.
        OutputError: the file cannot be written.
    """
    mask = the_one("--png", path, accounts).mask
    content = png(mask.picture.scaled(MOST_CELLS, MOST_CELLS), mask.label)
    write_atomically(path, content, "choose another place with --png")


def _tiles(shown: Picture, side: int) -> Iterator[bytes]:
    """Lines of pixels; a pixel is the number of a colour."""
    height, width = (
        -(-length * side // block) + 1
        for length, block in ((shown.q_len, shown.block_m), (shown.kv_len, shown.block_n))
    )
    drawn = side > 2  # smaller cells have no room for lines between them
    for y in range(height):
        row = shown.rows[min(y // side, len(shown.rows) - 1)]
        on_line = y in (0, height - 1) or (drawn and y % side == 0)
        yield bytes(
            _DRAWN
            if on_line or x in (0, width - 1) or (drawn and x % side == 0)
            else _NUMBERS[row[min(x // side, len(row) - 1)]]
            for x in range(width)
        )


def _chunk(kind: bytes, content: bytes) -> bytes:
    checked = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checked)


def _colour(written: str) -> tuple[int, int, int, int]:
    """``#rgb``, ``#rgba``, ``#rrggbb`` or ``#rrggbbaa``."""
    digits = written.removeprefix("#")
    if len(digits) < 6:
        digits = "".join(2 * digit for digit in digits)
    red, green, blue, opacity = bytes.fromhex(digits.ljust(8, "f"))
    return red, green, blue, opacity
