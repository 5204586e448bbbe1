"""Kernels of one tile that compute printed masks and scores."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import sympy
import torch

from flashgen.symbolic.hoisting import Hoisted
from flashgen.symbolic.varies_over import SCALE, SCORES
from flashgen.symbols import (
    KV_IDX,
    Q_IDX,
    B,
    BitAnd,
    Floor,
    FloorDiv,
    FloorMod,
    H,
    Load,
    ShiftLeft,
    ShiftRight,
    Truncate,
)
from support.expressions import (
    BIAS,
    CAP,
    DOC,
    FLAG,
    LEFT,
    LOG2E,
    SLOPES,
    TEMPERATURE,
    VALUES,
    choice,
)

NAMES = {"b": "batch", "h": "head"}
BLOCK_M, BLOCK_N = 16, 32
DISTANCE = KV_IDX - Q_IDX
TILE = {
    **VALUES,
    "q_idx": np.arange(7, 7 + BLOCK_M)[:, None],
    "kv_idx": np.arange(3, 3 + BLOCK_N)[None, :],
    "scores": np.sin(np.arange(float(BLOCK_M * BLOCK_N))).reshape(BLOCK_M, BLOCK_N) * 5,
}
HEADER = """
import triton
import triton.language as tl


@triton.jit
def _at_1d(tensor, i):
    ptr, size = tensor
    value = tl.load(ptr + i, mask=(i >= 0) & (i < size), other=0)
    return value


@triton.jit
def _at_2d(tensor, i, j):
    ptr, rows, columns = tensor
    inside = (i >= 0) & (i < rows) & (j >= 0) & (j < columns)
    return tl.load(ptr + (i * columns + j), mask=inside != 0, other=0)


@triton.jit
def _tanh(x, APPROX: tl.constexpr):
    return 1 - 2 / (tl.exp(2 * x) + 1)
"""
BUCKET = choice(
    DISTANCE < 8,
    sympy.Max(DISTANCE, 0),
    sympy.Min(8 + Truncate(sympy.log(sympy.Max(DISTANCE, 1) / 8) * 2.885390081777927), 15),
)


#: Together they print every node.
EXPRESSIONS: list[list[Any]] = [
    [CAP * sympy.tanh(SCALE * SCORES / CAP) * LOG2E],
    [SCALE * SCORES * LOG2E + Load(SLOPES, H) * DISTANCE * LOG2E],
    [CAP * sympy.tanh((SCALE * SCORES + Load(SLOPES, H) * DISTANCE) / CAP)],
    [SCALE * SCORES + Load(BIAS, H, DISTANCE + 9), Load(BIAS, H, DISTANCE + 9) > 0],
    [SCALE * SCORES + Load(BIAS, H, BUCKET)],
    [SCORES + Load(BIAS, B, Q_IDX) * Load(BIAS, H, KV_IDX) + CAP * LEFT],
    [SCORES * Load(TEMPERATURE, FloorMod(H, 2)) / sympy.log(Q_IDX + 2)],
    [choice(sympy.Eq(FloorMod(sympy.Abs(DISTANCE), 2), 1), SCORES, SCORES * CAP)],
    [
        sympy.Eq(Load(DOC, B, Q_IDX), Load(DOC, B, KV_IDX)) & (Q_IDX >= KV_IDX),
        sympy.Ne(Load(FLAG, KV_IDX), 0, evaluate=False) | sympy.Lt(KV_IDX, Load(DOC, B, 4)),
        ~((Q_IDX > 9) & (KV_IDX > Q_IDX)),
    ],
    [FloorDiv(DISTANCE, 4) + SCORES, sympy.Max(SCORES, DISTANCE, CAP) * sympy.Min(CAP, LEFT)],
    [sympy.sqrt(sympy.Abs(SCORES) + 1) / (1 + sympy.exp(-SCORES)) + 2 ** (SCORES * CAP / 8)],
    [sympy.erf(SCORES) * CAP + sympy.atan(SCORES) + sympy.atan(Load(SLOPES, H) * DISTANCE)],
    [Floor(SCORES / 3) - CAP * Floor(0.31 * DISTANCE) + ShiftLeft(3, FloorMod(KV_IDX, 4))],
    [sympy.Eq(BitAnd(ShiftRight(Load(DOC, B, Q_IDX) - 3, FloorMod(KV_IDX, 4)), 1), 1)],
    [SCORES + CAP * KV_IDX**2 / 900, 0.1 * DISTANCE + sympy.cos(SCORES) - sympy.sin(Q_IDX)],
]


def kernel_of(hoisted: Hoisted, folder: Path) -> Any:
    """A kernel of one tile that stores every result, as floats."""
    arguments = [*(f"{name}_ptr" for name in tensors()), *scalars()]
    lines = [
        f"q_idx = {TILE['q_idx'][0, 0]} + tl.arange(0, {BLOCK_M})[:, None]",
        f"kv_idx = {TILE['kv_idx'][0, 0]} + tl.arange(0, {BLOCK_N})[None, :]",
        f"at = tl.arange(0, {BLOCK_M})[:, None] * {BLOCK_N} + tl.arange(0, {BLOCK_N})[None, :]",
        "scores = tl.load(scores_ptr + at)",
        *(
            f"{name} = ({name}_ptr, {', '.join(map(str, tensor.shape))})"
            for name, tensor in tensors().items()
        ),
    ]
    for group in (hoisted.scalars, hoisted.rows, hoisted.columns, hoisted.elements):
        lines += [f"{assignment.name} = {assignment.code.text()}" for assignment in group]
    for i, result in enumerate(hoisted.results):
        lines += [
            f"result = tl.cast({result.text()}, tl.float32) + tl.zeros_like(scores)",
            f"tl.store(out_ptr + {i * BLOCK_M * BLOCK_N} + at, result)",
        ]
    parameters = ", ".join(["scores_ptr", "out_ptr", *arguments, "APPROX: tl.constexpr"])
    body = "\n".join(f"    {line}" for line in lines)
    path = folder / "printed_kernel.py"
    path.write_text(f"{HEADER}\n\n@triton.jit\ndef kernel({parameters}):\n{body}\n")
    spec = importlib.util.spec_from_file_location("printed_kernel", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def tensors() -> dict[str, torch.Tensor]:
    """The declared tensors of `TILE`, as a kernel takes them."""
    return {
        name: torch.from_numpy(value.astype("float32" if value.dtype.kind == "f" else "int32"))
        for name, value in TILE.items()
        if isinstance(value, np.ndarray) and name not in ("q_idx", "kv_idx", "scores")
    }


def scalars() -> dict[str, int | float]:
    """Its plain numbers."""
    return {name: value for name, value in TILE.items() if not isinstance(value, np.ndarray)}
