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

#: Columns of tiles of q and k, and of v.
QK_WIDTH, V_WIDTH = sympy.symbols("qk_width v_width", integer=True, positive=True)

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
    linear = LinearPlan(plan)
    unit, wide = matrix_unit(plan, config, target), plan.itemsize == 4
    if not linear.tiled:
        phases = _phases(gradients, linear.normalise, unit, wide)
        return _usage_of(phases, linear, config, target)
    over_values = _phases_over_values(gradients, linear.normalise, unit, wide)
    usage = _usage_of(over_values, linear.over_values, config, target)
    if not gradients:  # its states need less
        return usage
    over_features = _phases(True, linear.normalise, unit, wide)
    other = _usage_of(over_features, linear.over_features, config, target)
    return max(usage, other, key=lambda x: x.total)


def _usage_of(
    phases: tuple[Phase, ...], linear: LinearPlan, config: KernelConfig, target: Target
) -> SramUsage:
    values = {
        **config.as_dict(),
        "itemsize": linear.plan.itemsize,
        "qk_width": linear.qk_width,
        "v_width": linear.v_width,
    }
    return usage_of_phases(phases, values, target)


@cache
def _phases_over_values(
    gradients: bool, normalised: bool, unit: Unit, wide: bool
) -> tuple[Phase, ...]:
    """What a block holds that has all features and a tile of columns of v.

    Two groups of warps share the rows of a state, and exchange it by shared memory.
    """
    first, loop = _phases(gradients, normalised, unit, wide)
    if unit == "mfma":
        return first, loop
    stages, ahead = sympy.Max(NUM_STAGES, 2), sympy.Max(NUM_STAGES - 1, 1)
    state, features = ("state", _STATE), ("features", _OF_FEATURES)
    parts: Parts = tuple(part for part in loop.parts if part[0] != "P")
    if gradients and unit == "fma":
        tiles = (("K tiles", ahead * _OF_FEATURES), ("Q tiles", ahead * _OF_FEATURES))
        values = ("dO tiles", ahead * _OF_VALUES)
        return first, Phase("loop", (state, *tiles, values, features, ("barriers", 16 * stages)))
    if gradients:
        tiles = (("K tiles", stages * _OF_FEATURES), ("Q tiles", stages * _OF_FEATURES))
        values = ("dO tiles", stages * _OF_VALUES)
        parts = (state, *tiles, values, ("barriers", 8 * (3 * stages - 2)))
        if wide and unit in ("wgmma", "tcgen05"):
            parts = (*parts, ("pieces", 5 * sympy.Max(_OF_FEATURES, _OF_VALUES)))
        if unit == "tcgen05":
            parts = (*parts, ("P", _WEIGHTS + 40 * stages))
        return first, Phase("loop", parts)
    if unit == "wgmma":
        return first, Phase("loop", (state, *parts))
    if unit == "mma.sync":
        tiles = (("Q tiles", 2 * _OF_FEATURES), ("K tiles", _OF_FEATURES))
        step = Phase("one step", (state, *tiles, ("V tiles", _OF_VALUES)))
        tiles = (("Q tiles", ahead * _OF_FEATURES), ("K tiles", ahead * _OF_FEATURES))
        parts = (state, *tiles, ("V tiles", (ahead + 1) * _OF_VALUES))
        parts = (*parts, features) if wide else parts
        return first, step, Phase("loop", (*parts, ("barriers", 24 * NUM_STAGES - 8)))
    return first, loop


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
    if wide and unit in ("wgmma", "tcgen05"):  # of 32 bits, which they do not read transposed
        loop = (*loop, ("pieces", 5 * sympy.Max(_OF_FEATURES, _OF_VALUES)))
    return first, Phase("loop", loop)


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


def _tiles(stages: Any) -> Parts:
    return (
        ("Q tiles", stages * _OF_FEATURES),
        ("K tiles", stages * _OF_FEATURES),
        ("V tiles", stages * _OF_VALUES),
    )
