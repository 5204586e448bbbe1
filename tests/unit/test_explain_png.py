"""The picture in pixels, as another program reads it."""

import io

import pytest
from PIL import Image  # matplotlib's

from flashgen.explain.picture import FOR_NOTHING, MASKED, SKIPPED, UNMASKED, Picture
from flashgen.explain.png import png
from flashgen.explain.svg import COLOURS

COLOUR = {
    SKIPPED: (0x88, 0x88, 0x88, 0x33),
    MASKED: (0xE8, 0xA3, 0x3D, 255),
    FOR_NOTHING: (0xD9, 0x65, 0x5F, 255),
    UNMASKED: (0x4A, 0xA3, 0xDF, 255),
}
LINE = (0x88, 0x88, 0x88, 255)


def read(shown: Picture, title: str = "") -> Image.Image:
    image = Image.open(io.BytesIO(png(shown, title)))
    image.load()
    return image


def test_the_colours_are_those_of_the_svg() -> None:
    assert list(COLOURS.values()) == ["#8883", "#e8a33d", "#d9655f", "#4aa3df"]


def test_each_cell_is_there() -> None:
    shown = Picture(64, 48, 16, 8, ("x.....", "#x....", "##!x..", "###..x"))
    image = read(shown).convert("RGBA")
    assert image.size == (6 * 32 + 1, 4 * 32 + 1)
    for i, row in enumerate(shown.rows):
        for j, kind in enumerate(row):
            found = [image.getpixel((32 * j + x, 32 * i + y)) for x in (1, 31) for y in (1, 31)]
            assert found == [COLOUR[kind]] * 4
            assert image.getpixel((32 * j, 32 * i + 7)) == LINE
            assert image.getpixel((32 * j + 7, 32 * i)) == LINE
    assert image.getpixel((192, 7)) == image.getpixel((7, 128)) == LINE


def test_last_cells_may_hold_less() -> None:
    shown = Picture(40, 20, 16, 16, ("#x", "xx", "#."))
    assert read(shown).size == (40 + 1, 80 + 1)


@pytest.mark.parametrize(
    ("down", "across", "size"), [(64, 64, (641, 641)), (128, 3, (16, 641)), (700, 700, (701, 701))]
)
def test_many_cells_are_small_ones(down, across, size) -> None:
    image = read(Picture(16 * down, 16 * across, 16, 16, ("x" * across,) * down)).convert("RGBA")
    assert image.size == size
    assert image.getpixel((1, 1)) == image.getpixel((size[0] - 2, size[1] - 2)) == COLOUR[MASKED]


def test_it_says_what_it_is_of() -> None:
    image = read(Picture(8, 8, 8, 8, ("#",)), "a & b \u2264 <c>")
    assert image.info["Title"] == "a & b \u2264 <c>"
