"""Block tables: which elements of a mask are of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashgen import Int, Mask, Tensor, tree
from flashgen.symbolic import torch_source, trace
from flashgen.symbolic.tile_logic import tile_logic

LAYOUT = Tensor("layout", ("num_q_heads", None, None), "bool")
NUMBERS = Tensor("numbers", ("num_q_heads", None, None), "int32")
SIZE = Int("size", min=1)


def found(mask: Mask) -> list[str]:
    logic = tile_logic(trace(mask))
    return [torch_source(t.table.element) for t in logic.tables] if logic else []


@pytest.mark.parametrize(
    ("mask_mod", "indices"),
    [
        (lambda b, h, q, kv: LAYOUT[h, q // 64, kv // 32], "h, q_idx // 64, kv_idx // 32"),
        (lambda b, h, q, kv: ~LAYOUT[h, kv // 8, q // SIZE], "h, kv_idx // 8, q_idx // size"),
        (
            lambda b, h, q, kv: LAYOUT[h, (q + 5) // 8, 2 * kv // 8] | (kv < 4),
            "h, (q_idx + 5) // 8, (2 * kv_idx) // 8",
        ),
        (lambda b, h, q, kv: LAYOUT[h, q // 8, kv], None),
        (lambda b, h, q, kv: LAYOUT[h, q // 8, (q + kv) // 8], None),
        (lambda b, h, q, kv: LAYOUT[h, (q + kv) // 8, (q + kv) // 8], None),
        (lambda b, h, q, kv: LAYOUT[h, q // 8, (40 - kv) // 8], None),
        (lambda b, h, q, kv: LAYOUT[q, q // 8, kv // 8], None),
        (lambda b, h, q, kv: LAYOUT[h, 1, kv // 8] & (q >= kv), None),
        (lambda b, h, q, kv: NUMBERS[h, q // 8, kv // 8] != 0, None),
    ],
)
def test_elements_of_blocks_of_rows_and_of_keys_are_found(
    mask_mod: Callable[..., Any], indices: str | None
) -> None:
    assert found(Mask(mask_mod, "mask")) == ([f"layout[{indices}]"] if indices else [])


def test_a_table_for_each_pair_of_positions_is_none_of_blocks() -> None:
    assert tile_logic(trace(tree())) is None
