"""Kernels of functions as FlexAttention's users write them, against float64."""

from __future__ import annotations

import pytest

from flashgen import AttentionSpec
from support.cases import Case
from support.idioms import LENGTH, MASKS, OURS, SCORES, VALUES
from support.turns import some
from support.variants import rendered_module
from sweep.backward import check_backward
from sweep.launch import check_kernel


def held(spec: AttentionSpec) -> None:
    module = rendered_module(spec)
    values = {param.name: VALUES[param.name] for param in spec.params}
    given = {name: x.float() if x.is_floating_point() else x for name, x in values.items()}
    case = Case(LENGTH, LENGTH, 2, 4, 2, params=given)
    check_kernel(module, spec, case, BLOCK_M=16, BLOCK_N=16)
    check_backward(module, spec, case, BLOCK_M=16, BLOCK_N=16)


@pytest.mark.parametrize("name", some(MASKS, every=3))
def test_masks(name: str) -> None:
    held(AttentionSpec(16, dtype="float32", mask=lambda *given: MASKS[name](OURS, *given)))


@pytest.mark.parametrize("name", some(SCORES, every=2))
def test_scores(name: str) -> None:
    held(AttentionSpec(16, dtype="float32", score=lambda *given: SCORES[name](OURS, *given)))
