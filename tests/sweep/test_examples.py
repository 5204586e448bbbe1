"""The variants of examples/, against float64."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
import torch

from flashgen import AttentionSpec
from flashgen.loader import load
from support.cases import Case
from support.variants import ROOT, rendered_module
from sweep.launch import check_kernel

CASES = {
    "bigbird_drawn": [Case(n, n, 2, 2, 1) for n in (1, 64, 70, 400)],
    "capped_window": [
        Case(n, n, 2, 4, 2, params={"window": window, "cap": 3.0})
        for n, window in ((1, 0), (33, 9), (64, 64), (70, 1000))
    ],
    "chunks_with_sinks": [
        Case(n, n, 2, 4, 2, layout="padded", params={"chunk": chunk})
        for n, chunk in ((1, 9), (33, 9), (48, 48), (70, 25))
    ],
    "images_in_text": [
        Case(70, 70, 2, 2, 1),
        *(
            # Text, an image, text, an image; no image; nothing else.
            Case(67, 67, params={"segments": torch.tensor([ids], dtype=torch.int32)})
            for ids in (
                [*range(10), *[10] * 30, *range(11, 20), *[20] * 18],
                [*range(67)],
                [0] * 67,
            )
        ),
    ],
    "packed_windows": [
        Case(n, n, 2, 2, 1, params={"left": left, "cap": 3.0})
        for n, left in ((17, 0), (64, 11), (70, 1000))
    ],
    "sigmoid_decay": [
        Case(
            n, kv, 2, 3, 1,
            params={
                "lengths": torch.tensor([kv, kv // 3], dtype=torch.int32),
                "decay": torch.tensor([0.0, 0.01, 0.5]),
            },
        )
        for n, kv in ((16, 16), (20, 75), (75, 20))
    ],
    "tree_with_sinks": [
        Case(q, kv, 2, 2, 1, params={"sinks": sinks, "recent": recent})
        for q, kv, sinks, recent in ((7, 90, 4, 20), (33, 70, 0, 5), (16, 60, 100, 0), (5, 5, 4, 4))
    ],
    "video_windows": [
        Case(n, n, 1, 2, 2, params={"height": 4, "width": 6, "past": past, "radius": radius})
        for n, past, radius in ((24, 3, 1), (96, 2, 2), (96, 0, 0), (70, 9, 1))
    ],
}  # fmt: skip


@functools.cache
def specs() -> dict[str, AttentionSpec]:
    return {v.name: v.spec for v in load([ROOT / "examples" / "specs"])}


@functools.cache
def module(name: str) -> ModuleType:
    return rendered_module(specs()[name])


def test_each_has_cases() -> None:
    assert specs().keys() == CASES.keys()


# The first of each in a fast run, and some others.
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=pytest.mark.full if i % 3 else ())
        for name, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
    ids=str,
)
def test_values(name: str, case: Case) -> None:
    for block_m, block_n in ((32, 16), (16, 32)):
        check_kernel(module(name), specs()[name], case, BLOCK_M=block_m, BLOCK_N=block_n)
