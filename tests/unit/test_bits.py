"""Shifts, bits as conditions, and what is known of a number's size."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import sympy
import torch
from hypothesis import given

from flashgen import Constant, Int, Mask, Tensor, causal, maximum
from flashgen.errors import MaskError
from flashgen.masks import as_mask
from flashgen.reference import visibility
from flashgen.symbolic import torch_source, trace, triton_source
from flashgen.symbolic.magnitude import large_integers
from flashgen.symbols import (
    KV_IDX,
    Q_HEADS,
    Q_IDX,
    BitAnd,
    FloorMod,
    H,
    Load,
    ShiftLeft,
    ShiftRight,
    evaluate,
)
from flashgen.tracing.expr import Expr
from flashgen.tracing.signs import LEAST, at_least, most
from support.expressions import VALUES, integers
from support.visits import sweep

Q, KV, HEAD = Expr(Q_IDX), Expr(KV_IDX), Expr(H)
WORDS = Tensor("words", ("kv_len",), "int32")
LEFT = Int("left", 4)
ELEMENT = Load(WORDS.sym, Q_IDX)


def test_a_shift_by_a_number_is_a_product_or_a_quotient() -> None:
    assert (Q << 3).sym == 8 * Q_IDX
    assert (Q >> 3).sym == (Q // 8).sym
    assert (Q >> 40).sym == ShiftRight(Q_IDX, 31)  # of 32 bits nothing is left


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (1 << HEAD, ShiftLeft(1, H)),
        (2 << LEFT, ShiftLeft(2, LEFT.sym)),
        (WORDS[Q] >> KV % 32, ShiftRight(ELEMENT, FloorMod(KV_IDX, 32))),
        (WORDS[Q] >> (KV & 31), ShiftRight(ELEMENT, BitAnd(KV_IDX, 31))),
        (WORDS[Q] >> HEAD, ShiftRight(ELEMENT, sympy.Min(31, H))),
        (WORDS[Q] >> KV % 33, ShiftRight(ELEMENT, sympy.Min(31, FloorMod(KV_IDX, 33)))),
        (torch.bitwise_right_shift(WORDS[Q], HEAD % 8), ShiftRight(ELEMENT, FloorMod(H, 8))),
    ],
)
def test_other_shifts(expr: Expr, expected: Any) -> None:
    assert expr.sym == expected


def test_they_are_printed_with_parentheses() -> None:
    bits = ((WORDS[Q] + 1 >> HEAD) & 5) - (1 << KV % 4)
    assert triton_source(bits.sym) == (
        "(((_at_1d(words, q_idx) + 1) >> min(31, h)) & 5) - (1 << (kv_idx % 4))"
    )
    assert "(words[q_idx] + 1) >> torch.clamp(h, max=31)" in torch_source(bits.sym)


def test_a_mask_of_bits_is_a_condition() -> None:
    def bits(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (WORDS[q_idx] >> (kv_idx % 8)) & 1

    mask = as_mask(bits)
    values = torch.tensor([0b101, 0b10, -1, 0, 7], dtype=torch.int32)
    seen = torch.tensor([[v.item() >> kv & 1 == 1 for kv in range(5)] for v in values])
    below = torch.ones(5, 5, dtype=torch.bool).tril()
    for other, expected in (
        (mask, seen),
        (~mask, ~seen),
        (mask & causal(), seen & below),
        (causal() | mask, seen | below),
    ):
        found = visibility(other, 1, 1, 5, 5, params={"words": values})
        assert torch.equal(found.broadcast_to(1, 1, 5, 5)[0, 0], expected)
        predicate = trace(other).expr
        for q, kv in ((0, 0), (0, 1), (2, 4), (4, 3)):
            known = {"words": tuple_indexed(values), "q_idx": q, "kv_idx": kv, "b": 0, "h": 0}
            assert bool(evaluate(predicate, known)) == bool(expected[q, kv])


def tuple_indexed(values: torch.Tensor) -> dict[tuple[int], int]:
    return {(i,): int(value) for i, value in enumerate(values)}


@pytest.mark.parametrize("number", [Q & 3, Q % 3, (Q & 1) + 1, WORDS[Q]])
def test_other_numbers_are_none(number: Expr) -> None:
    with pytest.raises(MaskError, match="not a condition"):
        _ = Mask(lambda b, h, q_idx, kv_idx: number, "numbers").traced


def test_calls_are_held_to_31_bits() -> None:
    part = ShiftLeft(1, H)
    assert large_integers(sympy.Eq(BitAnd(ELEMENT, part), 0)) == {part: ShiftLeft(1, Q_HEADS - 1)}
    assert large_integers(ShiftLeft(1, FloorMod(KV_IDX, 31))) == {}


def test_an_element_of_a_positive_constant_divides() -> None:
    powers = Constant("powers", [1, 2, 4])
    at = Load(powers.sym, FloorMod(KV_IDX, 3))
    assert (Q // powers[KV % 3]).sym == (Q // maximum(powers[KV % 3], 1)).sym
    assert at in (Q % powers[KV % 3]).sym.atoms(Load)
    for values in ([0, 1], [-2, 4]):
        with pytest.raises(MaskError, match="is not known to be positive"):
            Q // Constant("powers", values)[KV % 2]
    assert (Q // (1 << HEAD)).sym.args[1] == ShiftLeft(1, H)


@sweep(300)
@given(integers(2), st.integers(0, 5), st.integers(0, 5), st.integers(0, 3))
def test_what_is_known_of_a_number_holds(expr: Any, q: int, kv: int, h: int) -> None:
    values = {**VALUES, "b": 1, "h": h, "q_idx": q, "kv_idx": kv}
    value = evaluate(expr, values)
    limit = most(expr)
    assert limit is None or value <= limit
    assert not at_least(expr, 0, LEAST) or value >= 0
    assert not at_least(expr, 1, LEAST) or value >= 1
