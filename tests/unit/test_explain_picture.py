"""Pictures of tiles: beside the mask evaluated element by element, scaled, and as SVG."""

import re
from itertools import product

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Int,
    block_sparse,
    causal,
    document,
    sliding_window,
)
from flashgen.budget.traffic import Workload, visited_tiles
from flashgen.config import KernelConfig
from flashgen.errors import FlashgenError
from flashgen.explain.picture import (
    FOR_NOTHING,
    MASKED,
    SKIPPED,
    UNMASKED,
    Picture,
    picture,
    picture_of,
)
from flashgen.explain.svg import COLOURS, svg
from flashgen.plan import lower
from flashgen.plan.typical import DOCUMENT, TypicalRowTable, TypicalTensor
from flashgen.reference import visibility
from flashgen.symbolic.tile_logic import tile_logic


def elements(mask, q_len: int, kv_len: int, **params):
    """(q_len, kv_len), whether a query of the first head sees a key."""
    seen = visibility(mask, 1, 1, q_len, kv_len, params=params)
    return seen.expand(1, 1, q_len, kv_len)[0, 0]


def brute_force(seen, block_m: int, block_n: int) -> tuple[str, ...]:
    """The kind of each tile by its elements; a tile that reaches past the keys has to be masked."""
    rows = []
    for i in range(0, seen.shape[0], block_m):
        row = ""
        for j in range(0, seen.shape[1], block_n):
            tile = seen[i : i + block_m, j : j + block_n]
            whole = tile.shape[1] == block_n
            row += UNMASKED if tile.all() and whole else MASKED if tile.any() else SKIPPED
        rows.append(row)
    return tuple(rows)


LEFT = Int("left", 20)
MASKS = {
    "causal": causal(align="bottom_right"),
    "window": sliding_window(LEFT, 0, align="bottom_right"),
    "window ahead": sliding_window(LEFT, 9, align="top_left"),
}


@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("lengths", [(128, 128), (70, 170), (97, 64)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_cells_are_what_the_elements_say(name, lengths, blocks) -> None:
    mask = MASKS[name]
    bounds = lower(AttentionSpec(64, mask=mask), "x").bounds
    seen = elements(mask, *lengths, left=20)
    shown = picture(bounds, *lengths, *blocks, {"left": 20})
    assert shown.rows == brute_force(seen, *blocks)


@pytest.mark.parametrize("blocks", [(64, 64), (128, 32)], ids=str)
def test_cells_of_documents_are_what_the_elements_say(blocks) -> None:
    plan = lower(AttentionSpec(64, mask=document() & causal()), "x")
    length = 2500
    ids = torch.arange(length, dtype=torch.int32)[None] // DOCUMENT
    [tensor] = plan.params
    seen = elements(plan.spec.mask, length, length, **{tensor.name: ids})
    values = {tensor.name: TypicalTensor(tensor)}
    values |= {table.name: TypicalRowTable(table.side) for table in plan.row_tables}
    assert picture(plan.bounds, length, length, *blocks, values).rows == brute_force(seen, *blocks)


def test_cells_of_a_listed_mask_are_what_the_elements_say() -> None:
    layout = [[(3 * i + 5 * j) % 7 < 3 for j in range(9)] for i in range(9)]
    plan = lower(AttentionSpec(64, mask=block_sparse(layout, 16)), "x")
    length = 16 * 9
    seen = elements(plan.spec.mask, length, length)
    logic = tile_logic(plan.predicate)
    values = {constant.name: constant.elements for constant in plan.spec.constants}
    for blocks in ((16, 16), (32, 16)):
        shown = picture(logic, length, length, *blocks, values)
        assert shown.rows == brute_force(seen, *blocks)


def test_its_visits_are_those_of_the_tuner() -> None:
    plan = lower(AttentionSpec(64, mask=MASKS["window"]), "x")
    shown = picture(plan.bounds, 300, 500, 32, 64, {"left": 20})
    work = Workload(1, 1, 1, 300, 500, (("left", 20),))
    assert shown.visits == visited_tiles(plan, 32, 64, work)


def test_a_tile_of_two_runs_is_what_the_first_makes_of_it() -> None:
    """Runs are cut where the one before ended: the kernel masks a tile that the first one masks."""
    mask = causal() & (lambda b, h, q, k: (k < 4) | (k >= q - 19))
    bounds = lower(AttentionSpec(64, mask=mask), "x").bounds
    row = picture(bounds, 64, 64, 8, 8, {}).rows[2]
    assert row == "x#x....."


CELLS = Picture(64, 64, 16, 16, ("#...", "##..", "x#..", "!.x#"))


def test_a_cell_of_several_tiles_is_masked_if_one_of_them_is() -> None:
    half = CELLS.scaled(2, 2)
    assert half.rows == ("#.", "xx")
    assert (half.block_m, half.block_n) == (32, 32)
    assert CELLS.scaled(1, 1).rows == half.scaled(1, 1).rows == ("x",)
    assert CELLS.scaled(4, 3).rows == ("#.", "#.", "x.", "!x")
    assert CELLS.scaled(4, 4) is CELLS


def test_the_last_cell_may_have_fewer_tiles() -> None:
    odd = Picture(33, 50, 16, 16, ("...#", "....", "x..."))
    assert odd.scaled(2, 3).rows == (".#", "x.")


def test_kinds_are_counted_by_name() -> None:
    counts = {"skipped": 8, "masked": 2, "for nothing": 1, "unmasked": 5}
    assert CELLS.counts == counts
    assert CELLS.rows[3].count(FOR_NOTHING) == 1


def covered(text: str, colour: str) -> set[tuple[int, int]]:
    """The cells, 8 units wide, that a colour fills."""
    found = re.search(rf'fill="{colour}" d="(.*?)"', text)
    rectangles = re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", found[1]) if found else []
    return {
        (y // 8, x // 8)
        for x0, y0, width, height in (map(int, r) for r in rectangles)
        for x, y in product(range(x0, x0 + width, 8), range(y0, y0 + height, 8))
    }


def test_the_svg_has_each_cell_in_the_colour_of_its_kind() -> None:
    text = svg(CELLS, "x &amp; y")
    assert text.startswith("<svg ") and "<title>x &amp; y</title>" in text
    kinds = {SKIPPED: "skipped", MASKED: "masked", FOR_NOTHING: "for nothing", UNMASKED: "unmasked"}
    for kind, name in kinds.items():
        expected = {(i, j) for i, j in product(range(4), range(4)) if CELLS.rows[i][j] == kind}
        assert covered(text, COLOURS[name]) == expected


def test_a_large_picture_has_letters_that_can_be_read() -> None:
    large = Picture(4096, 4096, 64, 64, ("#" * 64,) * 64)
    width, font = (float(re.search(rf'{x}="([\d.]+)"', svg(large, "")).group(1)) for x in
                   ("width", "font-size"))  # fmt: skip
    box = float(re.search(r'viewBox="\S+ \S+ (\S+)', svg(large, ""))[1])
    assert width < 700
    assert font * width / box == pytest.approx(4.2 * 4, rel=0.01)


@pytest.mark.parametrize(
    ("mask", "lengths", "blocks", "answer"),
    [
        (
            causal(),
            (2**20, 2**20),
            (16, 64),
            "--q-len=1048576: in tiles of 16 x 64 too many to look at; "
            "write --q-len=524288 or less",
        ),
        (
            sliding_window(64, 0, align="top_left"),
            (2**18, 2**20),
            (16, 16),
            "--kv-len=1048576: in tiles of 16 x 16 too many to look at; "
            "write --kv-len=262144 or less",
        ),
        (
            block_sparse(),
            (2**18, 2**18),
            (128, 128),
            "--q-len=262144: in tiles of 128 x 128 too many to look at; "
            "write --q-len=131072 or less",
        ),
    ],
    ids=["many", "many of keys", "listed"],
)
def test_more_tiles_than_end_in_seconds_are_refused(mask, lengths, blocks, answer) -> None:
    plan = lower(AttentionSpec(64, mask=mask), "x")
    with pytest.raises(FlashgenError) as caught:
        picture_of(plan, Workload(1, 1, 1, *lengths), KernelConfig(*blocks, 4, 2))
    assert str(caught.value) == answer
