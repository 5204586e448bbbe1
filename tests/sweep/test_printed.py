"""Printed masks and scores in Triton's own arithmetic, against Python's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashgen.symbolic.hoisting import hoist
from support.expressions import expected_of
from support.tile_kernels import (
    BLOCK_M,
    BLOCK_N,
    EXPRESSIONS,
    NAMES,
    TILE,
    kernel_of,
    scalars,
    tensors,
)


@pytest.mark.parametrize("exprs", EXPRESSIONS, ids=str)
def test_triton_computes_what_python_does(exprs: list[Any], tmp_path: Path) -> None:
    out = torch.full((len(exprs), BLOCK_M, BLOCK_N), float("nan"))
    scores = torch.from_numpy(TILE["scores"].astype("float32"))
    kernel = kernel_of(hoist(exprs, NAMES), tmp_path)
    kernel[(1,)](scores, out, *tensors().values(), *scalars().values(), APPROX=False)
    # Out of range a kernel reads 0, and so does Python in this padding, from either end.
    padded = {
        name: np.pad(TILE[name], [(0, 0)] * (TILE[name].ndim - 1) + [(0, 40)])
        for name in ("bias", "doc", "flag")
    }
    for expr, found in zip(exprs, out.numpy(), strict=True):
        want = expected_of(expr, TILE | padded).astype(float)
        np.testing.assert_allclose(found, want, rtol=4e-6, atol=4e-6)
