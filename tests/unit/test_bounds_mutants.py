"""The examples of a fast run find bounds that are wrong, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
from hypothesis import Phase, given, settings

from flashgen import Mask
from flashgen.symbolic import TileBounds
from flashgen.symbolic.intervals import Interval
from support import visits
from support.visits import Call, check, sweep
from unit.test_bounds_random import ANYTHING, calls, mask_of, predicates


def _shifted(length: sympy.Symbol, **ends: int) -> Callable[[Interval], Interval]:
    """Ends of the interval a few positions on, inside of the sequence."""

    def edit(interval: Interval) -> Interval:
        moved = {
            name: sympy.Max(0, sympy.Min(getattr(interval, name) + by, length))
            for name, by in ends.items()
        }
        return replace(interval, nonempty=False, **moved)

    return edit


def _mutants(length: sympy.Symbol) -> dict[str, Callable[[TileBounds], TileBounds]]:
    edits: dict[str, Callable[[Interval], Interval]] = {
        "begin+1": _shifted(length, begin=1),
        "end-1": _shifted(length, end=-1),
        "full_begin-1": _shifted(length, full_begin=-1),
        "full_end+1": _shifted(length, full_end=1),
        "a condition is left out": lambda interval: replace(interval, condition=sympy.true),
    }

    def of_intervals(edit: Callable[[Interval], Interval]) -> Callable[[TileBounds], TileBounds]:
        return lambda bounds: replace(bounds, intervals=tuple(map(edit, bounds.intervals)))

    return {name: of_intervals(edit) for name, edit in edits.items()} | {
        "the first interval alone": lambda bounds: replace(bounds, intervals=bounds.intervals[:1]),
        "no row is empty": lambda bounds: replace(bounds, rows_can_be_empty=False),
        "said to be exact": lambda bounds: replace(bounds, exact=True),
    }


KEYS_OF_ROWS = _mutants(sympy.Symbol("kv_len", integer=True))
ROWS_OF_KEYS = _mutants(sympy.Symbol("q_len", integer=True))


@pytest.mark.parametrize("name", KEYS_OF_ROWS)
@pytest.mark.parametrize("derive", ["derive_bounds", "derive_q_bounds"])
def test_wrong_bounds_are_found(derive: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = getattr(visits, derive)
    edit = (KEYS_OF_ROWS if derive == "derive_bounds" else ROWS_OF_KEYS)[name]
    monkeypatch.setattr(visits, derive, lambda predicate: edit(right(predicate)))

    # As many as test_any_predicate_at_all_is_sound has; the smallest one is not looked for.
    @settings(sweep(300), phases=(Phase.generate,), report_multiple_bugs=False)
    @given(predicates(ANYTHING).map(mask_of), calls())
    def run(mask: Mask, call: Call) -> None:
        check(mask, call)

    with pytest.raises(AssertionError):
        run()
