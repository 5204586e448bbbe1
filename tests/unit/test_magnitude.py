"""Whole numbers that 32 bits may not hold: which parts of a mask or a score, and their bounds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy

from flashgen import Int, Tensor, kv_len, minimum, where
from flashgen.masks import as_mask
from flashgen.symbolic.magnitude import large_integers
from flashgen.symbols import KV_IDX, KV_LEN, Q_IDX, Q_LEN, evaluate
from support.variants import shipped_specs

ANY, SIZE = Int("any", min=-(2**30)), Int("size", min=1)
TABLE = Tensor("table", (None,), "int32")

LARGE = {
    "a_large_factor": (lambda b, h, q, k: (100 * q + k) % 7 < 3, {"kv_len + 100*q_len"}),
    "a_power": (lambda b, h, q, k: q * q > k, {"q_len**2"}),
    "a_number_of_the_call": (lambda b, h, q, k: k * ANY < q, {"kv_len*Abs(any)"}),
    "heads": (lambda b, h, q, k: (h * 1000 + b * 99) % 3 < k, {"99*batch + 1000*num_q_heads"}),
    "an_index": (lambda b, h, q, k: TABLE[q * kv_len + k] > 0, {"kv_len*q_len + kv_len"}),
    "within_an_extreme": (lambda b, h, q, k: minimum(q * k, 9) < k, {"Max(9, kv_len*q_len)"}),
    "within_a_choice": (lambda b, h, q, k: where(q > 3, q * 99, 0) < k, {"Max(0, 99*q_len)"}),
    "within_a_quotient": (lambda b, h, q, k: (q * 99) // 7 < k, {"99*q_len"}),
}
SMALL = {
    "sums": lambda b, h, q, k: q - k + ANY < 2 * h,
    "small_factors": lambda b, h, q, k: 2 * k >= q + 64 * h,
    "where_a_chunk_begins": lambda b, h, q, k: (q // SIZE) * SIZE <= k,
    "remainders": lambda b, h, q, k: (q % 1000) < k,
}


def _large(mask_mod: Any) -> dict[Any, Any]:
    return large_integers(as_mask(mask_mod).traced.sym)


@pytest.mark.parametrize("name", LARGE)
def test_bounds(name: str) -> None:
    mask_mod, bounds = LARGE[name]
    assert set(map(str, _large(mask_mod).values())) == bounds


@pytest.mark.parametrize("name", SMALL)
def test_what_always_fits(name: str) -> None:
    assert not _large(SMALL[name])


@pytest.mark.parametrize("name", ["a_large_factor", "a_power", "within_an_extreme"])
def test_a_bound_is_one(name: str) -> None:
    sizes = {Q_LEN.name: 7, KV_LEN.name: 9}
    for part, bound in _large(LARGE[name][0]).items():
        most = evaluate(bound, sizes)
        for q, k in itertools.product(range(7), range(9)):
            assert abs(evaluate(part, sizes | {Q_IDX.name: q, KV_IDX.name: k})) <= most


def test_floats_are_none_of_these() -> None:
    assert not large_integers(sympy.Symbol("score", real=True) + Q_IDX * KV_IDX)


def test_shipped_variants_need_no_check() -> None:
    for spec in shipped_specs().values():
        assert not large_integers(spec.mask.traced.sym)
