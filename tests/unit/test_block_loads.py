"""How masked tiles read block tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashgen import AttentionSpec, Int, Mask, Tensor, block_sparse, causal
from flashgen.plan import lower
from flashgen.plan.block_tables import BlockLoads

LAYOUT = Tensor("layout", (None, None), "bool")
SIDES = (16, 32, 64, 128)


def loads(mask_mod: Callable[..., Any]) -> tuple[BlockLoads, ...]:
    return lower(AttentionSpec(64, mask=Mask(mask_mod, "mask")), "kernel").code.tables


@pytest.mark.parametrize("size", [16, 24, 48, 64, 100, 128, 200, 256])
@pytest.mark.parametrize(("step", "offset"), [(1, 0), (1, 5), (3, 0), (2, 7), (12, 1)])
def test_a_tile_touches_no_more_blocks_than_are_read(size: int, step: int, offset: int) -> None:
    size *= step
    (table,) = loads(lambda b, h, q, kv: LAYOUT[(step * q + offset) // size, kv // size])
    for side in SIDES:
        for counted, factor, shift in ((table.rows, step, offset), (table.columns, 1, 0)):
            name = "BLOCK_M" if counted is table.rows else "BLOCK_N"
            most = eval(counted, {name: side})
            touched = []
            for first in range(0, 64 * side, side):
                ends = (factor * first + shift, factor * (first + side - 1) + shift)
                touched.append(ends[1] // size - ends[0] // size + 1)
            assert max(touched) <= most <= max(touched) + 1
            if size & (size - 1) == 0 and (factor, shift) == (1, 0):
                assert most == max(touched)


@pytest.mark.parametrize("size", [8, Int("size", min=1)], ids=str)
def test_small_blocks_and_those_the_call_chooses_are_read_by_element(size: Any) -> None:
    mask = block_sparse(LAYOUT, size) & causal()
    code = lower(AttentionSpec(64, mask=mask), "kernel").code
    assert not code.tables
    assert code.loads_elements
    assert any("_at_2d(layout," in condition.text() for condition in code.conditions)


def test_other_conditions_read_what_was_read() -> None:
    code = lower(AttentionSpec(64, mask=~block_sparse(LAYOUT, 16) | causal()), "kernel").code
    (table,) = code.tables
    assert table.entry.text() == "_at_2d(layout, block_row, block_column) != 0"
    assert not code.loads_elements
    assert [c.text() for c in code.conditions] == ["(q_idx >= kv_idx) | (~shown)"]
