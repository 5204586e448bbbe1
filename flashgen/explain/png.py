"""png: the picture of a mask in pixels, for viewers without SVG, with Python's own zlib."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashgen.explain.account import Account
from flashgen.explain.picture import KINDS, Picture
from flashgen.explain.svg import COLOURS, MOST_CELLS, the_one
from flashgen.files import write_atomically

# The most pixels of a cell each way, and of all cells; a cell has at least one pixel.
_MOST_OF_A_CELL, _MOST = 32, 640

#: Red, green, blue and opacity: lines between cells, then the kinds of cells.
_LINE = (0x88, 0x88, 0x88, 0xFF)


def png(shown: Picture, title: str) -> bytes:
    """The picture as a PNG file with a palette; skipped cells are transparent.

    Args:
        shown: the tiles; each cell is a square, except last cells that hold less.
        title: a title in the file.
    """
    side = min(_MOST_OF_A_CELL, max(1, _MOST // max(len(shown.rows), len(shown.rows[0]))))
    height, width = (
        -(-length * side // block) + 1
        for length, block in ((shown.q_len, shown.block_m), (shown.kv_len, shown.block_n))
    )
    palette = [_LINE, *(_colour(COLOURS[name]) for name in KINDS.values())]
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(part for colour in palette for part in colour[:3])),
        (b"tRNS", bytes(colour[3] for colour in palette)),
        (b"iTXt", b"Title\0\0\0\0\0" + title.encode()),
        # A byte ahead of each line of pixels gives its filter: none.
        (b"IDAT", zlib.compress(b"".join(b"\0" + x for x in _lines(shown, side, height, width)))),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def write_png(path: Path, accounts: Sequence[Account]) -> None:
    """Writes the picture of the mask of the only account.

    Raises:
        FlashgenError: there are several accounts.
        OutputError: the file cannot be written.
    """
    mask = the_one("--png", path, accounts).mask
    content = png(mask.picture.scaled(MOST_CELLS, MOST_CELLS), mask.label)
    write_atomically(path, content, "choose another place with --png")


def _lines(shown: Picture, side: int, height: int, width: int) -> Iterator[bytes]:
    """Lines of pixels; a pixel is the number of a colour."""
    numbers = {kind: number for number, kind in enumerate(KINDS, start=1)}
    drawn = side > 2  # smaller cells have no room for lines between them
    for y in range(height):
        row = shown.rows[min(y // side, len(shown.rows) - 1)]
        on_line = y in (0, height - 1) or (drawn and y % side == 0)
        yield bytes(
            0
            if on_line or x in (0, width - 1) or (drawn and x % side == 0)
            else numbers[row[min(x // side, len(row) - 1)]]
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
