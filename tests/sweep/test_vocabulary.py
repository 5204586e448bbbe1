"""Every mask, score function and normaliser that flashgen ships, against float64.

Each by pairs of what calls differ in, and its gradients by every other of those. A full run has for
each every remainder of both lengths by both sides of a tile; dtypes, layouts of q, k, v and the
parameters, heads and descriptors take turns, at rates that make each meet each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flashgen import Int
from support.cases import LAYOUTS, MIXED, Case, inputs
from support.oracle import check
from support.pairs import LENGTHS, Row, all_pairs
from support.variants import rendered_module
from support.vocabulary import MASKS, VOCABULARY, Entry
from sweep.backward import check_backward
from sweep.launch import check_kernel

TILES = ((32, 16), (16, 32))
SIDE = 32  # a remainder by this is one by both sides

DTYPES = ("bfloat16", "float16", "float32")
HEADS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 2), (2, 2, 2))  # batch, of q, of k and v

Trial = tuple[Case, str, bool]  # the call, its dtype, whether it may use descriptors


def _lengths(entry: Entry) -> Iterator[tuple[int, int]]:
    """Every remainder of both, from less than a tile to more than two."""
    for r in range(SIDE):
        q_len = r + SIDE * (r % 3 % 2) or 2 * SIDE
        # 7 is coprime to a power of two: both run through all remainders.
        kv_len = (7 * r + 3) % SIDE + SIDE * (r // 2 % 3) or SIDE
        yield q_len, q_len if entry.equal_lengths else kv_len


def trials(entry: Entry, turn: int) -> Iterator[Trial]:
    """The calls that an entry is tried with; another turn has other combinations."""
    layouts = list(LAYOUTS)
    for i, (q_len, kv_len) in enumerate(_lengths(entry), start=11 * turn):
        batch, q_heads, kv_heads = HEADS[i % len(HEADS)]
        layout = layouts[i % len(layouts)]
        case = Case(q_len, kv_len, batch, q_heads, kv_heads, layout)
        yield entry.case(case), DTYPES[i % len(DTYPES)], i % 2 == 0


@functools.cache
def _module(name: str, dtype: str) -> ModuleType:
    return rendered_module(VOCABULARY[name].spec(dtype))


def _try(name: str, trial: Trial, block_m: int = 32, block_n: int = 16) -> None:
    """Checks one call; a failure says which it was."""
    case, dtype, tma = trial
    spec, options = VOCABULARY[name].spec(dtype), {"USE_TMA": tma, "dtype": getattr(torch, dtype)}
    try:
        check_kernel(_module(name, dtype), spec, case, BLOCK_M=block_m, BLOCK_N=block_n, **options)
    except Exception as error:
        error.add_note(f"{name}, {case}, {dtype}{', tma' * tma}, tile {block_m} by {block_n}")
        raise


@functools.cache
def _rows() -> list[Row]:
    """The fast set: each entry with each length, layout, number of heads and the rest."""
    kinds, whole = tuple(LENGTHS), {name: entry.equal_lengths for name, entry in VOCABULARY.items()}
    factors = {
        "name": list(VOCABULARY),
        "q_len": kinds,
        "kv_len": kinds,
        "layout": (*LAYOUTS, MIXED),
        "heads": HEADS,
        "tile": TILES,
        "tma": (False, True),
        "number": (None, 0, 1, 16, 10**5),
    }

    def allowed(row: Row) -> bool:
        return "kv_len" not in row or not whole[row["name"]] or row["q_len"] == row["kv_len"]

    return all_pairs(factors, allowed)


def _case_of(row: Row) -> Case:
    """The call; whole numbers are their default, the least, one more, some or more than enough."""
    entry, (m, n) = VOCABULARY[row["name"]], row["tile"]
    q_len, kv_len = LENGTHS[row["q_len"]](m), LENGTHS[row["kv_len"]](n)
    case = Case(q_len, q_len if entry.equal_lengths else kv_len, *row["heads"], row["layout"])
    free = [param for param in _whole_numbers(entry) if row["number"] is not None]
    return entry.case(replace(case, params={p.name: p.min + row["number"] for p in free}))


def _whole_numbers(entry: Entry) -> list[Int]:
    """The entry's integers that may be anything from their least."""
    given = entry.values(Case(1, 1))
    return [p for p in entry.spec().params if isinstance(p, Int) and p.name not in given]


@pytest.mark.parametrize("name", VOCABULARY)
def test_pairs(name: str) -> None:
    dtype = DTYPES[list(VOCABULARY).index(name) % len(DTYPES)]
    for i, row in enumerate(row for row in _rows() if row["name"] == name):
        case, (m, n), tma = _case_of(row), row["tile"], row["tma"]
        _try(name, (case, dtype, tma), m, n)
        if i % 4 == 1:
            spec, module = VOCABULARY[name].spec(dtype), _module(name, dtype)
            check_backward(module, spec, case, BLOCK_M=m, BLOCK_N=n, USE_TMA=tma)


# Scores and normalisers work on whatever tile there is: for them the shapes take turns.
TURNS = [
    (name, turn)
    for i, name in enumerate(VOCABULARY)
    for turn in (range(len(TILES)) if name in MASKS else [i % len(TILES)])
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "turn"), TURNS)
def test_every_remainder(name: str, turn: int) -> None:
    for trial in trials(VOCABULARY[name], turn):
        _try(name, trial, *TILES[turn])


NUMBERS = [
    (name, param.name, param.min)
    for name, entry in VOCABULARY.items()
    for param in _whole_numbers(entry)
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "param", "least"), NUMBERS)
def test_whole_numbers(name: str, param: str, least: int) -> None:
    entry = VOCABULARY[name]
    for i, value in enumerate((least, least + 1, 16, 10**5)):
        for lengths in ((40, 40),) if entry.equal_lengths else ((40, 40), (17, 61), (61, 17)):
            case = Case(*lengths, q_heads=2, kv_heads=2)
            chosen = entry.case(replace(case, params={param: value}))
            _try(name, (chosen, DTYPES[i % 3], False))


EMPTY = [Case(5, 5, batch=0), Case(0, 0), Case(0, 9, batch=2), Case(7, 0, q_heads=2, kv_heads=2)]


#: A third of them in a fast run, with each dtype.
SOME = [
    pytest.param(name, marks=() if i % 3 == i // 3 % 3 else pytest.mark.full)
    for i, name in enumerate(VOCABULARY)
]


@pytest.mark.parametrize("name", SOME)
def test_nothing_to_do(name: str) -> None:
    entry = VOCABULARY[name]
    for case in EMPTY:
        if case.q_len == case.kv_len or not entry.equal_lengths:
            _try(name, (entry.case(case), "float16", False))


@pytest.mark.parametrize("name", SOME)
def test_the_public_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks accept what the sweep gives, and it runs the kernel."""
    entry, number = VOCABULARY[name], list(VOCABULARY).index(name)
    dtype = DTYPES[number % len(DTYPES)]
    spec, module = entry.spec(dtype), _module(name, dtype)
    monkeypatch.delattr(module, "reference")  # what it would run instead
    case = entry.case(Case(40, 40, batch=2, q_heads=4, kv_heads=2, layout="padded", scale=0.3))
    tensors = inputs(case, spec, getattr(torch, dtype))
    arguments = case.arguments(spec)
    out, lse = module.attention(*tensors, scale=0.3, return_lse=True, **arguments)
    check(out, lse, tensors, spec, case)
    assert torch.equal(module.attention(*tensors, scale=0.3, **arguments), out)


@pytest.mark.parametrize(("name", "turn"), TURNS)
def test_the_sweep_covers(name: str, turn: int) -> None:
    entry = VOCABULARY[name]
    chosen = list(trials(entry, turn))
    cases = [case for case, _, _ in chosen]
    m, n = TILES[turn]
    assert {case.q_len % m for case in cases} == set(range(m))
    assert {case.kv_len % n for case in cases} == set(range(n))
    assert {(dtype, tma) for _, dtype, tma in chosen} == {(d, t) for d in DTYPES for t in (0, 1)}
    assert {(case.layout, dtype) for case, dtype, _ in chosen} == {
        (layout, dtype) for layout in LAYOUTS for dtype in DTYPES
    }
    assert {(case.batch, case.q_heads, case.kv_heads) for case in cases} == set(HEADS)
    assert min(case.q_len for case in cases) < SIDE < max(case.q_len for case in cases)
    assert min(case.kv_len for case in cases) < SIDE < max(case.kv_len for case in cases)
    if not entry.equal_lengths:
        assert {case.q_len > case.kv_len for case in cases} == {True, False}


def test_the_vocabulary_is_all_there() -> None:
    """Every public mask, score function and normaliser has an entry that uses it."""
    import flashgen.masks
    import flashgen.normalisers
    import flashgen.scores

    functions = {"as_mask", "as_score", "random_blocks"}
    names = {
        *(name for name in flashgen.masks.__all__ if name.islower()),
        *(name for name in flashgen.scores.__all__ if name.islower()),
        "softmax", "softmax_off_by_one", "sigmoid_attention",
    } - functions  # fmt: skip
    labels = " ".join(
        f"{spec.mask.label} {getattr(spec.score, 'label', '')} {spec.normaliser.label}"
        for spec in (entry.spec() for entry in VOCABULARY.values())
    )
    assert [name for name in sorted(names) if f"{name}(" not in labels] == []
