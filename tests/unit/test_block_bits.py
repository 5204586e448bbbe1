"""Bits of block tables: what each row sees of a block of columns, beside the mask itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashgen import AttentionSpec, Int, Mask, Tensor, block_sparse, causal, dilated, softcap
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.plan.block_tables import BlockBits
from flashgen.plan.mask_code import MaskCode

LAYOUT = Tensor("layout", (None, None), "bool")
I32 = np.int32
ROWS = 64


def seen_of(mask: Any, side: str, **fields: Any) -> MaskCode:
    """What the kernel over tiles of keys goes by, or that over tiles of queries."""
    spec = AttentionSpec(64, mask=mask, deterministic=True, **fields)
    names = HopperBackwardSplit(backward_plan(lower(spec, "x")))
    assert not names.why_not
    return names.mask_code if side == "keys" else names.of_queries.mask_code


def _at_least(column: Any, least: Any) -> Any:
    """As the kernels have it."""
    least = np.minimum(np.maximum(least, column), column + 248)
    return I32(-1) << ((least - column + 7) >> 3).astype(I32)


def _found(table: BlockBits, side: str, columns: int, firsts: tuple[int, int], layout: Any) -> Any:
    """(ROWS, columns): what the lines of `bitmasks.hide` come to, with queries or keys as rows."""

    def at(tensor: Any, i: Any, j: Any) -> Any:
        i, j = np.broadcast_arrays(i, j)
        inside = (i >= 0) & (i < tensor.shape[0]) & (j >= 0) & (j < tensor.shape[1])
        return np.where(inside, tensor[np.where(inside, i, 0), np.where(inside, j, 0)], 0)

    rows, first = np.arange(ROWS)[:, None], np.arange(8)[None, :]
    row_first, column_first = firsts
    of_keys = side == "keys"
    scope = {
        "_at_2d": at,
        "layout": layout,
        "kv_idx" if of_keys else "q_idx": row_first + rows,
        "q_first" if of_keys else "start_n": column_first,
        "COLUMNS": columns,
    }
    shown: Any = 0
    for i in range(eval(table.count, {}, scope)):
        scope[table.block] = eval(table.first.text(), {}, scope) + i
        begin = eval(table.begin.text(), {}, scope)
        position = column_first + first
        block = _at_least(position, begin) & ~_at_least(position, begin + table.size)
        shown |= block & np.where(eval(table.entry.text(), {}, scope), -1, 0)
    bitmasks = np.arange(columns // 8)[None, :, None]
    return ((np.asarray(shown)[:, None, :] >> bitmasks) & 1).reshape(ROWS, columns).astype(bool)


MASKS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "plain": (lambda q, kv: (q // 16, kv // 16), lambda i, j: (i, j)),
    "large": (lambda q, kv: (q // 200, kv // 96), lambda i, j: (i, j)),
    "odd": (lambda q, kv: (q // 23, kv // 17), lambda i, j: (i, j)),
    "shifted": (lambda q, kv: ((q + 5) // 16, (kv + 100) // 40), lambda i, j: (i, j)),
    "turned": (lambda q, kv: (q // 24, kv // 16), lambda i, j: (j, i)),
}


@pytest.mark.parametrize("side", ["keys", "queries"])
@pytest.mark.parametrize("name", MASKS)
def test_bits_say_what_the_table_says(name: str, side: str) -> None:
    blocks, order = MASKS[name]

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        i, j = order(*blocks(q, kv))
        return LAYOUT[i, j]

    (table,) = seen_of(Mask(mask, name), side).tables
    layout = np.random.default_rng(len(name)).random((30, 30)) < 0.4
    for columns in (64, 128):
        for row_first, column_first in ((0, 0), (64, 3 * columns), (192, columns)):
            found = _found(table, side, columns, (row_first, column_first), layout)
            rows = row_first + np.arange(ROWS)[:, None]
            others = column_first + np.arange(columns)[None, :]
            q, kv = (others, rows) if side == "keys" else (rows, others)
            i, j = order(*blocks(q, kv))
            inside = (i < 30) & (j < 30)
            expected = np.where(inside, layout[np.minimum(i, 29), np.minimum(j, 29)], False)
            assert (found == expected).all(), (columns, row_first, column_first)


@pytest.mark.parametrize("side", ["keys", "queries"])
def test_what_has_bits(side: str) -> None:
    """Blocks of 16 columns and more, of a known size, that go at the columns' pace."""
    small, chosen = block_sparse(LAYOUT, 8), block_sparse(LAYOUT, Int("size", min=1))
    oblong = Mask(lambda b, h, q, kv: LAYOUT[q // 16, kv // 5], "oblong")
    fast = Mask(lambda b, h, q, kv: LAYOUT[3 * q // 48, 3 * kv // 48 + 0 * q], "fast")
    has = {
        mask.label: bool(seen_of(mask, side).bitmasks)
        for mask in (block_sparse(LAYOUT, 16), small, chosen, oblong, fast)
    }
    assert list(has.values()) == [True, False, False, side == "keys", False]
    assert not seen_of(small, side).tables and seen_of(small, side).pairs


@pytest.mark.parametrize("side", ["keys", "queries"])
def test_beside_other_conditions(side: str) -> None:
    blocks = block_sparse(LAYOUT, 32)
    both = seen_of(~blocks & causal(align="top_left"), side, score=softcap(5.0))
    assert len(both.tables) == 1 and any("~shown" in bits.text() for bits in both.bitmasks)
    assert not both.pairs
    either = seen_of(blocks | ~block_sparse(Tensor("other", (None, None), "bool"), 64), side)
    assert [table.name for table in either.tables] == ["shown_0", "shown_1"]
    # One that has no bits has all compared by pairs, tables too.
    neither = seen_of(dilated(3, align="top_left") & blocks, side)
    assert neither.pairs and not neither.tables


def test_rows_that_a_table_is_read_by_are_handed_on() -> None:
    found = seen_of(block_sparse(LAYOUT, 16), "keys")
    assert found.rows == ("kv_idx",)
