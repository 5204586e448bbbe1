"""Expr and Int: what they build, what they refuse, and what they stand for inside `bound`."""

from __future__ import annotations

import linecache
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
import torch

from flashgen import Float, Int, Tensor, kv_len, maximum, minimum, q_len, tanh, where
from flashgen.errors import MaskError
from flashgen.params import RESERVED_NAMES
from flashgen.symbols import (
    KV_IDX,
    Q_IDX,
    SCORE,
    BitAnd,
    FloorDiv,
    FloorMod,
    H,
    Load,
    Truncate,
    evaluate,
)
from flashgen.tracing.expr import Expr, bound, concrete

Q, KV, HEAD = Expr(Q_IDX), Expr(KV_IDX), Expr(H)
LEFT = Int("left", 4)
SIZE = Int("size", 4, min=1)
CAP = Float("cap", 30.0, above=0)
DOC = Tensor("doc", ("batch", "kv_len"), "int32", sorted=True)
SLOPES = Tensor("slopes", ("num_q_heads",))
THREE = Tensor("three", (3,))
FOUR = Tensor("four", ("kv_len", 4))
LONG = Tensor("long", ("kv_len", 17))


def test_importing_flashgen_imports_neither_torch_nor_triton() -> None:
    code = "import flashgen, sys; print(sorted({'torch', 'triton'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (Q + 1, Q_IDX + 1),
        (1 + Q, Q_IDX + 1),
        (Q - KV, Q_IDX - KV_IDX),
        (5 - Q, 5 - Q_IDX),
        (2 * Q, 2 * Q_IDX),
        (-Q, -Q_IDX),
        (abs(Q - KV), sympy.Abs(Q_IDX - KV_IDX)),
        (Q // 4, FloorDiv(Q_IDX, 4)),
        (Q % 4, FloorMod(Q_IDX, 4)),
        (Q // 1, Q_IDX),
        (Q % 1, sympy.Integer(0)),
        (Q + np.int64(3), Q_IDX + 3),
        ((Q >= KV) & True, sympy.Ge(Q_IDX, KV_IDX)),
        (False | (Q >= KV), sympy.Ge(Q_IDX, KV_IDX)),
        (~(Q >= KV), sympy.Lt(Q_IDX, KV_IDX)),
        (Q >= Q, sympy.true),
        (Q != Q, sympy.false),
        (Q / 2, Q_IDX / 2),
        (1 / CAP, 1 / CAP.sym),
        (Q**2, Q_IDX**2),
        (Q << 3, 8 * Q_IDX),
        (Q >> 3, FloorDiv(Q_IDX, 8)),
        (Q & 1, BitAnd(Q_IDX, 1)),
        (~Q, -Q_IDX - 1),
        (Q + 0.5, Q_IDX + 0.5),
        (Q + np.float32(0.5), Q_IDX + 0.5),
        (torch.exp2(Q), 2**Q_IDX),
        (torch.tanh(Q / CAP) * CAP, sympy.tanh(Q_IDX / CAP.sym) * CAP.sym),
        (
            torch.where(Q >= KV, Q, 0),
            sympy.Piecewise((Q_IDX, (Q >= KV).sym), (0, True), evaluate=False),
        ),
        (where(Q >= 1, Q > 2, KV > 3), ((Q >= 1) & (Q > 2) | ~(Q >= 1) & (KV > 3)).sym),
        (torch.clamp(Q, 2, max=9), sympy.Min(9, sympy.Max(2, Q_IDX))),
        (Q.clamp(min=2), sympy.Max(2, Q_IDX)),
        ((Q - KV).abs(), sympy.Abs(Q_IDX - KV_IDX)),
        (torch.div(Q, 4, rounding_mode="floor"), FloorDiv(Q_IDX, 4)),
        ((Q / 3).to(torch.int32), FloorDiv(Q_IDX, 3)),
        ((Q / CAP).to(torch.int32), Truncate(Q_IDX / CAP.sym)),
        ((Q - KV).float(), Q_IDX - KV_IDX),
        (Q.bool(), sympy.Ne(Q_IDX, 0)),
        (DOC[0, Q], Load(DOC.sym, 0, Q_IDX)),
        (SLOPES[KV] * 2, 2 * Load(SLOPES.sym, KV_IDX)),
    ],
    ids=str,
)
def test_operators_build_what_they_say(built: Expr, expected: Any) -> None:
    assert built.sym == expected


def test_comparisons_keep_the_sides_as_written() -> None:
    relation = (kv_len - Q < 2 * KV).sym
    assert (relation.lhs, relation.rhs) == (kv_len.sym - Q_IDX, 2 * KV_IDX)


def test_integer_division_rounds_down_as_python_does() -> None:
    for a in range(-9, 10):
        for b in range(1, 5):
            assert FloorDiv(sympy.Integer(a), sympy.Integer(b)) == a // b
            assert FloorMod(sympy.Integer(a), sympy.Integer(b)) == a % b


@pytest.mark.parametrize(
    "divisor",
    [
        kv_len,
        KV + 1,
        2 * HEAD + 3,
        SIZE * kv_len,
        SIZE * SIZE + LEFT,
        maximum(DOC[0, HEAD], 1),
        torch.clamp(LEFT, min=2),
        minimum(SIZE, kv_len),
        where(Q > KV, SIZE, 4),
    ],
    ids=str,
)
def test_divisors_that_are_positive_by_their_form(divisor: Expr) -> None:
    assert (Q // divisor).sym == FloorDiv(Q_IDX, divisor.sym)
    assert (Q % divisor).sym == FloorMod(Q_IDX, divisor.sym)


@pytest.mark.parametrize(
    "divisor",
    [
        LEFT,
        LEFT * SIZE,
        LEFT + HEAD,
        Q - KV,
        SIZE - 1,
        1 - LEFT,
        DOC[0, KV],
        DOC[0, KV] + 1,
        minimum(SIZE, LEFT),
        maximum(DOC[0, KV], 0),
        where(Q > KV, SIZE, LEFT),
        SIZE // 2,
    ],
    ids=str,
)
def test_other_divisors_are_refused(divisor: Expr) -> None:
    with pytest.raises(MaskError, match="is not known to be positive; divide by a positive number"):
        Q // divisor
    with pytest.raises(MaskError, match=r"or by maximum\(x, 1\)"):
        Q % divisor


def test_exclusive_or_is_true_for_exactly_one() -> None:
    expr = ((Q >= 2) ^ (KV >= 2)).sym
    for q in (1, 2):
        for kv in (1, 2):
            assert evaluate(expr, {"q_idx": q, "kv_idx": kv}) == ((q >= 2) ^ (kv >= 2))


def test_parameters_are_kept_in_the_order_of_first_use() -> None:
    right = Int("right")
    assert ((Q + right >= KV) & (KV >= Q - LEFT) & (right > 0)).params == (right, LEFT)


def test_torch_functions_that_are_operators_trace() -> None:
    seen = torch.logical_and(torch.ge(Q, KV), torch.ge(LEFT, torch.sub(Q, KV)))
    assert seen.sym == ((Q >= KV) & (LEFT >= Q - KV)).sym
    assert torch.abs(Q - KV).sym == sympy.Abs(Q_IDX - KV_IDX)


# Each of these runs a line of "the user's own" and must be told about in the user's terms.
MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: 0 <= Q - KV <= 4, "(a <= x) & (x < b) for a chained comparison"),
    (lambda: Q >= KV and Q < 5, "write & for `and`"),
    (lambda: Q / 0, "`q_idx` is divided by zero"),
    (lambda: (Q / 2) % 0.0, "`q_idx/2` is divided by zero; divide by"),
    (lambda: CAP % 0.0, "`cap` is divided by zero; divide by something else"),
    (lambda: (Q / 2) << 3, "`<<` takes whole numbers and was given `q_idx/2`"),
    (lambda: 1 / (Q > 2), "`where(q_idx > 2, 1, 0)` may be 0 and divides"),
    (lambda: Q << KV - Q, "`<<` shifts by `kv_idx - q_idx`, which is not known to be 0 or more"),
    (lambda: Q >> -1, "shift by x % 32 or by maximum(x, 0)"),
    (lambda: 1 << maximum(DOC[0, KV], 0), "of which no largest value is known; shift by x % 16"),
    (lambda: 1 << KV % 32, "`1 << kv_idx % 32` needs more than the 31 bits of a whole number here"),
    (lambda: 3 << Q % 31, "shift by less, or the other side to the right: (x >> n) & 1 is the bit"),
    (lambda: Q.view(2, 3), "which is a single one, is given the sizes (2, 3); leave it out"),
    (lambda: Q.shape[0], "size 0 of a symbolic value, which has no dimension; sizes are q_len"),
    (lambda: KV.size(-1), "size -1 of a symbolic value, which has no dimension"),
    (lambda: LONG[Q] > 1, "`long[q_idx]` has 17 elements, and a kernel computes each by itself"),
    (lambda: torch.dot(LONG[Q], LONG[Q]), "index one, or declare a last dimension of 16 at most"),
    (lambda: FOUR[Q] > 1 or Q, "are 4 values and stand for one; join them by .any(), .all() or"),
    (lambda: FOUR[Q] + THREE[:], "`four[q_idx]` and `three` have 4 and 3 elements; give both"),
    (lambda: FOUR[Q].sum(1), "is given to `sum` along dimension 1; write .sum(): what is indexed"),
    (lambda: torch.cat([FOUR[Q]]), "torch's `cat` cannot be traced"),
    (lambda: torch.softmax(FOUR[Q], -1), "torch's `softmax` cannot be traced"),
    (lambda: torch.nn.functional.gelu(CAP, approximate="x"), "approximate='x' is unknown to torch"),
    (lambda: SLOPES[Q].detach(), "`detach` cuts a gradient off"),
    (lambda: Expr(SCORE).detach() + 1, "leave it out; of positions and whole numbers it does"),
    (lambda: math.tanh(Q), "write torch's function, or flashgen's, for one of `math`'s"),
    (lambda: [1, 2][Q], "`q_idx` picks from a list or a tensor"),
    (lambda: torch.arange(4)[Q], "a tensor that is not declared is indexed by `q_idx`"),
    (lambda: min(Q, KV), "minimum and maximum for `min` and `max`"),
    (lambda: where(Q, 1, 2), "`where` was given `q_idx` to decide by; give it a comparison"),
    (lambda: where(Q > 1, Q > 2, 2), "give it two numbers or two conditions"),
    (lambda: Q >= KV & KV > 3, "put parentheses around comparisons beside &, | and ^"),
    (lambda: (Q & 1) == 0 or Q > 3, "write where(condition, a, b) for `if`"),
    (lambda: DOC[0, -1], "doc is indexed by -1, which does not count from the end; write an index"),
    (lambda: DOC[0, -1], "write an index from 0 up: kv_len - 1 for the one meant"),
    (lambda: DOC[Q - Q - 1, KV], "doc is indexed by -1, which does not count from the end"),
    (lambda: THREE[-1], "write an index from 0 up: 2 for the one meant"),
    (lambda: THREE[3], "is indexed by 3 along a dimension of 3; write an index up to 2"),
    (lambda: sum(SLOPES), "slopes is iterated over, as by `for`, `in`, sum and list; write out"),
    (lambda: list(SLOPES), "slopes is iterated over"),
    (lambda: [x for x in SLOPES], "slopes is iterated over"),
    (lambda: Q in DOC, "doc is iterated over"),
    (lambda: SLOPES or DOC, "slopes is neither true nor false; compare its elements"),
    (lambda: not SLOPES, "write `is None` to ask whether there is a tensor"),
    (lambda: DOC[0, Q, KV], "doc has 2 dimensions and was given 3 indices; give one for each"),
    (lambda: DOC[Q] + 1, "`doc[q_idx]` is a part of doc, which has 2 dimensions and was given 1 "),
    (lambda: DOC[0] >= 1, "give one for each, as in doc[b, kv_idx]"),
    (lambda: Q + DOC[0], "`doc[0]` is a part of doc, which has 2 dimensions and was given 1 index"),
    (lambda: torch.dot(DOC[Q], DOC[KV]), "instead of torch's `dot` write a sum, as x[i, 0] * y"),
    (lambda: DOC[Q] @ DOC[KV], "instead of torch's `matmul` write a sum, as x[i, 0] * y[j, 0] +"),
    (lambda: DOC[..., KV], "doc is indexed by a range, or by `None`; give one position for each"),
    (lambda: DOC[0, 1:3], "doc is indexed by a range, or by `None`; give one position for each"),
    (lambda: list(DOC[0]), "`doc[0]` is a part of doc"),
    (lambda: DOC[0, Q / 2], "doc is indexed by `q_idx/2`; cut the fraction with .int()"),
    (lambda: Q // 0, "the divisor `0` is not known to be positive"),
    (lambda: Q // LEFT, "the divisor `left` is not known to be positive"),
    (lambda: Q % -2, "the divisor `-2` is not known to be positive"),
    (lambda: Q + "1", "`+` was given a builtins.str"),
    (lambda: Q + math.nan, "`+` was given NaN; give it a number"),
    (lambda: DOC[0, KV] & (Q > 0), "and was given the integer `doc[0, kv_idx]`"),
    (lambda: (Q & KV) & (Q > 0), "was given the integer `q_idx & kv_idx`"),
    (lambda: (Q // 2 / 3) | 2, "`|` takes conditions and was given the number `(q_idx // 2)/3`"),
    (lambda: where(Q > 0, Q % 4, 1) & (Q > 0), "the integer `where(q_idx > 0, q_idx % 4, 1)`"),
    (lambda: Q.to(torch.int8), "`torch.int8` is no type of symbolic values, which are whole"),
    (lambda: Q.to(dtype=torch.uint8), "cast to torch.int32, torch.float32 or torch.bool"),
    (lambda: Q.byte(), "`byte` is no type of symbolic values"),
    (lambda: torch.div(Q, 2, rounding_mode="up"), "rounding_mode='up' is unknown to torch; write"),
    (lambda: torch.acos(Q / 9), "`acos` cannot be traced; write pi / 2 - atan(x * rsqrt(1 - x * x"),
    (lambda: torch.bucketize(Q, torch.ones(2)), "count the boundaries below, as (x > 5).int()"),
    (lambda: torch.dot(DOC[Q], DOC[KV]), "append both to q and k, whose products scores are"),
    (lambda: torch.max(Q), "torch's `max` with one value looks through a tensor; give it two"),
    (lambda: Q.min(0), "torch's `min` with one value looks through a tensor; give it two values"),
    (lambda: Q.new_ones(3), "a tensor of shape (3,) is not traced; a scalar is, of shape ()"),
    (lambda: torch.any(Q > 1), "torch's `any` cannot be traced; join conditions by |"),
    (lambda: torch.ones((), requires_grad=True) * Q, "a tensor that requires a gradient is captu"),
    (lambda: torch.tensor([1]) + Q, "`+` was given a torch.Tensor"),
    (lambda: Q - torch.tensor([1]), "`-` was given a torch.Tensor"),
    (lambda: 1 - (Q >= KV), "`-` was given the condition `q_idx >= kv_idx`, of which torch takes "),
    (lambda: -(Q >= KV), "write ~ for the opposite, ^ for what differs, or where(c, 1, 0)"),
    (lambda: Q + (Q >= KV) * -math.inf, "`q_idx >= kv_idx` as a number, 1 or 0, makes NaN of an"),
    (lambda: Q & (Q >= KV), "`&` takes conditions and was given the integer `q_idx`"),
    (lambda: (Q >= 0) & 1, "`&` takes conditions and was given the integer `1`"),
    (lambda: torch.erfinv(Q), "torch's `erfinv` cannot be traced"),
    (lambda: torch.ones(4)[Q], "a tensor that is not declared is indexed by `q_idx`; declare it,"),
    (lambda: torch.ones(4, 4)[0, KV], "a tensor that is not declared is indexed by `0, kv_idx`"),
    (lambda: Int("left", 9) + LEFT, "two parameters are named 'left'"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_mistake_shows_the_users_line_and_the_way_to_write_it(
    mistake: Callable[[], Any], message: str
) -> None:
    with pytest.raises(MaskError) as caught:
        mistake()
    said = str(caught.value)
    line = mistake.__code__.co_firstlineno
    shown = f"test_expr.py:{line}: `{linecache.getline(__file__, line).strip()}`: "
    assert shown.startswith(f"test_expr.py:{line}: `(lambda: ")
    _, _, told = said.partition(shown)
    assert message in told  # the line itself has it
    assert "\n" not in said


@pytest.mark.parametrize("name", ["2x", "class", "a b", "", *sorted(RESERVED_NAMES)])
def test_a_parameter_needs_a_usable_name(name: str) -> None:
    with pytest.raises(MaskError, match="not usable as an argument's name"):
        Int(name)


def test_a_default_below_the_minimum_is_refused() -> None:
    with pytest.raises(MaskError, match="default=0 is below min=1"):
        Int("chunk", 0, min=1)


def test_a_divisor_may_be_a_parameter_that_promises_to_be_positive() -> None:
    assert (Q // Int("chunk", min=1)).sym == FloorDiv(Q_IDX, sympy.Symbol("chunk", integer=True))
    assert (Q // kv_len).sym.func is FloorDiv


def test_inside_bound_everything_has_its_value() -> None:
    window = LEFT + 1  # made before, still symbolic
    with bound({"left": 3, "q_len": 5, "kv_len": 7}):
        assert kv_len - q_len == 2
        assert 10 - LEFT == 7
        assert concrete(window) == 4
        assert LEFT > 2
        assert not ~(LEFT > 2)
        rows = torch.arange(4)
        assert torch.equal(rows - LEFT, rows - 3)
        assert torch.equal(LEFT - rows, 3 - rows)
        assert torch.equal(rows >= window, rows >= 4)
        assert torch.equal((rows >= 1) & (LEFT > 5), torch.zeros(4, dtype=torch.bool))
        assert torch.equal(torch.minimum(rows, rows) + LEFT, rows + 3)
    with pytest.raises(MaskError):
        torch.arange(4) - LEFT


def test_a_symbol_without_a_value_is_named() -> None:
    with bound({"q_len": 5}), pytest.raises(MaskError, match="`left`: no value was given for left"):
        LEFT + 1


def test_evaluate_refuses_what_is_not_its_vocabulary() -> None:
    with pytest.raises(TypeError, match="gamma is not in flashgen's vocabulary"):
        evaluate(sympy.gamma(Q_IDX), {"q_idx": 1})
    with pytest.raises(KeyError):
        evaluate(Q_IDX + 1, {})


def test_methods_and_functions_run_on_values_too() -> None:
    rows = torch.arange(6)
    doc = torch.tensor([[0, 0, 1, 1, 2, 2]], dtype=torch.int32)
    with bound({"cap": 4.0, "left": 2, "doc": doc, "q_len": 6, "kv_len": 6}):
        assert torch.equal(DOC[0, rows], doc[0])
        assert torch.equal(maximum(rows, LEFT), rows.clamp(min=2))
        assert torch.equal(torch.clamp(rows, LEFT, 3), rows.clamp(2, 3))
        assert torch.equal(where(rows > LEFT, rows, 0), torch.where(rows > 2, rows, 0))
        assert torch.allclose(tanh(rows / CAP), torch.tanh(rows / 4.0))
        assert float(torch.tanh(CAP)) == pytest.approx(math.tanh(4.0))
        assert maximum(LEFT, 7) == 7


@pytest.mark.parametrize("doc", ["a\nb", "a\tb", "a\x00b", "a\u2028b", "\ud800", 3, None, b"a"])
def test_a_doc_is_one_line_of_text(doc: Any) -> None:
    for declare in (Int, Float, lambda name, doc: Tensor(name, ("batch",), doc=doc)):
        with pytest.raises(MaskError) as caught:
            declare("p", doc=doc)
        said = str(caught.value)
        assert said.endswith(f"('p'): doc={doc!r}; give one line of printable text")


def test_an_integer_has_a_least_value() -> None:
    with pytest.raises(MaskError, match=r"Int\('w'\): min=None; give a whole number from -2\*\*30"):
        Int("w", 5, min=None)  # type: ignore[arg-type]


def test_a_tensor_says_what_is_wrong_with_its_declaration() -> None:
    with pytest.raises(MaskError, match="dtype='int8' is unknown; take one of int32"):
        Tensor("t", ("batch",), "int8")
    with pytest.raises(MaskError, match="give a tuple of 1 to 4 sizes"):
        Tensor("t", "batch")
    for dims in (5, None, {"batch"}):
        with pytest.raises(
            MaskError, match=r"Tensor\('t'\): dims=.*; give a tuple of 1 to 4 sizes"
        ):
            Tensor("t", dims)  # type: ignore[arg-type]
    with pytest.raises(MaskError, match="a dimension is 'rows'; write one of batch, num_q_heads"):
        Tensor("t", ("rows",))
    with pytest.raises(MaskError, match="sorted=True is for dtype='int32'"):
        Tensor("t", ("batch",), "float32", sorted=True)
    with pytest.raises(MaskError, match=r"default=0\.0 is refused; take a finite number above 0"):
        Float("t", 0.0, above=0)


def test_a_tensors_parameters_are_those_of_its_sizes_and_indices_too() -> None:
    size = Int("size", 4, min=1)
    bias = Tensor("bias", (2 * size + 1,))
    assert bias[Q - LEFT].params == (bias, LEFT, size)
