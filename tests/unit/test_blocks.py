"""Block tables: which elements of a mask are of one, and what is left without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashgen import Int, Mask, Tensor, bigbird, block_sparse, causal
from flashgen.symbolic import block_tables, derive_bounds, torch_source, trace, where_block
from support.visits import source

LAYOUT = Tensor("layout", ("num_q_heads", None, None), "bool")
SIZE = Int("size", min=1)


def found(mask: Mask) -> list[str]:
    return [torch_source(element) for element in block_tables(trace(mask).expr)]


@pytest.mark.parametrize(
    ("mask_mod", "indices"),
    [
        (lambda b, h, q, kv: LAYOUT[h, q // 64, kv // 32], "h, q_idx // 64, kv_idx // 32"),
        (lambda b, h, q, kv: ~LAYOUT[h, kv // 8, q // SIZE], "h, kv_idx // 8, q_idx // size"),
        (
            lambda b, h, q, kv: LAYOUT[h, (q + 5) // 8, kv // 8] | (kv < 4),
            "h, (q_idx + 5) // 8, kv_idx // 8",
        ),
        (lambda b, h, q, kv: LAYOUT[h, q // 8, kv], None),
        (lambda b, h, q, kv: LAYOUT[h, q // 8, (q + kv) // 8], None),
        (lambda b, h, q, kv: LAYOUT[h, q // 8, 2 * kv // 8], None),
        (lambda b, h, q, kv: LAYOUT[h, 1, kv // 8] & (q >= kv), None),
    ],
)
def test_elements_of_blocks_of_rows_and_of_keys_are_found(
    mask_mod: Callable[..., Any], indices: str | None
) -> None:
    assert found(Mask(mask_mod, "mask")) == ([f"layout[{indices}]"] if indices else [])


def test_a_layout_hides_what_it_does_not_show() -> None:
    predicate = trace(block_sparse(block=SIZE) & causal())
    (element,) = block_tables(predicate.expr)
    assert torch_source(where_block(predicate, element, False).expr) == "False"
    assert torch_source(where_block(predicate, element, True).expr) == "q_idx >= kv_idx"


def test_beside_a_table_the_rest_of_a_mask_has_its_own_bounds() -> None:
    predicate = trace(bigbird(16))
    (element,) = block_tables(predicate.expr)
    rest = derive_bounds(where_block(predicate, element, False))
    assert rest.exact
    assert source(rest) == [
        ("0", "kv_len", "0", "tl.where(q_last // 16 <= 0, kv_len, 0)"),
        ("0", "min(16, kv_len)", "0", "min(16, kv_len)"),
        (
            "max(0, 16 * (q_first // 16) - 16)",
            "min(kv_len, 16 * (q_last // 16) + 32)",
            "max(0, 16 * (q_last // 16) - 16)",
            "min(kv_len, 16 * (q_first // 16) + 32)",
        ),
    ]
