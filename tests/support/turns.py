"""What a fast run leaves out: of a product of parameters all but some, in turn; most examples."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

#: What ``--full`` is in the environment, which all processes of a test run share.
FULL_VARIABLE = "FLASHGEN_FULL_TESTS"


def is_full() -> bool:
    """Whether everything is run."""
    return os.environ.get(FULL_VARIABLE) == "1"


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
