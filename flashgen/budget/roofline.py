"""predict: the time of a kernel from what an SM has to do for it.

A step of the loop keeps the units of an SM busy: matrix units, exponentials, ordinary arithmetic,
shared memory and the path to L2. Inside one program they take turns, products, then softmax, and
a wait where the next keys are still on their way; other programs on the same SM fill the gaps. So a
step costs what its busiest unit needs, or its turns divided by the programs that overlap, and a
little more than either where several come close. L2 sets a floor to a step, DRAM to the whole.

The constants are of the kernel's instructions, not of a GPU. They were fitted once to the rates in
tests/data/probe_h200.json and in generated/tuning, as round numbers; test_rank.py holds the ranking
to those rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.budget.occupancy import occupancy
from flashgen.budget.sram import matrix_unit
from flashgen.budget.targets import Target
from flashgen.budget.traffic import Traffic, Workload, traffic
from flashgen.config import KernelConfig
from flashgen.plan import KernelPlan
from flashgen.plan.inner import score_work, tile_loads

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

# Clocks from asking for a tile to having it, and of a program outside its loop.
LOAD_CLOCKS = 1600
PROGRAM_CLOCKS = 2500

SHARED_BYTES_PER_CLOCK = 128
# A matrix unit that reads its operands from shared memory itself gets this share of that.
OPERAND_SHARE = 0.75

# Warp groups read tf32 values transposed: the threads write them anew, with bank conflicts.
TRANSPOSING = 8

# Two warp groups of one program drift apart a little, as if there were so many programs.
TWO_GROUPS = 1.5

# How sharply the busiest unit decides: the power of the mean.
SHARPNESS = 2.75


@dataclass(frozen=True)
class Step:
    """Clocks of an SM for one step of one program's loop, by what it keeps busy."""

    matrix: float
    exponentials: float
    arithmetic: float
    shared: float
    l2: float

    @property
    def turn(self) -> float:
        """A step of a program that has the SM to itself and its keys at hand."""
        return self.matrix + self.exponentials + self.arithmetic


@dataclass(frozen=True)
class Prediction:
    """The modelled time of one call.

    Attributes:
        seconds: of the call.
        bound: what it waits for most: a field of `Step`, ``"turns"`` or ``"dram"``.
        step: where the clocks of the loop go.
        programs: query tiles that share an SM.
    """

    seconds: float
    bound: str
    step: Step
    programs: int


def predict(plan: KernelPlan, config: KernelConfig, target: Target, work: Workload) -> Prediction:
    """The time of a kernel on a target, from its instructions and bytes.

    Raises:
        ValueError: the configuration does not fit the target.
    """
    programs = occupancy(plan, config, target).blocks
    if not programs:
        raise ValueError(f"{config} does not fit {target.name}")
    account = traffic(plan, config, target, work)
    overlap = programs * _drift(plan, config)
    step = step_clocks(plan, config, target, account)
    wait = max(0.0, LOAD_CLOCKS - (config.num_stages - 1) * step.turn)
    costs = {**vars(step), "turns": (step.turn + wait) / overlap}
    floor = costs.pop("l2")
    mean = float(sum(cost**SHARPNESS for cost in costs.values()) ** (1 / SHARPNESS))
    steps = account.full_tiles + account.masked_tiles
    clocks = steps * max(floor, mean) + account.programs * PROGRAM_CLOCKS / overlap
    seconds = clocks / target.num_sms / (target.clock_ghz * 1e9)
    dram = account.dram_bytes / (target.dram_gbps * 1e9)
    bound = "l2" if floor > mean else max(costs, key=lambda name: costs[name])
    return Prediction(max(seconds, dram), "dram" if dram > seconds else bound, step, programs)


def step_clocks(plan: KernelPlan, config: KernelConfig, target: Target, account: Traffic) -> Step:
    """What one step of the loop, averaged over masked and unmasked tiles, asks of an SM."""
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
        + (0 if softmax else DIVISION_INSTRUCTIONS)
        + (DROPOUT_INSTRUCTIONS if plan.dropout else 0)
    )
    functions = elements * (1 + score.functions + (0 if softmax else 1))
    if softmax:  # a rescaled accumulator has v columns
        instructions += config.BLOCK_M * (v + ROW_INSTRUCTIONS)
        functions += config.BLOCK_M * ROW_EXPONENTIALS
    clock = target.clock_ghz * target.num_sms  # 10^9 clocks a second, of all SMs together
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


def _drift(plan: KernelPlan, config: KernelConfig) -> float:
    """The programs that one program overlaps like; transposing keeps its warps together."""
    return TWO_GROUPS if config.num_warps > 4 and plan.input_precision != "tf32" else 1.0


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
