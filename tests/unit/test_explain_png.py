"""The picture in pixels, as another program reads it."""

import io

import pytest
from PIL import Image  # matplotlib's

from flashgen.explain.letters import written
from flashgen.explain.picture import FOR_NOTHING, KINDS, MASKED, SKIPPED, UNMASKED, Picture
from flashgen.explain.png import LEFT, TOP, png
from flashgen.explain.svg import COLOURS

COLOUR = {
    SKIPPED: (0x88, 0x88, 0x88, 0x33),
    MASKED: (0xE8, 0xA3, 0x3D, 255),
    FOR_NOTHING: (0xD9, 0x65, 0x5F, 255),
    UNMASKED: (0x4A, 0xA3, 0xDF, 255),
}
LINE = (0x88, 0x88, 0x88, 255)
EMPTY = (0, 0, 0, 0)


def read(shown: Picture, title: str = "") -> Image.Image:
    image = Image.open(io.BytesIO(png(shown, title)))
    image.load()
    return image


def test_the_colours_are_those_of_the_svg() -> None:
    assert list(COLOURS.values()) == ["#8883", "#e8a33d", "#d9655f", "#4aa3df"]


def tiles_of(image: Image.Image, width: int, height: int) -> Image.Image:
    """The picture without its axes and legend, which must not reach into it."""
    tiles = image.convert("RGBA").crop((LEFT, TOP, LEFT + width, TOP + height))
    around = image.convert("RGBA").crop((LEFT - 1, TOP - 1, LEFT + width + 1, TOP + height + 1))
    around.paste(EMPTY, (1, 1, 1 + width, 1 + height))
    assert around.getcolors() == [((width + 2) * (height + 2), EMPTY)]
    return tiles


def test_each_cell_is_there() -> None:
    shown = Picture(64, 48, 16, 8, ("x.....", "#x....", "##!x..", "###..x"))
    image = tiles_of(read(shown), 6 * 32 + 1, 4 * 32 + 1)
    for i, row in enumerate(shown.rows):
        for j, kind in enumerate(row):
            found = [image.getpixel((32 * j + x, 32 * i + y)) for x in (1, 31) for y in (1, 31)]
            assert found == [COLOUR[kind]] * 4
            assert image.getpixel((32 * j, 32 * i + 7)) == LINE
            assert image.getpixel((32 * j + 7, 32 * i)) == LINE
    assert image.getpixel((192, 7)) == image.getpixel((7, 128)) == LINE


def test_last_cells_may_hold_less() -> None:
    shown = Picture(40, 20, 16, 16, ("#x", "xx", "#."))
    image = tiles_of(read(shown), 40 + 1, 80 + 1)
    assert image.getpixel((40, 80)) == LINE


@pytest.mark.parametrize(
    ("down", "across", "size"), [(64, 64, (641, 641)), (128, 3, (16, 641)), (700, 700, (701, 701))]
)
def test_many_cells_are_small_ones(down, across, size) -> None:
    shown = Picture(16 * down, 16 * across, 16, 16, ("x" * across,) * down)
    image = tiles_of(read(shown), *size)
    assert image.getpixel((1, 1)) == image.getpixel((size[0] - 2, size[1] - 2)) == COLOUR[MASKED]


def words_in(image: Image.Image, *texts: str) -> list[str]:
    """Those of the texts that stand in the image somewhere, in letters of two by two pixels."""
    drawn = [
        [image.getpixel((x, y)) == LINE for x in range(image.width)] for y in range(image.height)
    ]
    lines = ["".join(" #"[cell] for cell in row) for row in drawn]
    found = []
    for text in texts:
        first, *others = ("".join(" #"[cell] for cell in row) for row in written(text, 2))
        starts = [
            (x, y)
            for y, line in enumerate(lines[: len(lines) - len(others)])
            for x in range(len(line) - len(first) + 1)
            if line.startswith(first, x)
        ]
        if any(
            all(lines[y + i].startswith(other, x) for i, other in enumerate(others, start=1))
            for x, y in starts
        ):
            found.append(text)
    return found


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [(("x.", "#x"), ["skipped", "masked", "unmasked"]), (("!",), ["for nothing"])],
)
def test_axes_and_legend_are_there(rows: tuple[str, ...], kinds: list[str]) -> None:
    """Also where the tiles take less room than the words."""
    shown = Picture(23_456, 17_890, 16_384, 16_384, rows)
    image = read(shown).convert("RGBA")
    names = ["skipped", "masked", "for nothing", "unmasked"]
    assert words_in(image, "keys", "17,890", "0", *names) == ["keys", "17,890", "0", *kinds]
    side = image.rotate(-90, expand=True)
    assert words_in(side, "queries", "23,456", "0") == ["queries", "23,456", "0"]
    for kind in KINDS:
        in_legend = image.crop((0, image.height - 26, image.width, image.height)).getcolors()
        assert in_legend is not None
        is_named = KINDS[kind] in kinds
        assert (COLOUR[kind] in {colour for _, colour in in_legend}) == is_named


def test_it_says_what_it_is_of() -> None:
    image = read(Picture(8, 8, 8, 8, ("#",)), "a & b \u2264 <c>")
    assert image.info["Title"] == "a & b \u2264 <c>"
