"""Constants: what they are made of, what tells them apart, and what they are in expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flashgen import (
    AttentionSpec,
    Constant,
    Int,
    Mask,
    Score,
    Tensor,
    alibi,
    block_sparse,
    relative_bias,
    softmax,
)
from flashgen.errors import MaskError
from flashgen.kernels.forward_hopper import space as hopper_space
from flashgen.kernels.forward_triton.rank import rank
from flashgen.kernels.forward_triton.space import search_space
from flashgen.kernels.workload import typical_params, typical_workload, usual_heads, usual_lengths
from flashgen.loader import Variant
from flashgen.plan import lower
from flashgen.reference import final_scores, visibility
from flashgen.symbols import KV_IDX, Q_IDX, H
from flashgen.tracing.expr import Expr, bound
from flashgen.validate import validate

ROWS = [[True, False, True], [False, True, True]]


@pytest.mark.parametrize(
    "values",
    [ROWS, tuple(map(tuple, ROWS)), torch.tensor(ROWS), np.array(ROWS), list(torch.tensor(ROWS))],
    ids=["lists", "tuples", "tensor", "array", "tensors in a list"],
)
def test_values_of_any_make_are_the_same_constant(values: Any) -> None:
    constant = Constant("table", values)
    assert constant.dtype == "bool"
    assert constant.declaration == Constant("table", ROWS).declaration
    assert constant.elements.rows == tuple(map(tuple, ROWS))
    assert torch.equal(constant.tensor(), torch.tensor(ROWS))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([True], "bool"),
        ([1, 0], "int32"),
        (torch.tensor([1, 2]), "int32"),
        ([1, 0.5], "float32"),
        (np.float16([0.5]), "float32"),
    ],
)
def test_the_dtype_is_that_of_the_elements(values: Any, dtype: str) -> None:
    assert Constant("table", values).dtype == dtype
    as_bfloat16 = Constant("table", values, "bfloat16")
    assert as_bfloat16.tensor().dtype == torch.bfloat16
    assert torch.equal(as_bfloat16.tensor(), torch.as_tensor(values).bfloat16())


def test_what_makes_another_constant() -> None:
    first = Constant("table", [1, 2], dims=("q_len",), doc="one")
    assert first.declaration == Constant("table", [1, 2], dims=("q_len",), doc="two").declaration
    others = [
        Constant("other", [1, 2], dims=("q_len",)),
        Constant("table", [1, 3], dims=("q_len",)),
        Constant("table", [[1, 2]], dims=(None, "q_len")),
        Constant("table", [1, 2], "float32", dims=("q_len",)),
        Constant("table", [1, 2], dims=("kv_len",)),
        Constant("table", [1, 2], dims=(("q_len", 2),)),
        Constant("table", [1, 2]),
    ]
    assert len({constant.declaration for constant in (first, *others)}) == 8


def _sees(constant: Tensor) -> Mask:
    return Mask(lambda b, h, q, kv: constant[q // 4] >= kv, "sees")


def test_one_element_makes_another_spec() -> None:
    one, two = (AttentionSpec(64, mask=_sees(Constant("t", [1, x]))) for x in (2, 3))
    assert one.mask.label == two.mask.label
    assert one.digest != two.digest and one != two
    assert one.digest == AttentionSpec(64, mask=_sees(Constant("t", (1, 2)))).digest


def test_a_constant_is_no_parameter_of_the_spec() -> None:
    left, table = Int("left"), Constant("table", [3])
    mask = Mask(lambda b, h, q, kv: (q - left <= kv) & (table[0 * q] >= kv), "mine")
    spec = AttentionSpec(64, mask=mask, normaliser=softmax(sink=lambda b, h: table[0 * h]))
    assert spec.params == (left,)
    assert spec.constants == (table,)
    assert spec.declared == (left, table)


def test_two_of_one_name_are_told_apart() -> None:
    one, two = Constant("table", [1, 2]), Constant("table", [1, 3])
    with pytest.raises(MaskError) as caught:
        (_sees(one) & _sees(two)).params  # noqa: B018
    assert f"two parameters are named 'table': {one!r} and {two!r}" in str(caught.value)
    assert repr(one) != repr(two)
    assert (_sees(one) | _sees(Constant("table", [1, 2]))).params == (one,)


def test_whether_numbers_fall_is_seen() -> None:
    assert Constant("ids", [[0, 0, 2], [1, 5, 5]]).sorted
    assert not Constant("ids", [[0, 0, 2], [1, 5, 4]]).sorted
    assert not Constant("ids", [0.0, 1.0]).sorted
    assert not Constant("ids", [False, True]).sorted
    ids = Constant("ids", [0] * 40 + [1] * 60, dims=("kv_len",))
    plan = lower(AttentionSpec(64, mask=lambda b, h, q, kv: ids[q] == ids[kv]), "packed")
    assert plan.bounds.exact and {t.keys for t in plan.row_tables} == {ids}


def test_elements_are_what_kernels_read() -> None:
    elements = Constant("table", ROWS).elements
    assert [[elements[i, j] for j in range(3)] for i in range(2)] == ROWS
    assert [elements[i, j] for i, j in ((-1, 0), (0, -1), (2, 0), (0, 3))] == [0, 0, 0, 0]


def test_indexed_by_symbols_numbers_and_tensors() -> None:
    table = Constant("table", [[1.5, 2.5], [3.5, 4.5]])
    traced = table[Expr(H), Expr(Q_IDX) - Expr(KV_IDX)]
    assert str(traced) == "table[h, q_idx - kv_idx]" and traced.params == (table,)
    with bound({}):
        assert table[1, 0] == 3.5
        assert table[torch.tensor([0, 1]), torch.tensor([1, 1])].tolist() == [2.5, 4.5]
        assert table[1][0] == 3.5
        assert table[torch.tensor([0, 1])][torch.tensor([1, 1])].tolist() == [2.5, 4.5]
    assert table[Expr(H)][Expr(Q_IDX)].sym == table[Expr(H), Expr(Q_IDX)].sym
    with pytest.raises(MaskError, match="table has 2 dimensions and was given 3 indices"):
        table[Expr(H), 0, 0]


def test_the_oracle_needs_no_value_for_it() -> None:
    limits = Constant("limits", [2, 0])
    seen = visibility(lambda b, h, q, kv: kv < limits[q], 1, 1, 2, 3)
    assert seen.tolist() == [[True, True, False], [False, False, False]]
    slopes = Constant("slopes", [0.1, 0.2], "bfloat16")
    score = Score(lambda s, b, h, q, kv: s + slopes[h], "steep")
    scores = torch.zeros(1, 2, 1, 1, dtype=torch.float64)
    found = final_scores(scores, lambda b, h, q, kv: kv <= q, score).flatten()
    assert torch.equal(found, torch.tensor([0.1, 0.2]).bfloat16().double())


def test_what_ships_takes_constants() -> None:
    slopes = Constant("slopes", [0.5, 0.25], dims=("num_q_heads",))
    near = Constant("near", [[0.0] * 7] * 2, dims=("num_q_heads", None))
    spec = AttentionSpec(
        64,
        score=alibi(slopes, align="top_left").then(relative_bias(3, near, align="top_left")),
        normaliser=softmax(sink=slopes),
    )
    assert spec.params == () and spec.constants == (slopes, near)
    assert not validate(Variant("known", spec, "specs/known.py"))
    assert "alibi(slopes" in spec.score.label


def test_a_run_time_step_is_a_parameter() -> None:
    size = Int("size", 64, min=1)
    table = Constant("table", [1, 2, 3], dims=(("q_len", size),))
    mask = Mask(lambda b, h, q, kv: table[q // 64] >= kv, "mine")
    assert AttentionSpec(64, mask=mask).params == (size,)
    assert [(of, str(most)) for of, most in table.limits] == [("q_len", "3*size")]


def test_ranking_keeps_to_the_calls_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Constant("table", [[9, 50, 100, 0]] * 3, dims=("num_q_heads", ("q_len", 256)))
    mask = Mask(lambda b, h, q, kv: table[h, q // 256] >= kv, "mine")
    plan = lower(AttentionSpec(64, mask=mask), "x")
    assert usual_lengths(plan) == (1024,)
    assert usual_lengths(plan, (512, 2048, 4096)) == (512, 1024)
    assert usual_heads(plan) == 3
    work = typical_workload(plan, 1024)
    assert (work.num_q_heads, work.q_len, dict(work.params)["table"][0, 1]) == (3, 1024, 50)
    candidates = search_space(plan, "sm_90").candidates
    assert len(rank(plan, "sm_90", candidates)) == len(candidates)
    lengths = []
    monkeypatch.setattr(
        hopper_space,
        "typical_workload",
        lambda plan, length: lengths.append(length) or typical_workload(plan, length),
    )
    gluon = hopper_space.hopper_space(plan).candidates
    assert len(hopper_space.rank_hopper(plan, gluon)) == len(gluon) > 0
    assert lengths == [1024]


def test_tensors_are_as_large_as_the_call_that_is_measured() -> None:
    """Whose numbers have their defaults, or are as small as they may be."""
    reach, block = Int("reach", default=64), Int("block", default=128, min=1)
    spec = AttentionSpec(64, mask=block_sparse(block=block), score=relative_bias(reach))
    params = typical_params(lower(spec, "x"), torch.zeros(1, 2, 300, 64))
    assert (params["reach"], params["block"]) == (64, 128)
    assert params["relative_bias"].shape == (2, 2 * 64 + 1)
    assert params["layout"].shape == (2, 3, 3)


def test_a_taken_name_is_refused() -> None:
    spec = AttentionSpec(64, mask=_sees(Constant("_CONSTANTS", [1])))
    [violation] = validate(Variant("mine", spec, "specs/mine.py"))
    assert "constant '_CONSTANTS' is a name that the generated module uses" in str(violation)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Constant("t", []), "Constant('t'): values are empty; give an element at least"),
        (lambda: Constant("t", [[1], []]), "Constant('t'): values are empty; give"),
        (
            lambda: Constant("t", [[1, 2], [3]]),
            "Constant('t'): values are ragged, with parts of the shapes (2,) and (1,); "
            "give parts of one shape",
        ),
        (lambda: Constant("t", [1, [2]]), "with parts of the shapes () and (1,)"),
        (
            lambda: Constant("t", 3),
            "Constant('t'): values are 3, which has no dimension; give a list",
        ),
        (
            lambda: Constant("t", torch.tensor(3)),
            "Constant('t'): values are 3, which has no dimension; give",
        ),
        (lambda: Constant("t", "xx"), "Constant('t'): values hold 'xx'; give bools or finite"),
        (lambda: Constant("t", [1.0, float("nan")]), "values hold nan; give bools or finite"),
        (lambda: Constant("t", [-torch.inf]), "values hold -inf; give bools or finite numbers"),
        (lambda: Constant("t", [None]), "values hold None; give bools or finite numbers"),
        (lambda: Constant("t", [2], "bool"), "values hold 2; give True or False, 1 or 0"),
        (lambda: Constant("t", [1.0], "bool"), "values hold 1.0; give True or False, 1 or 0"),
        (lambda: Constant("t", [0.5], "int32"), "values hold 0.5; give whole numbers of 32 bits"),
        (lambda: Constant("t", [2**31]), "values hold 2147483648; give whole numbers of 32 bits"),
        (lambda: Constant("t", [70000], "float16"), "values hold 70000; give numbers of the range"),
        (lambda: Constant("t", [10**400]), "give whole numbers of 32 bits"),
        (lambda: Constant("t", [0.5, 10**400]), "give numbers of the range of float32"),
        (lambda: Constant("t", [-1e39]), "values hold -1e+39; give numbers of the range"),
        (lambda: Constant("t", [[[[[1]]]]]), "Constant('t'): dims=(1, 1, 1, 1, 1); give a tuple"),
        (lambda: Constant("t", [1], "int8"), "Constant('t'): dtype='int8' is unknown; take one"),
        (lambda: Constant("q", [1]), "Constant('q'): not usable as an argument's name"),
        (
            lambda: Constant("t", torch.zeros(1025, 1024)),
            "Constant('t'): values are over 2**20 elements; declare a Tensor, which the call",
        ),
        (
            lambda: Constant("t", [1], dims=("q_len", "kv_len")),
            "Constant('t'): dims=('q_len', 'kv_len'); give one for each of the sizes (1,)",
        ),
        (
            lambda: Constant("t", [1], dims="num_q_heads"),
            "Constant('t'): dims='num_q_heads'; give one for each of the sizes (1,), in a tuple",
        ),
        (lambda: Constant("t", [1], dims=3), "Constant('t'): dims=3; give one for each of the"),
        (lambda: Constant("t", [1], doc="a\nb"), "Constant('t'): doc='a\\nb'; give one line of"),
        (lambda: Constant("t", [1, 2])[-1], "t is indexed by -1, which does not count from the"),
        (lambda: Constant("t", [1, 2])[-1], "write an index from 0 up: 1 for the one meant"),
        (lambda: list(Constant("t", [1, 2])), "t is iterated over, as by `for`, `in`, sum and"),
        (
            lambda: Constant("t", [1], dims=("batch",)),
            "Constant('t'): a dimension is 'batch'; write one of num_q_heads, q_len, kv_len, "
            "('q_len', 128) for an entry each 128 positions, or None",
        ),
        (lambda: Constant("t", [1], dims=(("q_len", 0),)), "a dimension is ('q_len', 0); write"),
        (lambda: Constant("t", [1], dims=(("q_len", True),)), "a dimension is ('q_len', True)"),
        (lambda: Constant("t", [1], dims=(("q_len", Int("n")),)), "a dimension is ('q_len', Int"),
        (lambda: Constant("t", [1], dims=(("num_q_heads", 2),)), "a dimension is ('num_q_heads'"),
    ],
)
def test_mistakes(declare: Callable[[], Any], message: str) -> None:
    with pytest.raises(MaskError) as caught:
        declare()
    assert message in str(caught.value)
