"""linear_usage: the shared memory that a block of the kernels of linear attention needs."""

from __future__ import annotations

from dataclasses import dataclass
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
from flashgen.plan.linear import WIDEST, LinearPlan

#: Columns of tiles of features, of v, and of q and k where features are made of them beforehand.
QK_WIDTH, V_WIDTH, X_WIDTH = sympy.symbols("qk_width v_width x_width", integer=True, positive=True)

#: Random features that a program makes at once, and the fewest rows that it makes them of.
MADE_WIDTH, MADE_ROWS = sympy.symbols("made_width made_rows", integer=True, positive=True)

#: The largest matrix of random features that a program keeps whole, bytes.
MOST_OF_MATRIX = 2**16

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
        "made_width": linear.qk_width if gradients else width_of_features(plan, target),
        "made_rows": max(linear.rows_of_features, config.BLOCK_M),
    }
    holds = _Holds(
        normalised=linear.normalise,
        mapped=linear.sloped or linear.learned,
        decayed=linear.decayed,
        by_features=linear.by_features,
        staged=not linear.tiled,
        wide=plan.itemsize == 4,
        peaked=linear.random,
    )
    unit = matrix_unit(plan, config, target)
    phases = _phases(gradients, unit, holds)
    if linear.tiled and not gradients and unit == "wgmma":  # where a tile adds to others
        first, loop = phases
        loop = Phase("loop", (*loop.parts, ("features", _OF_FEATURES), ("P", _WEIGHTS)))
        phases = (first, loop)
    if linear.random:
        phases = (*phases, _of_random_features(unit))
    if linear.by_features:
        phases = (*phases, _of_chunks(unit))
    return usage_of_phases(phases, values, target)


def width_of_features(plan: KernelPlan, target: Target) -> int:
    """The random features that a program makes at once on a target: all of them, or a tile.

    All where they are two tiles at most, without padding, and shared memory holds their matrix and
    as much again, for rows and features.
    """
    linear = LinearPlan(plan)
    matrix = linear.features * linear.x_width * plan.itemsize
    fits = matrix <= MOST_OF_MATRIX and 2 * matrix <= target.max_shared
    if linear.features == 2 * WIDEST and fits:
        return linear.features
    return linear.of_tiles.qk_width


@dataclass(frozen=True)
class _Holds:
    """What decides which tiles a block holds.

    Attributes:
        normalised: whether weights are divided by their sum.
        mapped: whether gradients read q or k besides what products read.
        decayed: whether there are decays.
        by_features: whether each feature has its own, and weights within chunks are read.
        staged: whether all tiles of a loop are copied ahead, not those of products alone.
        wide: whether elements have 32 bits.
        peaked: whether each key has an exponent, the largest of its random features.
    """

    normalised: bool
    mapped: bool
    decayed: bool
    by_features: bool
    staged: bool
    wide: bool
    peaked: bool


@cache
def _phases(gradients: bool, unit: Unit, holds: _Holds) -> tuple[Phase, ...]:
    """What a block holds at once.

    For tiles of 64 rows that TMA copies ahead on Hopper it is what the compiler allots. It is more
    for 16 or 32 rows, with one stage, and for other units: which of the tiles then stay in
    registers depends on the version of the compiler.
    """
    first = Phase("first state", (("state", 4 * QK_WIDTH * V_WIDTH),))
    if unit == "mfma":
        loop = _of_mfma(gradients, holds)
    elif unit == "fma":
        loop = _of_fma(gradients, holds)
    elif gradients:
        loop = _of_gradients(unit == "tcgen05", holds)
    elif unit == "tcgen05":  # it takes the state from shared memory, too
        more = (("P", _WEIGHTS), ("barriers", 32 * (NUM_STAGES + 2)))
        exponents = 4 * BLOCK_M * (NUM_STAGES + 1) if holds.peaked else sympy.Integer(0)
        loop = (("state", _STATE), *_tiles(NUM_STAGES), *more, ("exponents", exponents))
    elif holds.normalised:  # a step begins with the sums of weights: Q goes to registers
        ahead = sympy.Max(NUM_STAGES - 1, 1)
        tiles = (("Q tiles", ahead * _OF_FEATURES), ("K tiles", ahead * _OF_FEATURES))
        values = (("V tiles", NUM_STAGES * _OF_VALUES), ("features", _OF_FEATURES))
        sums = 4 * QK_WIDTH * (NUM_STAGES - 1) if holds.staged else sympy.Integer(0)
        weights = ahead * _WEIGHTS if holds.by_features else _WEIGHTS
        loop = (*tiles, *values, ("P", weights), ("LSE", sums), ("barriers", 24 * ahead))
    else:
        stages = sympy.Max(NUM_STAGES, 2)
        weights = stages * _WEIGHTS if holds.by_features else _WEIGHTS
        loop = (*_tiles(stages), ("P", weights), ("barriers", 8 * stages))
    others: Parts = ()
    if holds.by_features:
        others = (("decays", _of_feature_decays(gradients, holds)),)
    elif holds.decayed:
        others = (("decays", _of_decays(holds)),)
    if holds.wide and unit in ("wgmma", "tcgen05"):  # of 32 bits, which they do not read transposed
        others = (*others, ("pieces", 5 * sympy.Max(_OF_FEATURES, _OF_VALUES)))
    if not gradients or unit in ("mfma", "fma"):
        return first, Phase("loop", (*loop, *others))
    if holds.by_features:
        return (
            first,
            Phase("loop", (*loop, *others)),
            Phase("values", _of_read_weights(holds)),
        )
    return first, Phase("loop", (*loop, *others)), Phase("values", (*_of_values(), *others))


@cache
def _of_random_features(unit: Unit) -> Phase:
    """What a block of the largest of their kernels holds, at most."""
    matrix = ("matrix", MADE_WIDTH * X_WIDTH * ITEMSIZE)
    if unit == "mfma":
        return Phase("features", (matrix,))
    features = ("features", MADE_ROWS * QK_WIDTH * ITEMSIZE)
    tiles = (("Q tiles", MADE_ROWS * X_WIDTH * ITEMSIZE), features)
    exchanged = 128 * QK_WIDTH if unit == "mma.sync" else sympy.Integer(0)
    return Phase("features", (matrix, *tiles, ("pieces", exchanged)))


def _of_decays(holds: _Holds) -> Any:
    """Their sums, in the layout of each product that takes them; keys times their decays."""
    parts = 2 if holds.wide else 1
    return parts * (16 * BLOCK_M * NUM_STAGES + 24 * NUM_STAGES) + 4 * QK_WIDTH


def _of_feature_decays(gradients: bool, holds: _Holds) -> Any:
    """Those over a chunk, a number for each feature, in the layouts that take them.

    If weights are normalised, gradients have as many sums over chunks, and divisors of rows.
    """
    ahead = sympy.Max(NUM_STAGES, 2) - 1
    if gradients:
        return ahead * (8 * QK_WIDTH + 4 * BLOCK_M if holds.normalised else 4 * QK_WIDTH)
    return 4 * QK_WIDTH * (2 * NUM_STAGES + 6 if holds.normalised else NUM_STAGES + 7)


def _of_read_weights(holds: _Holds) -> Parts:
    """The gradients of values, where weights within chunks are read."""
    stages = sympy.Max(NUM_STAGES, 2)
    pieces = 5 * sympy.Max(_OF_FEATURES, _OF_VALUES) if holds.wide else sympy.Integer(0)
    return (
        ("Q tiles", stages * _OF_FEATURES),
        ("K tiles", stages * _OF_FEATURES),
        ("dO tiles", stages * _OF_VALUES),
        ("P", stages * _WEIGHTS),
        ("decays", 4 * QK_WIDTH * (NUM_STAGES + 7)),
        ("pieces", pieces),
        ("barriers", 8 * (3 * stages - 2)),
    )


@cache
def _of_chunks(unit: Unit) -> Phase:
    """What a block of the kernels of decays of features holds, at most: rows of 128 bytes."""
    tile = BLOCK_M * sympy.Min(QK_WIDTH * ITEMSIZE, 128)
    tiles = 2 * tile if unit == "mfma" else 6 * tile
    return Phase(
        "features", (("features", tiles), ("P", 2 * _WEIGHTS), ("barriers", sympy.Integer(64)))
    )


def _of_mfma(gradients: bool, holds: _Holds) -> Parts:
    """Most tiles go straight to registers."""
    widest, ahead = sympy.Max(_OF_FEATURES, _OF_VALUES), NUM_STAGES - 1
    if holds.by_features and not gradients:
        tiles = ("K tiles", ahead * _OF_FEATURES), ("V tiles", ahead * _OF_VALUES)
        return (("state", _STATE), *tiles, ("P", ahead * _WEIGHTS))
    if not gradients:
        return (("state", _STATE), ("K tiles", ahead * widest))
    return (
        ("state", _STATE),
        ("K tiles", NUM_STAGES * widest),
        ("V tiles", ahead * _OF_VALUES),
        ("Q tiles", ahead * _OF_FEATURES if holds.mapped else sympy.Integer(0)),
    )


def _of_fma(gradients: bool, holds: _Holds) -> Parts:
    """Both operands of each product are read from shared memory."""
    ahead, none = sympy.Max(NUM_STAGES - 1, 1), sympy.Integer(0)
    ours = ("dO tiles", ahead * _OF_VALUES) if gradients else ("Q tiles", NUM_STAGES * _OF_FEATURES)
    return (
        ("state", _STATE),
        ours,
        ("K tiles", NUM_STAGES * _OF_FEATURES),
        ("V tiles", ahead * _OF_VALUES),
        ("features", NUM_STAGES * _OF_FEATURES if gradients and holds.mapped else none),
        ("P", NUM_STAGES * _WEIGHTS if holds.by_features and not gradients else none),
        ("LSE", ahead * (4 * QK_WIDTH + 12 * BLOCK_M) if holds.normalised else none),
        ("barriers", 8 * (NUM_STAGES + 1)),
    )


def _of_gradients(tensor_memory: bool, holds: _Holds) -> Parts:
    stages, none = sympy.Max(NUM_STAGES, 2), sympy.Integer(0)
    ahead = stages - 1
    features = none
    if tensor_memory:
        features = _OF_FEATURES + 24 * BLOCK_M if holds.mapped else 2 * _OF_FEATURES + _WEIGHTS
    sums = ahead * (4 * QK_WIDTH + 12 * BLOCK_M) - 8 if holds.staged else none
    return (
        ("state", _STATE),
        ("K tiles", stages * _OF_FEATURES),
        ("V tiles", stages * _OF_VALUES),
        ("dO tiles", stages * _OF_VALUES),
        ("Q tiles", ahead * _OF_FEATURES if holds.mapped else none),
        ("features", features),
        ("LSE, delta", sums if holds.normalised else none),
        (
            "barriers",
            40 * ahead if holds.by_features and not holds.normalised else 8 * (3 * stages - 2),
        ),
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
