"""A fast run compiles one of so many kernels of each kind, spread over variants and targets."""

from __future__ import annotations

from collections import Counter

import pytest

from support.turns import ONE_OF

#: Tests whose cases take long each, or of which a fast run has a share of the work already: one
#: case of so many, by name.
SLOW = {
    "test_the_space_needs_exactly_what_is_predicted": 3,
    "test_tiles_that_start_at_segments_need_what_is_predicted": 5,
    "test_the_unusual_is_predicted_too": 3,
}

#: Tests that only a full run has: each compiles whole kernels, and what most of them show is about
#: the compiler, or about copies of kernels that benchmarks make.
FULL = {
    "test_rows_of_several_heads_take_no_more",
    "test_what_is_turned_down_for_its_registers_does_spill",
    "test_steps_that_only_drop_weights",
    "test_two_loops_that_share_addresses_would_be_miscompiled",
    "test_they_compile",
    "test_so_do_those_with_notes",
    "test_a_narrow_sigmoid_has_too_few_registers",
    "test_what_is_learned_elsewhere_takes_no_registers",
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
        if name in FULL or seen[kind] % every:
            item.add_marker(pytest.mark.full)
        seen[kind] += 1
