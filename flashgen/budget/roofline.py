"""step_clocks: the clocks of each unit of an SM for a step of a forward kernel's loop.

A step keeps the units of an SM busy: matrix units, exponentials, ordinary arithmetic, shared memory
and the path to L2. How far they overlap is the kernel's own: its model ranks its candidates.

The constants are of the kernels' instructions, not of a GPU. They were fitted once to the rates in
tests/data/probe_h200.json and in generated/tuning, as round numbers; test_rank.py holds the ranking
to those rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.budget.matrix_units import matrix_unit
from flashgen.budget.targets import Target
from flashgen.budget.traffic import Traffic
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.step_cost import score_work, tile_loads

# Instructions for an element of the scores besides its exponential: scale and subtract, maximum,
# sum, conversion, addresses; and those of a masked tile: positions, comparisons, selection.
ELEMENT_INSTRUCTIONS = 6
MASK_INSTRUCTIONS = 9

# What gathering an element takes besides its load: its address, and whether it is there.
GATHER_INSTRUCTIONS = 8

# An element changes layout through shared memory: written and read, 4 bytes each time.
EXCHANGED_BYTES = 8

# Seven rounds of Philox for eight scores, of two multiplications each, whose upper halves take two
# turns; then a shift for every other, a comparison, a selection, and a product.
DROPOUT_INSTRUCTIONS = 11

# A sigmoid's division: a reciprocal, which is computed as exponentials are, and its correction.
DIVISION_INSTRUCTIONS = 4

# For a row of scores, in each of the four lanes that share it: reductions across the lanes,
# statistics, the rescaling factor.
ROW_INSTRUCTIONS = 60
ROW_EXPONENTIALS = 4

SHARED_BYTES_PER_CLOCK = 128
# A matrix unit that reads its operands from shared memory itself gets this share of that.
OPERAND_SHARE = 0.75

# Warp groups read tf32 values transposed: the threads write them anew, with bank conflicts.
TRANSPOSING = 8

# How sharply the busiest unit decides: the power of the mean.
SHARPNESS = 2.75


@dataclass(frozen=True)
class Step:
    """Clocks of an SM for one step of one program's loop, by unit."""

    matrix: float
    exponentials: float
    arithmetic: float
    shared: float
    l2: float

    @property
    def turn(self) -> float:
        """A step of a program that has the SM to itself and its keys at hand."""
        return self.matrix + self.exponentials + self.arithmetic


def step_clocks(plan: KernelPlan, config: KernelConfig, target: Target, account: Traffic) -> Step:
    """The clocks of one step of the loop, averaged over masked and unmasked tiles."""
    elements = config.BLOCK_M * config.BLOCK_N
    steps = max(1, account.full_tiles + account.masked_tiles)
    masked = account.masked_tiles / steps
    qk, v = sum(plan.qk_segments), sum(plan.v_segments)
    score, softmax = score_work(plan.code), plan.normaliser == "softmax"
    gathers = sum(
        masked if load.masked else 1 for load in tile_loads(plan) if load.over == "scores"
    )
    instructions = elements * (
        ELEMENT_INSTRUCTIONS
        + masked * MASK_INSTRUCTIONS
        + score.instructions
        + gathers * GATHER_INSTRUCTIONS
        + (DIVISION_INSTRUCTIONS if plan.normaliser == "sigmoid" else 0)
        + (DROPOUT_INSTRUCTIONS if plan.dropout else 0)
    )
    functions = elements * (exponentials_of(plan) + score.functions)
    if softmax:  # a rescaled accumulator has v columns
        instructions += config.BLOCK_M * (v + ROW_INSTRUCTIONS)
        functions += config.BLOCK_M * ROW_EXPONENTIALS
    clock = target.clock_ghz * target.num_sms  # 10^9 clocks a second, of all SMs
    peak = target.peak_tflops(plan.input_precision or plan.triton_dtype) * 1e3 / clock
    keys = config.BLOCK_N * (plan.qk_head_dim + plan.v_head_dim) * plan.itemsize
    shared = _operand_bytes(plan, config, target) + gathers * elements * EXCHANGED_BYTES
    return Step(
        matrix=2 * elements * (qk + v) / peak,
        exponentials=functions / target.exp_per_clock,
        arithmetic=instructions / target.lanes_per_clock,
        shared=shared / SHARED_BYTES_PER_CLOCK,
        l2=(keys + account.element_bytes / steps) / (target.l2_gbps / clock),
    )


def exponentials_of(plan: KernelPlan) -> int:
    """How many functions a weight takes besides its score's, each of an exponential's time."""
    return {"softmax": 1, "sigmoid": 2, "products": 0}[plan.normaliser]


def _operand_bytes(plan: KernelPlan, config: KernelConfig, target: Target) -> float:
    """Shared memory that a step reads, in bytes of its full rate."""
    qk, v = sum(plan.qk_segments), sum(plan.v_segments)
    keys = config.BLOCK_N * (qk + v) * plan.itemsize
    queries = config.BLOCK_M * qk * plan.itemsize
    unit = matrix_unit(plan, config, target)
    if unit in ("wgmma", "tcgen05"):  # operands once for each instruction's rows
        rows = 64 if unit == "wgmma" else 128
        operands = (-(-config.BLOCK_M // rows) * keys + queries) / OPERAND_SHARE
        values = config.BLOCK_N * v * plan.itemsize
        return operands + (TRANSPOSING * values if plan.input_precision == "tf32" else 0)
    if unit == "mfma":  # each warp reads all keys; queries stay in registers
        return config.num_warps * keys
    by_columns = len(plan.v_segments) == 1 and plan.v_segments[0] > config.BLOCK_M
    weights = config.BLOCK_M * config.BLOCK_N * plan.itemsize if by_columns else 0
    readers = 1 if by_columns else config.num_warps
    return readers * keys + queries + (1 + config.num_warps) * weights
