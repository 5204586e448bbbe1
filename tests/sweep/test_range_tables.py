"""The kernel that finds which keys a condition shows, and when a module has it."""

from __future__ import annotations

import functools
import random
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec, Tensor
from flashgen.symbolic import RangeTable
from support.variants import rendered_module, shipped_plan, shipped_specs
from support.visits import Elements, range_table
from support.vocabulary import VOCABULARY


@functools.cache
def _module() -> ModuleType:
    return rendered_module(VOCABULARY["padded"].spec("float32", 16))


def _runs(length: int, cuts: int, seed: int) -> torch.Tensor:
    """Bools in runs."""
    at = random.Random(seed)
    ends = torch.tensor([at.randrange(length + 1) for _ in range(cuts)])
    return ((torch.arange(length)[:, None] >= ends).sum(1) + at.randrange(2)) % 2 == 1


@pytest.mark.parametrize("length", [1, 2, 100, 2047, 2048, 2049, 5000])
def test_it_finds_the_range_and_a_run_of_it(length: int) -> None:
    keys = torch.stack([_runs(length, cuts, cuts) for cuts in (0, 1, 2, 3, 4, 9)])
    keys = torch.cat([keys, torch.zeros(1, length, dtype=torch.bool)])
    numbers = keys.int() * 5 - 2 + torch.arange(length, dtype=torch.int32) % 2
    declared = Tensor("keys", ("batch", "kv_len"), "int32")
    for values, low, high, but in (
        (keys, 1, 1, False),
        (keys, 0, 0, True),
        (keys, 0, 0, False),
        (numbers, 0, 2**31 - 1, False),
        (numbers, -1, 3, True),
        (numbers, -(2**31), -2, False),
    ):
        table = RangeTable("range", declared, low, high, but)
        expected = range_table(table, {"keys": Elements(values.int().tolist())}).rows
        assert _module()._range_table(values, low, high, but).tolist() == expected
        # Any strides, any leading dimensions.
        turned = values.t().contiguous().t()[:, None]
        found = _module()._range_table(turned, low, high, but)
        assert found.dtype == torch.int32 and found[:, 0].tolist() == expected


def test_only_modules_that_read_one_have_it() -> None:
    assert not any(shipped_plan(name).every_range_table for name in shipped_specs())
    listed = AttentionSpec(64, mask=VOCABULARY["causal_blocks"].mask & VOCABULARY["padded"].mask)
    assert not hasattr(rendered_module(listed), "_range_table")
