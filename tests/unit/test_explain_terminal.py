"""What a terminal shows of an account."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from flashgen import AttentionSpec, Int, block_sparse, causal, sliding_window
from flashgen.explain.call import Asked
from flashgen.explain.terminal import print_account
from flashgen.explain.variant import explain_variant
from flashgen.loader import Variant

LEFT = Int("left", 100)
SPEC = AttentionSpec(64, mask=sliding_window(LEFT, 0, align="bottom_right"), targets=("sm_90",))


def account(spec=SPEC, **asked):
    return explain_variant(Variant("x", spec, "x.py"), None, Asked(**asked), Path("nowhere"))


def shown(found, *, width: int = 200, encoding: str = "utf-8", colour: bool = False) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, highlight=False, force_terminal=colour)
    print_account(console, found)
    file.seek(0)
    return file.read()


@pytest.fixture(scope="module")
def window():
    return account(q_len=1024, batch=2, heads=4)


def test_the_sections_of_an_account(window) -> None:
    lines = shown(window).splitlines()
    titles = [line.split(":")[0] for line in lines if line and not line.startswith(" ")]
    assert titles == [
        "x on sm_90 (H200)", "Mask", "Shared memory, hopper kernel",
        "Shared memory, portable kernel", "Traffic and arithmetic",
    ]  # fmt: skip
    assert "  2 x 4 heads, 1,024 queries, 1,024 keys, d=64, bfloat16" in lines
    assert "  left: 100" in lines
    assert all(line == line.rstrip() for line in lines)


def test_the_picture_has_the_cells_of_the_account(window) -> None:
    lines = [line.strip() for line in shown(window).splitlines()]
    rows = window.mask.picture.rows
    drawn = ["".join({".": "·", "x": "▒", "#": "█"}[kind] * 2 for kind in row) for row in rows]
    start = lines.index(drawn[0])
    assert lines[start : start + len(rows)] == drawn
    block_m, block_n = window.mask.picture.block_m, window.mask.picture.block_n
    assert lines[start + len(rows) + 1].endswith(f"a cell is {block_m} x {block_n}")


def test_a_long_picture_fits(window) -> None:
    lines = shown(account(q_len=16384)).splitlines()
    drawn = [line.strip() for line in lines if line.strip() and set(line.strip()) <= set("·▒█")]
    assert 16 <= len(drawn) <= 32
    assert all(32 <= len(line) <= 64 for line in drawn)


@pytest.fixture(scope="module")
def long():
    return account(q_len=16384)


@pytest.mark.parametrize("width", [4, 20, 40, 70])
def test_a_picture_is_no_wider_than_the_console(long, width) -> None:
    rows = long.mask.picture.scaled(min(32, (width - 2) // 2), min(64, width - 2)).rows
    wide = 2 if 2 * len(rows[0]) <= min(64, width - 2) else 1
    letters = {".": "·", "x": "▒", "#": "█"}
    drawn = ["".join(letters[kind] * wide for kind in row) for row in rows]
    lines = [line.strip() for line in shown(long, width=width).splitlines()]
    start = lines.index(drawn[0])
    assert lines[start - 1 : start + len(rows) + 1] == ["", *drawn, ""]


def test_what_was_looked_at_is_what_is_left_and_what_was_rejected(window) -> None:
    lines = [line.strip() for line in shown(window).splitlines()]
    for kernel in window.kernels:
        left, rejected = kernel.candidates, len(kernel.rejected)
        assert (
            f"{left + rejected} configurations looked at, {left} left to choose from, "
            f"{rejected} rejected{':' if rejected else '.'}"
        ) in lines


def test_a_console_of_ascii_gets_ascii(window) -> None:
    text = shown(window, encoding="ascii")
    assert text.isascii()
    assert "# unmasked  x masked  . skipped" in text


def test_colours_are_for_terminals_only(window) -> None:
    assert "\x1b[" in shown(window, colour=True)
    assert "\x1b[" not in shown(window)


def test_every_number_of_the_tables_is_there(window) -> None:
    text = shown(window)
    for kernel in window.kernels:
        for buffer in kernel.buffers:
            assert f"{buffer.bytes:,}" in text and buffer.formula in text
        assert all(rejection.reason in text for rejection in kernel.rejected)
    for work in window.works:
        assert work.name in text and work.said in text and f"{work.intensity:,.0f}" in text
    assert f"visible: {window.mask.share:.3%} of the elements; visited: " in text


def test_a_narrow_terminal_keeps_names_whole(window) -> None:
    lines = shown(window, width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert any(line.startswith("  FlashAttention-1 ") for line in lines)
    assert "…" not in "".join(lines)


def test_of_a_table_that_is_too_wide_no_number_is_cut(window) -> None:
    """It comes in parts, each with the names; together they hold what the wide table holds."""
    wide, narrow = (shown(window, width=width) for width in (200, 80))
    for work in window.works:
        first = f"  {work.name} "
        (units, moved), parts = (
            [line.split() for line in text.splitlines() if line.startswith(first)][:count]
            for text, count in ((wide, 2), (narrow, 4))
        )
        name = work.name.split()
        together = [word for part in parts for word in part[len(name) :]]
        assert together == [*units[len(name) :], *moved[len(name) :]]


def test_listed_tiles_have_conditions_in_place_of_runs() -> None:
    spec = AttentionSpec(64, mask=block_sparse([[1, 0], [1, 1]], 128) & causal())
    text = shown(account(spec))
    assert "Tiles are listed once a call, by the table of blocks:" in text
    assert "some see the keys from" not in text
    assert "Tiles are listed once a call, by the table of blocks in layout[" in text
    assert "The model that ranks" not in text


def test_a_module_without_a_gluon_kernel_says_why() -> None:
    spec = AttentionSpec(64, "float32", causal(), targets=("sm_90",))
    text = shown(account(spec, q_len=512))
    assert "No Gluon kernel\n  float32: its tiles are of 16-bit elements\n" in text
