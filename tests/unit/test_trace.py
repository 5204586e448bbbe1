"""trace: the predicate of a mask, arranged for a kernel, and saying what the mask says."""

# ruff: noqa: SIM300  (either direction of a comparison is the point here)

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import sympy

from flashgen import Int, Mask, Tensor, causal, full, kv_len, q_len, sliding_window, truncate
from flashgen.errors import MaskError
from flashgen.masks import as_mask
from flashgen.symbolic import torch_source, trace
from flashgen.symbols import KV_IDX, Q_IDX, evaluate
from flashgen.tracing.expr import apply
from flashgen.tracing.operations import OPERATIONS

LEFT, RIGHT, COUNT = Int("left", 4), Int("right", 0), Int("count", 4, min=1)


@pytest.mark.parametrize(
    ("mask_mod", "expected"),
    [
        (lambda b, h, q, kv: q >= kv, "q_idx >= kv_idx"),
        (lambda b, h, q, kv: kv <= q, "q_idx >= kv_idx"),
        (lambda b, h, q, kv: q - kv >= 0, "q_idx >= kv_idx"),
        (lambda b, h, q, kv: 0 < q - kv, "q_idx > kv_idx"),
        (lambda b, h, q, kv: q - kv <= LEFT, "kv_idx >= q_idx - left"),
        (lambda b, h, q, kv: kv - q < LEFT, "q_idx + left > kv_idx"),
        (lambda b, h, q, kv: q + kv_len - q_len >= kv, "q_idx + kv_len - q_len >= kv_idx"),
        (lambda b, h, q, kv: LEFT > kv, "kv_idx < left"),
        (lambda b, h, q, kv: 3 <= kv, "kv_idx >= 3"),
        (lambda b, h, q, kv: 5 > q, "q_idx < 5"),
        (lambda b, h, q, kv: kv == q + 1, "q_idx + 1 == kv_idx"),
        (lambda b, h, q, kv: q - kv != 2, "q_idx - 2 != kv_idx"),
        (lambda b, h, q, kv: 3 * q >= 2 * kv, "3 * q_idx >= 2 * kv_idx"),
        (lambda b, h, q, kv: q / 41 >= kv, "q_idx >= 41 * kv_idx"),
        (lambda b, h, q, kv: (q - kv) / 5 < 2, "kv_idx > q_idx - 10"),
        (lambda b, h, q, kv: q / 6 == kv / 4, "2 * q_idx == 3 * kv_idx"),
        (
            lambda b, h, q, kv: q / LEFT >= 1.5 * kv,
            "q_idx.to(dtype) / left >= 1.5 * kv_idx.to(dtype)",
        ),
        (lambda b, h, q, kv: q / COUNT >= 2.0, "q_idx // count >= 2"),
        (lambda b, h, q, kv: (kv / 3).int() <= q, "kv_idx // 3 <= q_idx"),
        (lambda b, h, q, kv: abs(q - kv) <= q_len, "abs(kv_idx - q_idx) <= q_len"),
        (lambda b, h, q, kv: ~((q >= kv) & (kv >= 4)), "(kv_idx < 4) | (kv_idx > q_idx)"),
        (lambda b, h, q, kv: True, "True"),
        (lambda b, h, q, kv: (q >= kv) & (q < kv), "False"),
    ],
)
def test_kv_idx_stands_alone_on_one_side(mask_mod: Callable[..., Any], expected: str) -> None:
    assert torch_source(trace(Mask(mask_mod, "mask")).expr) == expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (full(), "True"),
        (causal(), "q_idx >= kv_idx"),
        (causal(align="bottom_right"), "q_idx + kv_len - q_len >= kv_idx"),
        (sliding_window(LEFT, 0), "(q_idx >= kv_idx) & (kv_idx >= q_idx - left)"),
        (sliding_window(LEFT, RIGHT), "(kv_idx >= q_idx - left) & (q_idx + right >= kv_idx)"),
        (~sliding_window(4, 0), "(kv_idx > q_idx) | (q_idx - 4 > kv_idx)"),
    ],
    ids=str,
)
def test_the_shipped_masks_read_well(mask: Mask, expected: str) -> None:
    assert torch_source(trace(mask).expr) == expected


def test_what_documents_have_in_common_cancels() -> None:
    """Positions within a document, as attention-gym's mask of documents counts them."""
    ids = Tensor("ids", ("kv_len",), "int32", sorted=True)
    starts = Tensor("starts", (None,), "int32")

    def within(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_logical = q_idx - starts[ids[q_idx]]
        kv_logical = kv_idx - starts[ids[kv_idx]]
        return (ids[q_idx] == ids[kv_idx]) & (q_logical >= kv_logical)

    plain = full() & (lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k))
    assert trace(full() & within).expr == trace(plain).expr


def test_elements_that_need_not_be_equal_stay() -> None:
    ids, kinds = (Tensor(name, ("kv_len",), "int32") for name in ("ids", "kinds"))
    either = full() & (lambda b, h, q, k: (ids[q] == ids[k]) | (q - ids[q] >= k - ids[k]))
    other = full() & (lambda b, h, q, k: (ids[q] == ids[k]) & (q - kinds[q] >= k - kinds[k]))
    assert "ids[q_idx]" in torch_source(trace(either).expr).split("|")[1]
    assert "kinds[q_idx]" in torch_source(trace(other).expr)


def test_quotients_are_cut_towards_zero() -> None:
    """As whole numbers: in floats 0.2 * 15 - 0.2 * 5 is less than 2."""

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return truncate((q - kv) / 5 + 1) == truncate(-kv / 41)

    traced = trace(Mask(mask_mod, "mask")).expr
    for q in range(120):
        for kv in range(120):
            seen = math.trunc(Fraction(q - kv + 5, 5)) == math.trunc(Fraction(-kv, 41))
            assert evaluate(traced, {"q_idx": q, "kv_idx": kv}) == seen


COMPARED = (">=", ">", "<=", "<", "==", "!=")


@pytest.mark.parametrize("name", COMPARED)
def test_quotients_by_a_number_of_the_call_are_exact(name: str) -> None:
    """In floats 41 * (1 / 41) is less than 1."""
    compare, n = OPERATIONS[name].concrete, Int("n", 41, min=1)

    def quotient(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return apply(name, (q - 60) / n, kv - 2)

    def turned(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return apply(name, kv - 2, (q - 60) / (2 * n) + 1)

    by_floors, by_turned = (trace(Mask(m, "mask")).expr for m in (quotient, turned))
    for expr in (by_floors, by_turned):
        assert not expr.atoms(sympy.Pow)
    for number, q, kv in product((1, 3, 41), range(0, 130), range(5)):
        values = {"q_idx": q, "kv_idx": kv, "n": number}
        assert evaluate(by_floors, values) == compare(Fraction(q - 60, number), kv - 2)
        assert evaluate(by_turned, values) == compare(kv - 2, Fraction(q - 60, 2 * number) + 1)


def test_quotients_by_a_number_of_the_call_are_cut_towards_zero() -> None:
    n = Int("n", 41, min=1)
    traced = trace(Mask(lambda b, h, q, kv: truncate((q - kv) / n) == 1, "mask")).expr
    for number, q, kv in product((1, 3, 41), range(0, 130), range(0, 130, 7)):
        values = {"q_idx": q, "kv_idx": kv, "n": number}
        assert evaluate(traced, values) == (math.trunc(Fraction(q - kv, number)) == 1)


def test_arranging_changes_no_meaning() -> None:
    mask = ~(causal() & sliding_window(2, 1)) | sliding_window(-3, 4)
    arranged = trace(mask).expr
    for q in range(8):
        for kv in range(8):
            values = {"q_idx": q, "kv_idx": kv}
            assert evaluate(arranged, values) == evaluate(mask.traced.sym, values)


def test_a_predicate_carries_what_the_mask_declares() -> None:
    predicate = trace(sliding_window(LEFT, RIGHT))
    assert predicate.params == (LEFT, RIGHT)
    assert predicate.equal_lengths
    assert predicate.label == "sliding_window(left, right)"
    assert predicate.expr.free_symbols == {Q_IDX, KV_IDX, LEFT.sym, RIGHT.sym}
    assert trace(full()).expr is sympy.true


def test_a_mask_that_is_no_condition_is_refused() -> None:
    with pytest.raises(MaskError, match="not a condition"):
        trace(Mask(lambda b, h, q, kv: q + kv, "sum"))


def test_a_function_that_draws_is_refused() -> None:
    """Traced once it would build, and its module would never be up to date."""
    numbers = random.Random(0)
    mask = as_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= numbers.randint(1, 2**30))
    with pytest.raises(
        MaskError, match=r"and then .* for the same arguments; .* draw what is random"
    ):
        trace(mask)
