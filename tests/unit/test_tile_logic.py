"""What a mask says of whole tiles, held to brute force over their elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen import (
    Int,
    Mask,
    Tensor,
    bigbird,
    block_sparse,
    causal,
    chunked,
    dilated,
    document,
    global_tokens,
    kv_len,
    q_len,
    sliding_window,
)
from flashgen.params import Int as IntParam
from flashgen.symbolic import trace
from flashgen.symbolic.blocks import BLOCK_COLUMN, BLOCK_ROW
from flashgen.symbolic.tile_logic import TileLogic, tile_logic
from flashgen.symbols import evaluate
from support.visits import Call, Elements, sweep


@dataclass(frozen=True)
class Tile:
    """What was said of a tile, and its elements."""

    seen: bool
    full: bool
    elements: list[bool]


def answer(logic: TileLogic, values: dict[str, Any]) -> tuple[bool, bool]:
    """(seen, full), with every element of the tables that a tile touches read one by one."""
    values = dict(values)
    for table in logic.tables:
        (top, bottom), (left, right) = (
            (evaluate(first, values), evaluate(last, values))
            for first, last in (table.table.rows, table.table.columns)
        )
        shown = [
            bool(evaluate(table.table.entry, {**values, BLOCK_ROW.name: i, BLOCK_COLUMN.name: j}))
            for i, j in product(range(top, bottom + 1), range(left, right + 1))
        ]
        values |= {table.some.name: any(shown), table.every.name: all(shown)}
    return bool(evaluate(logic.seen, values)), bool(evaluate(logic.full, values))


def tiles(mask: Mask, call: Call) -> Iterator[Tile]:
    logic = tile_logic(trace(mask))
    assert logic is not None
    seen = call.matrix(mask)
    shared = {**call.values, **call.tables(logic.row_tables)}
    for first, start in product(range(0, call.q, call.block_m), range(0, call.kv, call.block_n)):
        rows = range(first, min(first + call.block_m, call.q))
        keys = range(start, min(start + call.block_n, call.kv))
        ends = {"q_first": rows[0], "q_last": rows[-1], "kv_first": keys[0], "kv_last": keys[-1]}
        yield Tile(*answer(logic, {**shared, **ends}), [seen[i][j] for i in rows for j in keys])


def check(mask: Mask, call: Call, exact: bool = False) -> None:
    """No tile with a visible element is unseen, none with a hidden one is full."""
    for tile in tiles(mask, call):
        assert tile.seen or not any(tile.elements)
        assert not tile.full or all(tile.elements)
        if exact:
            assert (tile.seen, tile.full) == (any(tile.elements), all(tile.elements))


def table(name: str = "layout") -> Tensor:
    return Tensor(name, (None, None), "bool")


LAYOUT = table()
WINDOW = Int("window", 3)
SIZE = Int("size", min=1)
LIMITS = Tensor("limits", ("q_len",), "int32")
IDS = Tensor("ids", ("kv_len",), "int32", sorted=True)
FEW = Tensor("few", (2,), "int32", sorted=True)

BLOCKS = block_sparse(LAYOUT, 3)
MASKS: dict[str, Mask] = {
    "blocks": BLOCKS,
    "hidden_blocks": ~BLOCKS,
    "run_time": block_sparse(LAYOUT, SIZE),
    "oblong": Mask(lambda b, h, q, kv: LAYOUT[q // 5, kv // 2], "oblong"),
    "shifted": Mask(lambda b, h, q, kv: LAYOUT[(q + 2) // 4, (kv + WINDOW) // 4], "shifted"),
    "turned": Mask(lambda b, h, q, kv: LAYOUT[kv // 4, q // 3], "turned"),
    "two_tables": BLOCKS & ~block_sparse(table("other"), 4),
    "either_table": BLOCKS | block_sparse(table("other"), 5),
    "causal": causal(align="bottom_right") & BLOCKS,
    "causal_or": causal(align="top_left") | BLOCKS,
    "window": sliding_window(WINDOW, 2, align="top_left") & ~BLOCKS,
    "bigbird": bigbird(3, random=LAYOUT),
    "bigbird_run_time": bigbird(SIZE, WINDOW, 2, random=LAYOUT),
    "chunks": chunked(SIZE) | BLOCKS,
    "steps": dilated(3, align="top_left") & BLOCKS,
    "steps_or": dilated(2, align="top_left") | BLOCKS,
    "globals": BLOCKS | global_tokens(2, align="top_left"),
    "documents": document(IDS, align="bottom_right") & BLOCKS,
    "not_this_document": ~document(IDS, align="top_left") | BLOCKS,
    "limits": Mask(lambda b, h, q, kv: LIMITS[q] >= kv, "limits") & BLOCKS,
    "limits_outside": Mask(lambda b, h, q, kv: LIMITS[q + 2] - q != kv, "outside") & BLOCKS,
    "few": Mask(lambda b, h, q, kv: FEW[q - WINDOW] < kv, "few") | BLOCKS,
    "products": Mask(lambda b, h, q, kv: q * kv < 20 * WINDOW, "products") & BLOCKS,
    "difference": Mask(lambda b, h, q, kv: (q - kv) // 3 == 1, "difference") | BLOCKS,
    "lengths": BLOCKS & Mask(lambda b, h, q, kv: q_len + WINDOW > kv_len, "lengths"),
    "conditions": BLOCKS | Mask(lambda b, h, q, kv: (q // 4 != kv // 4) & (b == h), "conditions"),
}


@st.composite
def calls(draw: Callable[..., Any], mask: Mask) -> Call:
    q = draw(st.integers(1, 20))
    kv = q if mask.equal_lengths else draw(st.integers(1, 20))
    sides = st.integers(1, 7)
    params: dict[str, Any] = {}
    for param in mask.params:
        if isinstance(param, IntParam):
            params[param.name] = draw(st.integers(param.min, 9))
        elif param.dtype == "bool":
            size = draw(st.integers(1, 12))  # also smaller than the blocks are many
            share = draw(st.sampled_from([0.1, 0.5, 0.9]))
            chance = st.floats(0, 1).map(lambda x, share=share: x < share)
            row = st.lists(chance, min_size=size, max_size=size)
            params[param.name] = Elements(draw(st.lists(row, min_size=size, max_size=size)))
        else:
            size = evaluate(param.dims[-1].sym, {"q_len": q, "kv_len": kv})
            values = draw(st.lists(st.integers(0, 20), min_size=size, max_size=size))
            params[param.name] = Elements(sorted(values) if param.sorted else values)
    return Call(q, kv, draw(sides), draw(sides), params)


@pytest.mark.parametrize("name", MASKS)
def test_no_answer_is_wrong(name: str) -> None:
    @sweep(60)
    @given(calls(MASKS[name]))
    def holds(call: Call) -> None:
        check(MASKS[name], call)

    holds()


EXACT = ["blocks", "hidden_blocks", "run_time", "oblong", "turned"]


@pytest.mark.parametrize("name", EXACT)
def test_a_table_alone_is_told_exactly(name: str) -> None:
    @sweep(60)
    @given(calls(MASKS[name]))
    def holds(call: Call) -> None:
        check(MASKS[name], call, exact=True)

    holds()


@pytest.mark.parametrize("name", ["causal", "window", "bigbird", "globals", "two_tables"])
def test_tiles_inside_of_blocks_are_told_exactly(name: str) -> None:
    """Where all that a mask does it does by blocks, or by a diagonal through whole tiles."""
    layout = Elements([[(i * 5 + j * 3) % 7 < 3 for j in range(8)] for i in range(8)])
    other = Elements([[(i + j) % 3 == 0 for j in range(8)] for i in range(8)])
    params = {"layout": layout, "other": other, "window": 3}
    for side in (1, 3) if name == "bigbird" else (1,):
        check(MASKS[name], Call(21, 21, side, side, params), exact=True)


def test_each_answer_occurs() -> None:
    layout = Elements([[True, False], [True, True]])
    for tile_list in (
        list(tiles(BLOCKS, Call(6, 6, 3, 3, {"layout": layout}))),
        list(tiles(BLOCKS, Call(6, 6, 3, 2, {"layout": layout}))),
    ):
        assert {tile.seen for tile in tile_list} == {True, False}
        assert {tile.full for tile in tile_list} == {True, False}
