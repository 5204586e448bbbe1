"""linear_usage: the shared memory that a block of the kernels of linear attention needs."""

from __future__ import annotations

from functools import cache
from typing import Any

import sympy

from flashgen.budget.buffers import Phase
from flashgen.budget.matrix_units import Unit, matrix_unit
from flashgen.budget.quantities import BLOCK_M, ITEMSIZE, NUM_STAGES
from flashgen.budget.targets import Target
from flashgen.budget.usage import SramUsage, usage_of_phases
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.linear import LinearPlan

#: Columns of tiles of features, of v, and of q and k where features are made of them beforehand.
QK_WIDTH, V_WIDTH, X_WIDTH = sympy.symbols("qk_width v_width x_width", integer=True, positive=True)

Parts = tuple[tuple[str, Any], ...]

# Bytes of a tile of q or k, of a tile of v, of a state and of weights, as products take them.
_OF_FEATURES = BLOCK_M * QK_WIDTH * ITEMSIZE
_OF_VALUES = BLOCK_M * V_WIDTH * ITEMSIZE
_STATE = QK_WIDTH * V_WIDTH * ITEMSIZE
_WEIGHTS = BLOCK_M * BLOCK_M * ITEMSIZE


def linear_usage(
    plan: KernelPlan, config: KernelConfig, target: Target, *, gradients: bool
) -> SramUsage:
    """The shared memory of the functions of one pass.

    Args:
        plan: what they compute.
        config: their configuration.
        target: the architecture.
        gradients: whether they are of the backward pass.
    """
    linear = LinearPlan(plan).of_tiles
    values = {
        **config.as_dict(),
        "itemsize": plan.itemsize,
        "qk_width": linear.qk_width,
        "v_width": linear.v_width,
        "x_width": linear.x_width,
    }
    unit = matrix_unit(plan, config, target)
    phases = _phases(gradients, linear.normalise, unit, plan.itemsize == 4)
    if linear.tiled and not gradients and unit == "wgmma":  # where a tile adds to others
        first, loop = phases
        loop = Phase("loop", (*loop.parts, ("features", _OF_FEATURES), ("P", _WEIGHTS)))
        phases = (first, loop)
    if linear.random:
        phases = (*phases, _of_random_features(unit))
    return usage_of_phases(phases, values, target)


@cache
def _phases(gradients: bool, normalised: bool, unit: Unit, wide: bool) -> tuple[Phase, ...]:
    """What a block holds at once.

    For tiles of 64 rows that TMA copies ahead on Hopper it is what the compiler allots. It is more
    for 16 or 32 rows, with one stage, and for other units: which of the tiles then stay in
    registers depends on the version of the compiler.
    """
    first = Phase("first state", (("state", 4 * QK_WIDTH * V_WIDTH),))
    if unit == "mfma":
        loop = _of_mfma(gradients)
    elif unit == "fma":
        loop = _of_fma(gradients)
    elif gradients:
        loop = _of_gradients(normalised, unit == "tcgen05")
    elif unit == "tcgen05":  # it takes the state from shared memory, too
        more = (("P", _WEIGHTS), ("barriers", 32 * (NUM_STAGES + 2)))
        loop = (("state", _STATE), *_tiles(NUM_STAGES), *more)
    elif normalised:  # each step begins with the sums of weights, for which Q goes to registers
        ahead = sympy.Max(NUM_STAGES - 1, 1)
        tiles = (("Q tiles", ahead * _OF_FEATURES), ("K tiles", ahead * _OF_FEATURES))
        values = (("V tiles", NUM_STAGES * _OF_VALUES), ("features", _OF_FEATURES))
        loop = (*tiles, *values, ("P", _WEIGHTS), ("barriers", 24 * ahead))
    else:
        stages = sympy.Max(NUM_STAGES, 2)
        loop = (*_tiles(stages), ("P", _WEIGHTS), ("barriers", 8 * stages))
    pieces: Parts = ()
    if wide and unit in ("wgmma", "tcgen05"):  # of 32 bits, which they do not read transposed
        pieces = (("pieces", 5 * sympy.Max(_OF_FEATURES, _OF_VALUES)),)
    if not gradients or unit in ("mfma", "fma"):
        return first, Phase("loop", (*loop, *pieces))
    return first, Phase("loop", (*loop, *pieces)), Phase("values", (*_of_values(), *pieces))


@cache
def _of_random_features(unit: Unit) -> Phase:
    """What a block of the largest of their kernels holds, that of gradients, at most."""
    matrix = ("matrix", QK_WIDTH * X_WIDTH * ITEMSIZE)
    if unit == "mfma":
        return Phase("features", (matrix,))
    tiles = (("Q tiles", BLOCK_M * X_WIDTH * ITEMSIZE), ("features", _OF_FEATURES))
    exchanged = 128 * QK_WIDTH if unit == "mma.sync" else sympy.Integer(0)
    return Phase("features", (matrix, *tiles, ("pieces", exchanged)))


def _of_mfma(gradients: bool) -> Parts:
    """Most tiles go straight to registers."""
    widest, ahead = sympy.Max(_OF_FEATURES, _OF_VALUES), NUM_STAGES - 1
    if not gradients:
        return (("state", _STATE), ("K tiles", ahead * widest))
    return (
        ("state", _STATE),
        ("K tiles", NUM_STAGES * widest),
        ("V tiles", ahead * _OF_VALUES),
    )


def _of_fma(gradients: bool) -> Parts:
    """Both operands of each product are read from shared memory."""
    ahead = sympy.Max(NUM_STAGES - 1, 1)
    ours = ("dO tiles", ahead * _OF_VALUES) if gradients else ("Q tiles", NUM_STAGES * _OF_FEATURES)
    return (
        ("state", _STATE),
        ours,
        ("K tiles", NUM_STAGES * _OF_FEATURES),
        ("V tiles", ahead * _OF_VALUES),
        ("barriers", 8 * (NUM_STAGES + 1)),
    )


def _of_gradients(normalised: bool, tensor_memory: bool) -> Parts:
    stages = sympy.Max(NUM_STAGES, 2)
    return (
        ("state", _STATE),
        ("K tiles", stages * _OF_FEATURES),
        ("V tiles", stages * _OF_VALUES),
        ("dO tiles", stages * _OF_VALUES),
        ("features", 2 * _OF_FEATURES + _WEIGHTS if tensor_memory else sympy.Integer(0)),
        ("LSE, delta", 8 * BLOCK_M if normalised else sympy.Integer(0)),
        ("barriers", 8 * (3 * stages - 2)),
    )


def _of_values() -> Parts:
    """The gradients of values read features of queries and keys."""
    stages = sympy.Max(NUM_STAGES, 2)
    return (
        ("Q tiles", stages * _OF_FEATURES),
        ("K tiles", stages * _OF_FEATURES),
        ("dO tiles", stages * _OF_VALUES),
        ("P", _WEIGHTS),
        ("barriers", 8 * (3 * stages - 2)),
    )


def _tiles(stages: Any) -> Parts:
    return (
        ("Q tiles", stages * _OF_FEATURES),
        ("K tiles", stages * _OF_FEATURES),
        ("V tiles", stages * _OF_VALUES),
    )
