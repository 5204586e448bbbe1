"""A fast run compiles one of so many kernels of each kind, spread over variants and targets."""

from __future__ import annotations

from collections import Counter

import pytest

#: Of a test with more cases than this, a fast run has one of so many. It is a prime, so that it
#: goes through all variants, kernels and targets.
ONE_OF = 11

#: Tests whose few cases take long each: (what is in the name, one of so many).
SLOW = {
    "test_rows_of_several_heads_take_no_more": 8,
    "test_tiles_that_start_at_segments_need_what_is_predicted": 5,
    "test_the_unusual_is_predicted_too": 3,
    "test_what_is_turned_down_for_its_registers_does_spill": 2,
    "test_steps_that_only_drop_weights": 2,
}

#: Tests with many cases that compile nothing.
QUICK = {
    "test_which_shipped_variants_have_one",
    "test_every_shipped_variant_of_16_bits_has_a_gluon_kernel",
}


def _kind(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the others full."""
    here = [item for item in items if item.nodeid.startswith("tests/compile/")]
    cases, seen = Counter(map(_kind, here)), Counter[str]()
    for item in here:
        kind = _kind(item)
        name = kind.split("::")[1]
        every = SLOW.get(name, ONE_OF if cases[kind] > ONE_OF and name not in QUICK else 1)
        if seen[kind] % every:
            item.add_marker(pytest.mark.full)
        seen[kind] += 1
