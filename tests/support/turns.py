"""What a fast run leaves out: of a product of parameters all but some, in turn; most examples."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")

#: Of a long list a fast run takes one of so many. It is a prime, so that it goes through all
#: values of what the list is a product of.
ONE_OF = 11

#: What ``--full`` is in the environment, which all processes of a test run share.
FULL_VARIABLE = "FLASHGEN_FULL_TESTS"


def is_full() -> bool:
    """Whether everything is run."""
    return os.environ.get(FULL_VARIABLE) == "1"


def share(items: Sequence[Item], turn: int, every: int = ONE_OF) -> Sequence[Item]:
    """All items in a full run; in a fast one of ``every`` so many, at least one, in turn."""
    return items if is_full() else items[turn % min(every, len(items)) :: every]


def numbered(*factors: Iterable[Any]) -> list[Any]:
    """Parameters of all combinations, the turn of each first."""
    return [pytest.param(i, *row, id="-".join(row)) for i, row in enumerate(product(*factors))]


def some(names: Iterable[Any], every: int) -> list[Any]:
    """Parameters of all names; all but one of ``every`` so many are for the full run alone."""
    return [
        pytest.param(name, marks=pytest.mark.full if i % every else ())
        for i, name in enumerate(names)
    ]


def in_turns(names: Iterable[Any], others: Sequence[Any], every: int) -> list[Any]:
    """Parameters of all (name, other); all but one of ``every`` are for the full run alone.

    Args:
        names: the first parameter.
        others: what each of them is tried with: one parameter, or a tuple of several.
        every: each name has one of so many others in a fast run, and each other of the names.
    """
    return [
        pytest.param(
            name,
            *(other if isinstance(other, tuple) else (other,)),
            marks=() if (i + j) % every == 0 else pytest.mark.full,
        )
        for i, name in enumerate(names)
        for j, other in enumerate(others)
    ]
