"""The sweep can fail: wrong kernels, each a small slip from a right one, do not pass it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from flashgen import AttentionSpec, sliding_window
from flashgen.plan import KernelPlan
from support.cases import Case, every_remainder
from support.variants import rendered_module
from sweep.launch import check_kernel

SPEC = AttentionSpec(head_dim=16, dtype="float16", mask=sliding_window(21, 2, align="bottom_right"))

CASES = [
    *every_remainder(32, 16, equal_lengths=False),
    Case(37, 70, batch=2, q_heads=4, kv_heads=2),
    Case(37, 70, batch=2, q_heads=4, kv_heads=2, layout="padded"),
]


def _survives(module: ModuleType) -> bool:
    """Whether the kernel passes every case. Its reference is not the one under test."""
    try:
        for case in CASES:
            check_kernel(module, SPEC, case)
    except AssertionError:
        return False
    return True


def test_the_right_kernel_survives() -> None:
    assert _survives(rendered_module(SPEC))


def _interval(**edits: Callable[[Any], Any]) -> Callable[[KernelPlan], KernelPlan]:
    """A plan whose only interval has fields changed."""

    def edit(plan: KernelPlan) -> KernelPlan:
        (interval,) = plan.bounds.intervals
        fields = {name: change(getattr(interval, name)) for name, change in edits.items()}
        return replace(plan, bounds=replace(plan.bounds, intervals=(replace(interval, **fields),)))

    return edit


@pytest.mark.parametrize(
    "edit_plan",
    [
        pytest.param(_interval(begin=lambda key: key + 1), id="begin+1"),
        pytest.param(_interval(end=lambda key: key - 1), id="end-1"),
        pytest.param(_interval(full_begin=lambda key: key - 1), id="full_begin-1"),
        pytest.param(_interval(full_end=lambda key: key + 1), id="full_end+1"),
        pytest.param(
            lambda plan: replace(plan, bounds=replace(plan.bounds, rows_can_be_empty=False)),
            id="no row is empty",
        ),
    ],
)
def test_wrong_bounds_are_caught(edit_plan: Callable[[KernelPlan], KernelPlan]) -> None:
    assert not _survives(rendered_module(SPEC, edit_plan=edit_plan))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("visible = kv_idx < kv_len", "visible = kv_idx <= kv_len"),
        ("visible &= q_idx", "visible &= 1 + q_idx"),
        ("visible &= kv_idx", "visible &= 1 + kv_idx"),
        ("rows < num_rows - row", "rows <= num_rows - row"),
        ("tl.cdiv(some_end, BLOCK_N)", "some_end // BLOCK_N"),
        ("some_begin // BLOCK_N", "tl.cdiv(some_begin, BLOCK_N)"),
        ("full_begin = tl.cdiv(all_begin, BLOCK_N)", "full_begin = all_begin // BLOCK_N"),
        ("full_end = all_end // BLOCK_N", "full_end = tl.cdiv(all_end, BLOCK_N)"),
        ("m_new = tl.maximum(m_i, tl.max(scores, 1) * qk_scale)", "m_new = m_i"),
        ("l_i = l_i * alpha + tl.sum(p, 1)", "l_i += tl.sum(p, 1)"),
        ("acc * alpha[:, None]", "acc"),
        ("kv_head = head // (num_q_heads // num_kv_heads)", "kv_head = head % num_kv_heads"),
        ("head = pid // num_tiles_m % num_q_heads", "head = pid // num_tiles_m % num_kv_heads"),
        ("kv_head.to(tl.int64) * stride_vh", "kv_head.to(tl.int64) * stride_kn"),
        ("batch.to(tl.int64) * stride_kb", "batch.to(tl.int64)"),
        ("lse = (m_i + tl.math.log2(l_i))", "lse = (m_i + tl.math.log(l_i))"),
        ("in_rows = offs_m < q_len", "in_rows = offs_m < q_len - 1"),
        ("q_last = min(q_first + BLOCK_M, q_len) - 1", "q_last = q_first + BLOCK_M - 2"),
    ],
)
def test_wrong_source_is_caught(right: str, wrong: str) -> None:
    def edit(source: str) -> str:
        assert right in source, "the kernel no longer reads so: bring this test up to date"
        return source.replace(right, wrong)

    assert not _survives(rendered_module(SPEC, edit_source=edit))


def test_wrong_masks_are_caught() -> None:
    """The oracle runs the user's own function: a kernel of another mask is found out."""
    for left, right in ((20, 2), (22, 2), (21, 1), (21, 3)):
        other = replace(SPEC, mask=sliding_window(left, right, align="bottom_right"))
        assert not _survives(rendered_module(other))
