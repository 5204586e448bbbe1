"""hopper_usage, partitions, live_registers: the resources of a block of the Hopper kernel.

Shared memory: Triton places buffers that are alive at the same time one behind the other, the
largest first, each where its alignment allows. All buffers of this kernel are always alive:

- tiles of queries, of keys and values, and of the output, as the template allocates them;
- captures of the partitions (`flashgen.budget.captures`), in one piece;
- barriers, 8 bytes each; an array of them starts at a multiple of 16;
- a byte for each warp of a partition that waits for its work;
- the numbers of the present tile of queries and of the next one, from the producer;
- of lists of tiles, for each buffer of keys which tile it holds, and what the mask reads of each of
  these keys alone;
- where a mask hides keys by their position alone, a number for each buffer of values;
- for a softmax, a byte for each row of queries to vote with, and, for each consumer and each of
  those two tiles, a number that says whether weights have overflowed their range.

Temporary memory of a partition, for reductions over warps or for the result of an atomic, takes
the place of the captures, which have been read by then. Partitions run side by side, so each has
128 bytes of that place. With three consumers that reduce, the producer's 128 bytes come at the end.

The figure equals Triton 3.7's allocation (tests/compile/test_hopper.py). Triton 3.6 captures one
number more if tensors are parameters (`ones`), for which every candidate has room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from flashgen.budget.matrix_units import WARP_GROUP, WARP_GROUP_ROWS
from flashgen.budget.packing import Buffer, packed
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE, NUM_STAGES, widths
from flashgen.budget.targets import get_target
from flashgen.budget.usage import SramUsage, values_of
from flashgen.config import HOPPER, KernelConfig
from flashgen.kernels.forward_hopper.captures import captured_bytes
from flashgen.kernels.forward_hopper.plan import OUT_COLUMNS, HopperNames
from flashgen.kernels.forward_hopper.shape import hopper_shape
from flashgen.plan import KernelPlan
from flashgen.symbols import FloorDiv

TARGET = get_target(HOPPER)

#: Query rows that a consumer computes.
CONSUMER_ROWS = WARP_GROUP_ROWS

#: What the template has ``setmaxnreg`` give a consumer's threads, by the number of consumers: with
#: the producer's they are the registers of an SM.
CONSUMER_REGISTERS: Mapping[int, int] = {2: 240, 3: 160}
PRODUCER_REGISTERS: Mapping[int, int] = {2: 24, 3: 32}

#: Columns of the widest heads, whose tiles are the smallest that there are.
WIDEST = 256

#: Threads that share a row of scores: each holds two of every eight columns.
THREADS_OF_ROW = 4

#: The share of them that values can take which are live all the time; see `spills`.
LIVE_SHARE = 0.8

#: Registers of dropout: the four words of a call of Philox, and what it mixes into them.
DROPOUT_REGISTERS = 8

_BARRIER = 8
_NUMBER = 4  # of what the producer hands over
_ALIGNMENT = 16
_SCRATCH = 128  # where a partition's scratch may start
_CONSUMERS = FloorDiv(BLOCK_M, CONSUMER_ROWS)


@dataclass(frozen=True)
class Partition:
    """Warps of a block that do one job.

    Attributes:
        name: ``"consumer 0"``... or ``"producer"``.
        warps: how many.
        registers: of each of their threads.
    """

    name: str
    warps: int
    registers: int


def hopper_usage(plan: KernelPlan, config: KernelConfig, *, ones: bool = False) -> SramUsage:
    """The shared memory of the Gluon kernel, for parameters that are contiguous as usual.

    Args:
        plan: the kernel.
        config: its tile sizes and stages; BLOCK_M counts the consumers.
        ones: the compiler captures strides of 1, as Triton 3.6 does.
    """
    captures = captured_bytes(plan, ones=ones)
    return _usage(plan, config, captures, _scratch_at_the_end(plan, config, captures))


def worst_hopper_usage(plan: KernelPlan, config: KernelConfig) -> SramUsage:
    """The most that any Triton allocates, for any strides: a kernel has to fit with it.

    Larger captures may make room for scratch, so scratch counts if the smallest leave no room.
    """
    fewest, most = captured_bytes(plan), captured_bytes(plan, contiguous=False)
    return _usage(plan, config, most, _scratch_at_the_end(plan, config, fewest))


def _usage(
    plan: KernelPlan, config: KernelConfig, captures: int, scratch_at_the_end: bool
) -> SramUsage:
    others = _others(plan, captures)
    end = [Buffer("scratch", sympy.Integer(_NUMBER), alignment=_SCRATCH)]
    return packed(_tiles(plan), others, end if scratch_at_the_end else [], values_of(plan, config))


def partitions(config: KernelConfig) -> tuple[Partition, ...]:
    """The partitions of a block.

    Raises:
        KeyError: the kernel has no such BLOCK_M.
    """
    consumers = config.BLOCK_M // CONSUMER_ROWS
    registers = CONSUMER_REGISTERS[consumers]
    names = (f"consumer {i}" for i in range(consumers))
    several = tuple(Partition(name, WARP_GROUP, registers) for name in names)
    return (*several, Partition("producer", 1, PRODUCER_REGISTERS[consumers]))


def visiting_rows(plan: KernelPlan, config: KernelConfig) -> KernelConfig:
    """The configuration with the queries whose visits are their own: a consumer's, or all."""
    return replace(config, BLOCK_M=CONSUMER_ROWS) if HopperNames(plan).skips else config


def live_registers(plan: KernelPlan, config: KernelConfig) -> int:
    """Registers that a consumer's thread cannot do without, of those that `partitions` gives it.

    The accumulator, the scores of a step, the weights of the step before it in pairs of 16 bits,
    what each pair loads, the queries where they stay in registers, what dropout computes with, and
    the addresses of elements that a mask loads by key. The widest heads have no smaller tiles:
    there such addresses spill, 116 to 148 bytes, in tiles with a mask.
    """
    threads = WARP_GROUP * TARGET.warp_size
    pairs = 4 // plan.itemsize
    accumulator = CONSUMER_ROWS * sum(plan.v_segments) // threads
    scores = CONSUMER_ROWS * config.BLOCK_N // threads
    queries = CONSUMER_ROWS * sum(plan.qk_segments) // threads // pairs
    kept = queries if hopper_shape(plan).q_in_registers else 0
    dropped = DROPOUT_REGISTERS if plan.dropout else 0
    loaded = scores if plan.code.score_loads_pairs else 0
    names = HopperNames(plan)
    # Of lists of blocks of queries a step of 64 keys reads one entry.
    by_tile = names.rests and config.BLOCK_N <= CONSUMER_ROWS
    by_bits = names.gathers_bits or bool(names.mask_code.bitmasks)
    by_element = names.loads_keys and not by_bits and not by_tile
    if by_element and sum(plan.v_segments) < WIDEST:
        loaded += 2 * config.BLOCK_N // THREADS_OF_ROW  # of 64 bits, in each column of a thread
    return accumulator + scores + scores // pairs + loaded + kept + dropped


def spills(plan: KernelPlan, config: KernelConfig) -> bool:
    """Whether a consumer's values would exceed its registers, as in 54 kernels that ptxas compiled.

    With up to 0.8 of the registers live, kernels spilled at most a few values between two tiles of
    queries; from 0.85 on all spilled inside the loop, and ptxas made products wait (C7512).

    Raises:
        KeyError: the kernel has no such BLOCK_M.
    """
    return live_registers(plan, config) > LIVE_SHARE * partitions(config)[0].registers


def _tiles(plan: KernelPlan) -> list[Buffer]:
    """The tiles of each segment of the head dimensions; sizes are multiples of any alignment."""
    qk, v = widths("qk", len(plan.qk_segments)), widths("v", len(plan.v_segments))
    shape = hopper_shape(plan)
    q_rows, out_rows = shape.q_stages * _CONSUMERS * CONSUMER_ROWS, _CONSUMERS * CONSUMER_ROWS
    k_rows, v_rows = (NUM_STAGES + shape.k_extra) * BLOCK_N, NUM_STAGES * BLOCK_N
    columns = [] if shape.out_in_queries else [sympy.Min(width, OUT_COLUMNS) for width in v]
    return [
        *(Buffer("Q", q_rows * width * ITEMSIZE) for width in qk),
        *(Buffer("K", k_rows * width * ITEMSIZE) for width in qk),
        *(Buffer("V", v_rows * width * ITEMSIZE) for width in v),
        *(Buffer("output", out_rows * width * ITEMSIZE) for width in columns),
    ]


def _others(plan: KernelPlan, captures: int) -> list[Buffer]:
    """The small buffers, in the kernel's order: of two of equal size the first comes first."""
    shape, names = hopper_shape(plan), HopperNames(plan)
    of_queries = Buffer("barriers", _BARRIER * shape.q_stages * _CONSUMERS)
    k_stages = NUM_STAGES + shape.k_extra
    of_keys = Buffer("barriers", _BARRIER * k_stages)
    of_values = Buffer("barriers", _BARRIER * NUM_STAGES)
    of_visits = (
        2 * (of_keys,) if shape.fused_kv_stages else (of_keys, of_keys, of_values, of_values)
    )
    handed_over = 2 * _NUMBER * (len(names.slots) + len(names.own_visits) * _CONSUMERS)
    return [
        *(of_queries, of_queries, *of_visits),
        Buffer("tiles handed over", sympy.sympify(handed_over)),
        *2 * (Buffer("barriers", sympy.Integer(2 * _BARRIER)),),
        *([Buffer("tiles handed over", _NUMBER * k_stages)] if names.hands_visits else ()),
        *(
            Buffer("elements of keys", column.itemsize * BLOCK_N * k_stages)
            for column in names.handed.columns
        ),
        *([Buffer("hidden values", _NUMBER * NUM_STAGES)] if plan.hidden.keys else ()),
        *(_growth(shape.overlapped_tiles) if plan.normaliser == "softmax" else ()),
        Buffer("captures", sympy.Integer(captures), alignment=8),
        Buffer("captures", WARP_GROUP * _CONSUMERS, alignment=4),
    ]


def _growth(has_barrier: bool) -> list[Buffer]:
    return [
        Buffer("growth", CONSUMER_ROWS * _CONSUMERS),
        Buffer("growth", 2 * _NUMBER * _CONSUMERS),
        *([Buffer("growth", sympy.Integer(_BARRIER))] if has_barrier else []),
    ]


def _scratch_at_the_end(plan: KernelPlan, config: KernelConfig, captures: int) -> bool:
    """Whether the result of the producer's atomic has no room in the captures' place."""
    if not (HopperNames(plan).counts and plan.tiles.reduce_rows):
        return False
    of_consumers = _SCRATCH * (config.BLOCK_M // CONSUMER_ROWS)
    return captures < of_consumers + _NUMBER
