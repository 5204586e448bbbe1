"""The page of visited tiles shows what is derived now, and finds bounds that skip or unmask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy

from docs import make_visited
from docs.mask_list import LENGTH, MASKS


def test_the_page_shows_what_is_derived() -> None:
    assert len(MASKS) == 60
    assert make_visited.page() == make_visited.PAGE.read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda interval: replace(interval, end=interval.end - make_visited.BLOCK),
        lambda interval: replace(interval, full_end=sympy.Integer(LENGTH)),
    ],
    ids=["skips a tile", "unmasks a tile"],
)
def test_wrong_bounds_are_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = make_visited.derive_bounds

    def derive(predicate: Any, **options: Any) -> Any:
        bounds = right(predicate, **options)
        return replace(bounds, intervals=tuple(map(wrong, bounds.intervals)))

    monkeypatch.setattr(make_visited, "derive_bounds", derive)
    with pytest.raises(ValueError, match="visible pair"):
        make_visited.counted(MASKS["window"])
