"""Bounds of rows for a tile of keys; how many intervals there are; how long deriving takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import sympy

from flashgen import Int, Mask, Tensor, causal, clamp, full, kv_len, maximum, q_len
from flashgen.symbolic import (
    Predicate,
    TileBounds,
    derive_bounds,
    derive_q_bounds,
    intervals,
    trace,
)
from support.visits import Call, bounds_of, only, q_bounds_of, visit
from support.vocabulary import MASKS

CHUNK = Int("chunk", min=1)
DOC = Tensor("doc", ("batch", "kv_len"), "int32", sorted=True)
ENDS = Tensor("ends", ("batch", "q_len"), "int32")


def test_a_tile_of_keys_finds_its_rows_by_the_same_tables() -> None:
    mask = Mask(lambda b, h, q, kv: (DOC[b, q] == DOC[b, kv]) & (kv <= q), "documents", True)
    rows = q_bounds_of(mask)
    assert only(rows) == (
        "kv_first", "_at_2d(doc_end, b, kv_last)", "kv_last", "_at_2d(doc_end, b, kv_first)",
    )  # fmt: skip
    assert rows.exact and not rows.rows_can_be_empty
    assert [table.name for table in rows.tables] == ["doc_end"]
    assert [table.name for table in bounds_of(mask).tables] == ["doc_begin"]


TRANSPOSED: list[tuple[Mask, tuple[str, ...], str]] = [
    (full(), ("0", "q_len", "0", "q_len"), "even"),
    (causal(), ("kv_first", "q_len", "kv_last", "q_len"), "first"),
    (
        causal(align="bottom_right"),
        ("max(0, kv_first + q_len - kv_len)", "q_len", "max(0, kv_last + q_len - kv_len)", "q_len"),
        "first",
    ),
    (
        Mask(lambda b, h, q, kv: (q // CHUNK == kv // CHUNK) & (kv <= q), "chunks", True),
        (
            "kv_first",
            "min(q_len, (kv_last // chunk) * chunk + chunk)",
            "kv_last",
            "min(q_len, (kv_first // chunk) * chunk + chunk)",
        ),
        "first",
    ),
]


@pytest.mark.parametrize(("mask", "expected", "longest"), TRANSPOSED, ids=str)
def test_the_rows_that_visit_a_tile_of_keys(
    mask: Mask, expected: tuple[str, ...], longest: str
) -> None:
    bounds = q_bounds_of(mask)
    assert only(bounds) == expected
    assert bounds.exact and not bounds.rows_can_be_empty
    assert bounds.longest_first == longest


def _prefix_of_chunks(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q // 16 == kv // 16) & ((kv % 16 < 5) | (q >= kv))


def _check_prefix_of_chunks(block: int) -> None:
    bounds = q_bounds_of(Mask(_prefix_of_chunks, "prefix"))
    call = Call(48, 48, block, block, {})
    seen = call.matrix(Mask(_prefix_of_chunks, "prefix"))
    for first in range(0, 48, block):
        values = {**call.values, "kv_first": first, "kv_last": first + block - 1}
        tiles = range(48 // block)
        shown = [[row[first : first + block] for row in seen[block * i :][:block]] for i in tiles]
        found = visit(bounds, block, 48, values)
        assert found.visited == {i for i in tiles if any(map(any, shown[i]))}
        assert found.unmasked == {i for i in tiles if all(map(all, shown[i]))}


@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_tile_inside_a_prefix_is_full_from_the_beginning_of_its_chunk(block: int) -> None:
    """And any other from its last key on."""
    _check_prefix_of_chunks(block)


@pytest.mark.parametrize("chosen", [0, 1], ids=["always the former", "always the latter"])
def test_a_wrong_beginning_is_found(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = intervals._longer_at_times

    def one_of_both(*args: Any) -> Any:
        found = right(*args)
        return found and (found[0].args[chosen][0], found[1])

    monkeypatch.setattr(intervals, "_longer_at_times", one_of_both)
    with pytest.raises(AssertionError):
        _check_prefix_of_chunks(4)


def test_as_many_intervals_as_asked_for() -> None:
    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = [(kv >= q + 10 * i) & (kv < q + 10 * i + 3) for i in range(6)]
        return near[0] | near[1] | near[2] | near[3] | near[4] | near[5]

    predicate = trace(Mask(mask_mod, "stripes"))
    assert len(derive_bounds(predicate).intervals) == 1
    six = derive_bounds(predicate, max_intervals=6)
    assert len(six.intervals) == 6 and six.exact
    assert len(derive_q_bounds(predicate, max_intervals=6).intervals) == 6


def test_ends_of_which_one_has_all_parts_of_the_other() -> None:
    """``Max(Min(n, m), Min(n, m, y))`` is the former, of which nothing is left without n and m."""

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        back = q + kv_len - q_len - kv
        late = clamp(kv, 2, 24) <= maximum(q, CHUNK)
        strided = (back <= CHUNK) | ((q - kv) % CHUNK == 0)
        return late & (back >= 0) & strided & (ENDS[b, q] >= kv)

    bounds = q_bounds_of(Mask(mask_mod, "mask"))
    ends = [end for interval in bounds.intervals for end in interval.expressions]
    assert ends and not any(end.has(sympy.oo) for end in ends)


@pytest.mark.parametrize("name", MASKS)
def test_deriving_takes_a_moment(name: str) -> None:
    predicate = trace(MASKS[name].mask)
    for derive in (derive_bounds, derive_q_bounds):
        anew = derive.__wrapped__  # what was derived before is kept
        assert min(_seconds(anew, predicate) for _ in range(3)) < 0.5


def _seconds(derive: Callable[[Predicate], TileBounds], predicate: Predicate) -> float:
    start = time.process_time()
    derive(predicate)
    return time.process_time() - start
