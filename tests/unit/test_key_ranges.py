"""Range tables: which keys a condition on each key alone shows, and the bounds by them."""

from __future__ import annotations

import operator
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from flashgen import AttentionSpec, Mask, Tensor
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.symbolic import RangeTable, derive_bounds, derive_q_bounds, trace
from support.visits import Call, Elements, check, range_table, sweep
from unit.test_bounds_random import (
    ANYTHING,
    KV_ANY,
    KV_DOC,
    KV_FLAG,
    Q_ANY,
    Q_FLAG,
    Pair,
    calls,
    mask_of,
    predicates,
)

#: Of runs, as padding is, not at random.
ALONE: list[Pair] = [
    *[lambda q, kv: KV_FLAG[0, kv]] * 3,
    lambda q, kv: ~KV_FLAG[0, kv],
    *[lambda q, kv, compare=compare: compare(KV_ANY[0, kv], 3) for compare in
      (operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne)],
    lambda q, kv: 2 <= KV_DOC[0, kv],  # noqa: SIM300
    *[lambda q, kv: Q_FLAG[0, q]] * 2,
    lambda q, kv: Q_ANY[0, q] != 3,
]  # fmt: skip
CAUSAL: list[Pair] = [lambda q, kv: kv <= q, lambda q, kv: abs(q - kv) <= 3]


@st.composite
def padded(draw: st.DrawFn, equal: bool = False) -> Call:
    """A call whose flags, and numbers equal to 3, come in a few runs."""
    call = draw(calls(equal))
    random = Random(draw(st.integers(0, 99)))
    made: dict[str, Any] = {}
    for side, length in (("q", call.q), ("kv", call.kv)):
        cuts = sorted(random.randrange(length + 1) for _ in range(draw(st.integers(0, 3))))
        parity = random.randrange(2)
        runs = [(sum(i >= cut for cut in cuts) + parity) % 2 for i in range(length)]
        made[f"{side}_flag"] = Elements([[bool(run) for run in runs]])
        made[f"{side}_any"] = Elements([[3 if run else random.randrange(9) for run in runs]])
    return replace(call, params={**call.params, **made})


LEAVES = st.one_of(st.sampled_from(ALONE), st.sampled_from(ALONE), st.sampled_from(CAUSAL))


@sweep(200)
@given(
    st.one_of(predicates(LEAVES), predicates(st.one_of(LEAVES, ANYTHING))).map(mask_of), padded()
)
def test_bounds_by_them_are_sound(mask: Mask, call: Call) -> None:
    check(mask, call, ranges=True)


@sweep(60)
@given(predicates(LEAVES).map(lambda of: mask_of(of, True)), padded(equal=True))
def test_and_of_equal_lengths(mask: Mask, call: Call) -> None:
    check(mask, call, ranges=True)


def _of_the_run(atom: Any, ranges: Any) -> Any:
    """Bounds of all tiles that may be visited, for those without a mask."""
    return atom


def _run_of_all(table: RangeTable, values: Any) -> Elements:
    """A run that is as long as the range, whatever lies between."""
    first, end, *_ = range_table(table, values).rows[0]
    return Elements([[first, end, first, end]])


def _the_run_alone(table: RangeTable, values: Any) -> Elements:
    """The run in place of the range."""
    *_, first, end = range_table(table, values).rows[0]
    return Elements([[first, end, first, end]])


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        ("flashgen.symbolic.bounds", "certain", _of_the_run),
        ("support.visits", "range_table", _run_of_all),
        ("support.visits", "range_table", _the_run_alone),
    ],
)
def test_wrong_ones_are_found(
    where: str, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{where}.{name}", wrong)

    @settings(sweep(200), phases=(Phase.generate,), report_multiple_bugs=False)
    @given(predicates(LEAVES).map(mask_of), padded())
    def run(mask: Mask, call: Call) -> None:
        derive_bounds.cache_clear()
        derive_q_bounds.cache_clear()
        check(mask, call, ranges=True)

    with pytest.raises(AssertionError):
        run()
    derive_bounds.cache_clear()
    derive_q_bounds.cache_clear()


KEEP = Tensor("keep", ("batch", "kv_len"), "bool")
PADDED = Mask(lambda b, h, q, kv: (kv <= q) & KEEP[b, kv], "padded", equal_lengths=True)


def test_padding_beside_a_causal_mask() -> None:
    (interval,) = derive_bounds(trace(PADDED), ranges=True).intervals
    assert [str(end) for end in interval.expressions[:4]] == [
        "Load(keep_range, b, 0)",
        "Min(q_last + 1, Load(keep_range, b, 1))",
        "Load(keep_range, b, 2)",
        "Min(q_first + 1, Load(keep_range, b, 3))",
    ]


@pytest.mark.parametrize(
    "forms", [("dense", "varlen"), ("dense", "cache"), ("dense", "mesh")], ids=str
)
def test_forms_that_read_parts_of_tensors_have_none(forms: tuple[str, ...]) -> None:
    plan = lower(AttentionSpec(64, mask=PADDED, forms=forms), "x")
    assert not plan.range_tables and not backward_plan(plan).range_tables
    assert lower(AttentionSpec(64, mask=PADDED), "x").range_tables
