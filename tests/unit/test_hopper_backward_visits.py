"""The tiles that the Gluon kernels of the backward pass visit.

The functions that find them are run as they are rendered, on numbers.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashgen import (
    AttentionSpec,
    Int,
    Mask,
    Tensor,
)
from flashgen.kernels.backward_hopper.visits import HopperVisits
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit
from flashgen.kernels.backward_hopper_split.queries import HopperQueries
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from flashgen.symbolic.gathers import with_row_tables
from flashgen.symbolic.trace import KEYS_OF_ROWS, ROWS_OF_KEYS
from support.cases import Case
from support.turns import some
from support.variants import render_backward_hopper
from support.visits import Call, Elements, visit
from support.vocabulary import VOCABULARY


def of(spec: AttentionSpec) -> HopperBackwardSplit:
    return HopperBackwardSplit(backward_plan(lower(spec, "x")))


def _at(tensor: Elements, *indices: Any) -> Any:
    return each(lambda *numbers: tensor[numbers], *indices)


def each(of: Callable[..., Any], *operands: Any) -> Any:
    """A function of numbers, for each position of a tile if an operand is for each."""
    if any(isinstance(x, np.ndarray) for x in operands):
        return np.vectorize(of)(*operands)
    return of(*operands)


def nothing(*arguments: Any) -> None:
    """A layout."""


#: What the functions call.
GLUON = {
    "gl": SimpleNamespace(
        where=lambda *operands: each(lambda condition, a, b: a if condition else b, *operands),
        cdiv=lambda a, b: -(-a // b),
        minimum=lambda *operands: each(min, *operands),
        maximum=lambda *operands: each(max, *operands),
        arange=lambda begin, end, layout: np.arange(begin, end),
        max=lambda rows, axis: rows.max().item(),
        min=lambda rows, axis: rows.min().item(),
        num_warps=lambda: 4,
        BlockedLayout=nothing,
        SliceLayout=nothing,
        int32=int,
        constexpr=None,
        tensor=None,
    ),
    "gluon": SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f),
    "_aggregate": lambda cls: cls,
    **{f"_at_{n}d_hopper": _at for n in range(1, 5)},
}
FUNCTIONS = (
    *("_backward_visits", "_query_tile", "_swap_if_hopper"),
    *("_visits_of_queries", "_tile_of_keys"),
    *("_RunsOfQueries", "_RunsOfKeys"),
)


def functions(names: HopperBackwardSplit) -> SimpleNamespace:
    """Those of the rendered kernel, as functions of Python."""
    tree = ast.parse(render_backward_hopper(names.backward))
    defined = ast.FunctionDef | ast.ClassDef
    tree.body = [f for f in tree.body if isinstance(f, defined) and f.name in FUNCTIONS]
    found: dict[str, Any] = dict(GLUON)
    exec(compile(tree, "rendered", "exec"), found)
    return SimpleNamespace(**found)


def visited(
    names: HopperBackwardSplit | HopperQueries, kernel: SimpleNamespace, call: Call, first: int
) -> list[tuple[int, bool]]:
    """(tile, whether it is masked) of each visit of a tile of keys, or of queries, in order."""
    visits = names.visits
    bounds = names.backward.plan.bounds if visits.of == "kv" else names.backward.q_bounds
    predicate = names.backward.plan.predicate
    flags = (
        f for role in (KEYS_OF_ROWS, ROWS_OF_KEYS) for f in with_row_tables(predicate, role).flags
    )
    known = {**call.values, **call.tables((*bounds.tables, *flags), bounds.ranges)}
    given = SimpleNamespace(**{name: known.get(name) for name in names.call})
    if visits.of == "kv":
        counts, finds, block = kernel._visits_of_queries, kernel._tile_of_keys, call.block_m
    else:
        counts, finds, block = kernel._backward_visits, kernel._query_tile, call.block_n
    runs = counts(0, 0, first, given, call.block_m, call.block_n)
    if visits.splits:
        return [(finds(i, runs), i < runs.masked_visits) for i in range(runs.visits)]
    found = [finds(i, runs, given, first, block) for i in range(runs.visits)]
    return [(tile, visits.masks and masked) for tile, masked in found]


def check_order(of: HopperVisits, visits: list[tuple[int, bool]], places: range) -> None:
    """No tile is visited twice, or lies past the end; those with the mask come first."""
    tiles = [tile for tile, _ in visits]
    assert len(tiles) == len(set(tiles)), "a tile is visited twice"
    assert set(tiles) <= set(range(len(places))), "past the end"
    if of.splits:
        masks = [masked for _, masked in visits]
        assert masks == sorted(masks, reverse=True), "those with the mask come first"


def check_visits(
    names: HopperBackwardSplit, kernel: SimpleNamespace, seen: list[list[bool]], call: Call
) -> None:
    """Each tile that holds a pair is visited once, those that bounds call full without a mask."""
    bounds = names.backward.q_bounds
    softmax = names.backward.plan.normaliser == "softmax"
    for kv_first in range(0, call.kv, call.block_n):
        keys = range(kv_first, min(kv_first + call.block_n, call.kv))
        visits = visited(names, kernel, call, kv_first)
        check_order(names.visits, visits, range(0, call.q, call.block_m))
        values = {**call.values, **call.tables(bounds.tables, bounds.ranges)}
        found = visit(
            bounds, call.block_m, call.q, {**values, "kv_first": kv_first, "kv_last": keys[-1]}
        )
        assert {tile for tile, _ in visits} == found.visited
        needed = {i // call.block_m for i in range(call.q) if any(seen[i][j] for j in keys)}
        assert needed <= found.visited
        at_the_end = kv_first + call.block_n > call.kv
        for tile, masked in visits:
            if softmax and names.masks and at_the_end:
                assert masked, "keys past the end are not masked"
            elif names.masks_queries:
                # The last tile may hold rows past the end: their weights are 0 without a mask.
                assert masked == (tile not in found.unmasked), (tile, visits, found)
            rows = range(tile * call.block_m, min((tile + 1) * call.block_m, call.q))
            assert masked or all(seen[i][j] for i in rows for j in keys), (tile, kv_first)


def check_visits_of_queries(
    names: HopperBackwardSplit, kernel: SimpleNamespace, seen: list[list[bool]], call: Call
) -> None:
    """The same of the tiles of keys that a tile of queries visits for their gradient."""
    queries = names.of_queries
    bounds = names.backward.plan.bounds
    for q_first in range(0, call.q, call.block_m):
        rows = range(q_first, min(q_first + call.block_m, call.q))
        visits = visited(queries, kernel, call, q_first)
        check_order(queries.visits, visits, range(0, call.kv, call.block_n))
        values = {**call.values, **call.tables(bounds.tables, bounds.ranges)}
        found = visit(
            bounds, call.block_n, call.kv, {**values, "q_first": q_first, "q_last": rows[-1]}
        )
        assert {tile for tile, _ in visits} == found.visited
        for tile, masked in visits:
            keys = range(tile * call.block_n, (tile + 1) * call.block_n)
            assert masked == (tile not in found.unmasked), (tile, visits, found)
            whole = keys[-1] < call.kv and all(seen[i][j] for i in rows for j in keys)
            assert masked or whole, (tile, q_first)


def divided(names: HopperBackwardSplit) -> HopperBackwardSplit:
    """The same with a kernel of its own for the gradient of q."""
    plan = names.backward.plan
    return of(replace(plan.spec, deterministic=True))


def _elements(value: Any) -> Any:
    return Elements(value.tolist()) if isinstance(value, torch.Tensor) else value


def _derived(names: HopperBackwardSplit) -> bool:
    """Whether visits follow from bounds: lists are another kernel's, see test_tile_lists.py."""
    return not (names.why_not or names.visits.tiles.listed)


#: Whose visits are lists, which another kernel makes: see tests/sweep/test_tile_lists.py.
NOT_DERIVED = {
    *("bigbird", "bigbird_run_time", "bigbird_static", "block_sparse", "block_sparse_run_time"),
    *("block_sparse_shared", "block_sparse_static", "block_sparse_static_run_time"),
    *("causal_blocks", "outside_blocks", "document_unsorted", "natten_2d", "tree", "tree_of_all"),
    *("chosen_blocks", "chosen_by_each_query"),
}

#: Lengths and tiles.
CALLS = (
    ((37, 37), (8, 16)),
    ((40, 40), (4, 8)),
    ((8, 50), (4, 16)),
    ((50, 8), (16, 8)),
    ((1, 33), (8, 8)),
    ((33, 1), (8, 4)),
    ((32, 24), (8, 8)),
)


@pytest.mark.parametrize("name", some(VOCABULARY, every=5))
def test_the_vocabulary_visits_each_tile_once(name: str) -> None:
    entry = VOCABULARY[name]
    spec = entry.spec("bfloat16", 64)
    names = of(spec)
    assert _derived(names) == (name not in NOT_DERIVED)
    if name in NOT_DERIVED:
        return
    apart = divided(names)
    kernel, kernels_apart = functions(names), functions(apart) if apart.both_in_gluon else None
    for (q_len, kv_len), blocks in CALLS:
        if entry.equal_lengths and q_len != kv_len:
            continue
        case = entry.case(Case(q_len, kv_len, q_heads=1, kv_heads=1))
        params = {key: _elements(x) for key, x in case.arguments(spec).items()}
        for constant in spec.constants:
            params[constant.name] = _elements(constant.tensor())
        call = Call(q_len, kv_len, *blocks, params)
        seen = call.matrix(spec.mask)
        check_visits(names, kernel, seen, call)
        if kernels_apart:
            check_visits_of_queries(apart, kernels_apart, seen, call)


# --- random masks ---------------------------------------------------------------------------------

LEFT, WIDTH = Int("left", 3), Int("width", 4, min=1)
DOC = Tensor("doc", ("batch", "q_len"), "int32", sorted=True)
KV_DOC = Tensor("kv_doc", ("batch", "kv_len"), "int32", sorted=True)
SHOWN = Tensor("visible_keys", ("batch", "kv_len"), "bool")

LEAVES: list[Callable[[Any, Any], Any]] = [
    lambda q, kv: kv <= q,
    lambda q, kv: q <= kv,
    lambda q, kv: q - kv <= LEFT,
    lambda q, kv: kv - q < WIDTH,
    lambda q, kv: kv < LEFT,
    lambda q, kv: q < 2 * LEFT,
    lambda q, kv: q // WIDTH == kv // WIDTH,
    lambda q, kv: q // WIDTH >= kv // 3,
    lambda q, kv: 2 * kv <= q + LEFT,
    lambda q, kv: q + kv < 30,
    lambda q, kv: (q - kv) % WIDTH == 0,
    lambda q, kv: DOC[0, q] == KV_DOC[0, kv],
    lambda q, kv: SHOWN[0, kv],
]


def _random_mask(random: Random, depth: int) -> Mask:
    if depth == 0 or random.random() < 0.2:
        leaf = random.choice(LEAVES)
        return Mask(lambda b, h, q, kv: leaf(q, kv), "leaf")
    one, other = (_random_mask(random, depth - 1) for _ in range(2))
    if random.random() < 0.15:
        return ~one
    return random.choice((operator.and_, operator.or_))(one, other)


SEEDS = range(60)


@pytest.mark.parametrize("seed", some(SEEDS, every=5))
def test_random_masks_visit_each_tile_once(seed: int) -> None:
    random = Random(seed)
    mask = _random_mask(random, 3)
    names = of(AttentionSpec(64, mask=mask))
    assert not names.why_not
    if names.visits.tiles.listed:  # by another kernel: see tests/sweep/test_hopper_tiles.py
        return
    apart = divided(names)
    assert not apart.why_not
    kernel, kernels_apart = functions(names), functions(apart)
    for _ in range(6):
        q, kv = random.choice(((1, 1), (30, 30), (7, 40), (40, 7), (32, 16), (33, 33)))
        params: dict[str, Any] = {"left": random.randrange(20), "width": random.randint(1, 9)}
        for name, length in (("doc", q), ("kv_doc", kv)):
            params[name] = Elements([sorted(random.randrange(4) for _ in range(length))])
        params["visible_keys"] = Elements([[random.random() < 0.6 for _ in range(kv)]])
        call = Call(q, kv, random.choice((2, 4, 8, 16)), random.choice((4, 8, 16)), params)
        seen = call.matrix(mask)
        check_visits(names, kernel, seen, call)
        check_visits_of_queries(apart, kernels_apart, seen, call)


@pytest.mark.full
def test_the_random_masks_are_of_all_kinds() -> None:
    kinds: dict[str, set[tuple[bool, ...]]] = {"q": set(), "kv": set()}
    for seed in SEEDS:
        names = of(AttentionSpec(64, mask=_random_mask(Random(seed), 3), deterministic=True))
        reduces = names.visits.tiles.reduce_rows
        for visits in (names.visits, names.of_queries.visits):
            tiles = visits.tiles
            kinds[visits.of].add((visits.splits, tiles.from_key_0, tiles.sorted, reduces))
    for of_one in kinds.values():
        assert all(set(found) == {True, False} for found in zip(*of_one, strict=True))
