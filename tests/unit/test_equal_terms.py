"""Terms that a conjunction says are equal: bounds by them, beside brute force."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import sympy
from hypothesis import Phase, given, settings

from flashgen import Int, Mask, Tensor, causal, chunked, sliding_window
from flashgen.symbolic import derive_bounds, derive_q_bounds, equal_terms, trace
from flashgen.symbols import KV_IDX
from support.visits import Call, Elements, check, sweep
from unit.test_bounds_random import (
    CHUNK,
    DIVISORS,
    KV_DOC,
    RELATIONS,
    WIDTHS,
    Pair,
    calls,
    mask_of,
    predicates,
)

N = Int("n", 4, min=1)
#: Read by ids; some lie outside.
STARTS = Tensor("starts", (None,), "int32")


@st.composite
def remainders(draw: st.DrawFn) -> Pair:
    """Conditions on the remainders of a query and a key that have one quotient, and on it."""
    d, width, compare = draw(DIVISORS), draw(WIDTHS), draw(st.sampled_from(RELATIONS))
    shift = draw(st.sampled_from([0, 0, -3, 5]))
    same: Pair = lambda q, kv: (q + shift) // d == (kv + shift) // d  # noqa: E731
    forms: list[Pair] = [
        lambda q, kv: compare(q % d, kv % d),
        lambda q, kv: compare((q + shift) % d, (kv + shift) % d + width),
        lambda q, kv: abs(q % d - kv % d) <= width,
        lambda q, kv: compare(kv % d, width),
        lambda q, kv: compare(q % d, width),
        lambda q, kv: (kv % d < 2) | (q % d >= kv % d),
    ]
    part = draw(st.sampled_from(forms))
    join = draw(st.sampled_from([operator.and_, operator.and_, operator.or_]))
    return lambda q, kv: join(same(q, kv), part(q, kv))


DOCUMENTS: list[Pair] = [
    lambda q, kv: (KV_DOC[0, q] == KV_DOC[0, kv]) & (kv - STARTS[KV_DOC[0, kv]] < 3),
    lambda q, kv: (KV_DOC[0, q] == KV_DOC[0, kv]) & (q - STARTS[KV_DOC[0, kv]] >= CHUNK),
    lambda q, kv: (KV_DOC[0, q] == KV_DOC[0, kv]) & ((KV_DOC[0, kv] > 2) | (q >= kv)),
    lambda q, kv: (KV_DOC[0, q] == KV_DOC[0, kv]) | (KV_DOC[0, kv] <= KV_DOC[0, q] + 1),
]


def _with_starts(call: Call) -> Call:
    return replace(call, params={**call.params, "starts": Elements([0, 2, 5, 9, 3, 14, 20])})


CALLS = calls(equal=True).map(_with_starts)
ANY = st.one_of(remainders(), remainders(), st.sampled_from(DOCUMENTS))


@sweep(200)
@given(predicates(ANY).map(lambda of: mask_of(of, True)), CALLS)
def test_they_are_sound_and_exact_where_they_say_so(mask: Mask, call: Call) -> None:
    check(mask, call)


@pytest.mark.parametrize("divisor", [512, N], ids=str)
@pytest.mark.parametrize(
    ("part", "same"),
    [
        (lambda q, k: q >= k, causal()),
        (lambda q, k: k <= q, causal()),
        (lambda q, k: (q - k >= 0) & (q - k <= 60), sliding_window(60, 0)),
        (lambda q, k: abs(q - k) <= 60, sliding_window(60, 60)),
    ],
)
def test_remainders_of_one_chunk_are_its_positions(divisor: Any, part: Any, same: Mask) -> None:
    """`(q // n == k // n) & (q % n >= k % n)` is chunked and causal."""
    batched = Mask(
        lambda b, h, q, k: (q // divisor == k // divisor) & part(q % divisor, k % divisor),
        "batchify",
        equal_lengths=True,
    )
    for derive in (derive_bounds, derive_q_bounds):
        found, expected = derive(trace(batched)), derive(trace(chunked(divisor) & same))
        assert found.intervals == expected.intervals
        assert found.exact and expected.exact


def test_a_term_in_the_way_becomes_one_of_the_tile() -> None:
    mask = Mask(
        lambda b, h, q, k: (KV_DOC[b, q] == KV_DOC[b, k]) & (k - STARTS[KV_DOC[b, k]] < 200),
        "prefixes",
        equal_lengths=True,
    )
    (interval,) = derive_bounds(trace(mask)).intervals
    assert interval.end.has(STARTS.sym) and not interval.end.has(KV_IDX)


def _leaks(expr: Any, kept: Any) -> Any:
    """The pairs of a condition, and those of all its alternatives."""
    for part in sympy.preorder_traversal(expr):
        yield from _PAIRS(part, kept)


_PAIRS: Callable[[Any, Any], Any] = equal_terms._pairs


def _of_the_other(expr: Any, kept: Any) -> Any:
    """Pairs of quotients, one of which is off by one."""
    return ((of, by + 1) for of, by in _PAIRS(expr, kept))


@pytest.mark.parametrize("wrong", [_leaks, _of_the_other])
def test_wrong_pairs_are_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_terms, "_pairs", wrong)

    @settings(sweep(200), phases=(Phase.generate,), report_multiple_bugs=False)
    @given(predicates(ANY).map(lambda of: mask_of(of, True)), CALLS)
    def run(mask: Mask, call: Call) -> None:
        derive_bounds.cache_clear()
        derive_q_bounds.cache_clear()
        check(mask, call)

    with pytest.raises(AssertionError):
        run()
