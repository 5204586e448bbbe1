"""Bounds of any predicate that traces, beside brute force over the whole matrix."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from flashgen import Int, Mask, Tensor, clamp, kv_len, maximum, minimum, q_len, where
from support.visits import Call, Elements, check, sweep

LEFT, ANYWHERE = Int("left", 3), Int("anywhere", 0, min=-8)
CHUNK, WIDTH = Int("chunk", 4, min=1), Int("width", 4, min=1)

Q_DOC = Tensor("q_doc", ("batch", "q_len"), "int32", sorted=True)
KV_DOC = Tensor("kv_doc", ("batch", "kv_len"), "int32", sorted=True)
Q_ANY = Tensor("q_any", ("batch", "q_len"), "int32")
KV_ANY = Tensor("kv_any", ("batch", "kv_len"), "int32")
Q_REAL = Tensor("q_real", ("batch", "q_len"), "float32")
Q_FLAG = Tensor("q_flag", ("batch", "q_len"), "bool")
KV_FLAG = Tensor("kv_flag", ("batch", "kv_len"), "bool")
PREFIX = Tensor("prefix", ("batch",), "int32")
LAYOUT = Tensor("layout", ("num_q_heads", None, None), "bool")

Pair = Callable[[Any, Any], Any]


@st.composite
def calls(draw: st.DrawFn, equal: bool = False) -> Call:
    """Lengths, tile sizes and a value for every parameter."""
    q, kv = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    random = Random(draw(st.integers(0, 99)))
    kv = q if equal else kv
    block = st.sampled_from([1, 2, 3, 4, 8, 16])
    lengths = {"q": q, "kv": kv}
    params: dict[str, Any] = {
        "left": draw(st.integers(0, 30)),
        "anywhere": draw(st.integers(-8, 30)),
        "chunk": draw(st.integers(1, 9)),
        "width": draw(st.integers(1, 9)),
        "prefix": Elements([random.randrange(-3, 30)]),
        "q_real": Elements([[random.random() for _ in range(q)]]),
        "layout": Elements([[[random.random() < 0.5 for _ in range(8)] for _ in range(8)]]),
    }
    documents = draw(st.sampled_from([1, 3, 12]))
    for side, length in lengths.items():
        ids = sorted(random.randrange(documents) for _ in range(length))
        params[f"{side}_doc"] = Elements([ids])
        params[f"{side}_any"] = Elements([[random.randrange(-4, 30) for _ in range(length)]])
        params[f"{side}_flag"] = Elements([[random.random() < 0.5 for _ in range(length)]])
    return Call(q, kv, draw(block), draw(block), params)


LEAVES: list[Pair] = [
    *[lambda q, kv: q] * 3,
    *[lambda q, kv: kv] * 3,
    *[lambda q, kv, scalar=scalar: scalar for scalar in (LEFT, ANYWHERE, CHUNK, q_len, kv_len)],
    lambda q, kv: Q_DOC[0, q],
    lambda q, kv: Q_ANY[0, q],
    lambda q, kv: KV_DOC[0, kv],
    lambda q, kv: KV_ANY[0, kv],
    lambda q, kv: PREFIX[0],
]
JOINS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "min": minimum, "max": maximum}
RELATIONS = (operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne)
GATHERS: list[Pair] = [
    lambda q, kv: Q_FLAG[0, q],
    lambda q, kv: KV_FLAG[0, kv],
    lambda q, kv: LAYOUT[0, q // 4, kv // 4],
    lambda q, kv: Q_REAL[0, q] < 0.5,
    lambda q, kv: KV_DOC[0, kv] == Q_DOC[0, q],
    lambda q, kv: Q_DOC[0, q] > KV_DOC[0, kv],
    lambda q, kv: kv < Q_ANY[0, q],
    lambda q, kv: kv - Q_ANY[0, q] >= q,
    lambda q, kv: kv // CHUNK == Q_ANY[0, q],
]


@st.composite
def terms(draw: st.DrawFn, depth: int = 2) -> Pair:
    """Integer expressions of every operator that traces, most of them not affine."""
    kinds = ["leaf", "number", "+", "-", "*", "//", "%", "abs", "min", "max"]
    kinds += ["where", "clamp", "square"]
    kind = draw(st.sampled_from(kinds)) if depth else draw(st.sampled_from(["leaf", "number"]))
    if kind == "leaf":
        return draw(st.sampled_from(LEAVES))
    if kind == "number":
        number = draw(st.integers(-9, 9))
        return lambda q, kv: number
    a = draw(terms(depth=depth - 1))
    if kind == "abs":
        return lambda q, kv: abs(a(q, kv))
    if kind == "square":
        return lambda q, kv: a(q, kv) * a(q, kv)
    if kind == "clamp":
        low, high = draw(st.integers(-3, 9)), draw(st.sampled_from([5, 12, LEFT]))
        return lambda q, kv: clamp(a(q, kv), low, high)
    if kind in ("//", "%"):
        divisor = draw(st.one_of(st.integers(1, 9), st.sampled_from([CHUNK, WIDTH])))
        divide = operator.floordiv if kind == "//" else operator.mod
        return lambda q, kv: divide(a(q, kv), divisor)
    b = draw(terms(depth=depth - 1))
    if kind == "where":
        relation, at = draw(st.sampled_from(RELATIONS)), draw(st.integers(0, 20))
        side = draw(st.sampled_from(LEAVES))
        return lambda q, kv: where(relation(side(q, kv), at), a(q, kv), b(q, kv))
    return lambda q, kv: JOINS[kind](a(q, kv), b(q, kv))


@st.composite
def predicates(draw: st.DrawFn, leaf: st.SearchStrategy[Pair], depth: int = 2) -> Pair:
    """Conditions joined by ``& | ^ ~``."""
    kind = draw(st.sampled_from(["leaf", "&", "|", "^", "~"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaf)
    a = draw(predicates(leaf, depth=depth - 1))
    if kind == "~":
        return lambda q, kv: inverse(a(q, kv))
    b = draw(predicates(leaf, depth=depth - 1))
    join = {"&": operator.and_, "|": operator.or_, "^": operator.xor}[kind]
    return lambda q, kv: join(a(q, kv), b(q, kv))


def inverse(condition: Any) -> Any:
    """Of a plain bool, ``~`` is an integer."""
    return not condition if isinstance(condition, bool) else ~condition


def mask_of(predicate: Pair, equal_lengths: bool = False) -> Mask:
    return Mask(lambda b, h, q, kv: predicate(q, kv), "random", equal_lengths)


@st.composite
def comparisons(draw: st.DrawFn) -> Pair:
    compare, left, right = draw(st.sampled_from(RELATIONS)), draw(terms()), draw(terms())
    return lambda q, kv: compare(left(q, kv), right(q, kv))


ANYTHING = st.one_of(comparisons(), comparisons(), st.sampled_from(GATHERS))


@sweep(300)
@given(predicates(ANYTHING).map(mask_of), calls())
def test_any_predicate_at_all_is_sound(mask: Mask, call: Call) -> None:
    check(mask, call)


@sweep(150)
@given(predicates(ANYTHING).map(mask_of), calls(), st.sampled_from([0, 3]), st.sampled_from([0, 1]))
def test_what_is_too_much_to_derive_leaves_them_sound(
    mask: Mask, call: Call, pairs: int, conditions: int
) -> None:
    """And they do not say that they are exact."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashgen.symbolic.projection.MAX_PAIRS", pairs)
        patch.setattr("flashgen.symbolic.bounds.MAX_CONDITIONS", conditions)
        check(mask, call)


WIDTHS = st.one_of(st.integers(0, 9), st.sampled_from([LEFT, ANYWHERE]))
DIVISORS = st.one_of(st.integers(1, 9), st.sampled_from([CHUNK, WIDTH]))


@st.composite
def blocks(draw: st.DrawFn) -> Pair:
    """Blocks of rows beside blocks of keys, or keys beside blocks of rows, and the like."""
    d, width, kind = draw(DIVISORS), draw(WIDTHS), draw(st.integers(0, 9))
    shift = draw(st.one_of(st.integers(-5, 5), st.just(kv_len - q_len)))
    compare = draw(st.sampled_from(RELATIONS))
    forms: list[Pair] = [
        lambda q, kv: compare((q + shift) // d, kv // d),
        lambda q, kv: compare(kv // d - q // d, width),
        lambda q, kv: abs(q // d - kv // d) <= width,
        lambda q, kv: compare(kv, d * ((q + shift) // d) + width),
        lambda q, kv: compare(kv, q + shift),
        lambda q, kv: abs(clamp(q // d, 1, width) - kv // d) <= 1,
        lambda q, kv: compare(kv, minimum(q + 3, maximum(q // d, width))),
        lambda q, kv: compare((q + shift) // d, width),
        lambda q, kv: compare(q + shift, width),
        lambda q, kv: compare(kv + shift, width),
    ]
    return forms[kind]


GATHERED: list[Pair] = [
    lambda q, kv: KV_DOC[0, kv] == Q_DOC[0, q],
    lambda q, kv: KV_DOC[0, kv] == KV_DOC[0, q],
    lambda q, kv: KV_DOC[0, kv] != KV_DOC[0, q],
    lambda q, kv: KV_DOC[0, q] >= KV_DOC[0, kv],
    lambda q, kv: KV_DOC[0, q] < KV_DOC[0, kv],
    lambda q, kv: kv < PREFIX[0],
    lambda q, kv: kv < Q_ANY[0, q],
    lambda q, kv: kv < q + Q_ANY[0, q],
    lambda q, kv: Q_FLAG[0, q],
]


@sweep(80)
@given(predicates(blocks()).map(mask_of), calls())
def test_blocks_are_sound_and_exact_where_they_say_so(mask: Mask, call: Call) -> None:
    check(mask, call)


@sweep(100)
@given(
    predicates(st.one_of(st.sampled_from(GATHERED), blocks())).map(lambda p: mask_of(p, True)),
    calls(equal=True),
)
def test_gathers_are_sound_and_exact_where_they_say_so(mask: Mask, call: Call) -> None:
    check(mask, call)


@sweep(60)
@given(st.sampled_from(["causal", "window", "both", "clamped", "late"]), calls())
def test_documents_that_end_with_the_keys_are_sound_and_exact(kind: str, call: Call) -> None:
    """Query i stands at position i + kv_len - q_len, which may lie before the first key."""

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = q + kv_len - q_len
        same = (kv <= at) & (KV_DOC[b, at] == KV_DOC[b, kv])
        near = abs(kv - at) <= LEFT
        start = maximum(at, 0)
        clamped = (at >= 0) & (KV_DOC[b, start] == KV_DOC[b, kv])
        return {
            "causal": same,
            "window": same & near,
            "both": same | near,
            "clamped": clamped,
            "late": clamped & (q >= LEFT) & near,
        }[kind]

    check(Mask(mask_mod, "documents"), call)
