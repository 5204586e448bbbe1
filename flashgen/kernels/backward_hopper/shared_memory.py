"""hopper_backward_usage: the shared memory of a block of the Gluon backward kernel over keys.

All of its buffers are alive throughout (`flashgen.budget.packing`):

- tiles of queries and of the output's gradient, with two numbers for each query, for each stage;
- the keys and the values; unless the pass is split the next keys too, and the next values where
  they have room;
- two tiles of the scores' gradients, one for each of two tiles of queries in turn, and 64 x 64
  float32 numbers for each consumer's part of the queries' gradient, a buffer through which the
  gradients of its keys and values are stored too. A split pass has none of these: gradients are
  stored through the buffers of the keys and the values;
- where consumers have roles, the factors that one passes to the other, 64 x 64 float32 numbers;
- the tiles of keys of a program, if it takes several;
- if a mask hides keys, or queries, by their position alone, a number for each of their buffers;
- captures, barriers, and a byte for each warp, as in the Gluon forward kernel.

The figure equals Triton's allocation (tests/compile/test_hopper_backward.py); Triton 3.6 also
captures the strides that `ones` describes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy

from flashgen.budget.matrix_units import WARP_GROUP
from flashgen.budget.packing import Buffer, packed
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE, NUM_STAGES, widths
from flashgen.budget.usage import SramUsage, values_of
from flashgen.config import KernelConfig
from flashgen.kernels.backward_hopper.captures import backward_captured_bytes
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.backward_hopper.split import CONSUMERS

#: Bytes of one.
BARRIER = 8
NUMBER = 4  # also of float32


def hopper_backward_usage(
    names: HopperBackward, config: KernelConfig, *, ones: bool = False
) -> SramUsage:
    """The shared memory of the kernel, for parameters that are contiguous as usual.

    Args:
        names: the kernel.
        config: its tile sizes and stages.
        ones: the compiler captures strides of 1, as Triton 3.6 does.
    """
    captures = backward_captured_bytes(names, ones=ones)
    return _usage(names, config, captures, in_ds=names.arrives_in_ds)


def worst_hopper_backward_usage(names: HopperBackward, config: KernelConfig) -> SramUsage:
    """The most that any Triton allocates, for any strides: a kernel has to fit with it."""
    captures = backward_captured_bytes(names, contiguous=False)
    return _usage(names, config, captures, in_ds=names.tiled_in_ds)


def _usage(names: HopperBackward, config: KernelConfig, captures: int, *, in_ds: bool) -> SramUsage:
    qk, v = columns_of_tiles(names)
    of_k = ("K tile", 1) if names.split else ("K tiles", 2)
    of_v = ("V tiles", 2) if names.values_ahead else ("V tile", 1)
    tiles = [
        Buffer("Q tiles", NUM_STAGES * BLOCK_M * qk * ITEMSIZE),
        Buffer("dO tiles", NUM_STAGES * BLOCK_M * v * ITEMSIZE),
        *(
            Buffer(name, copies * BLOCK_N * columns * ITEMSIZE)
            for (name, copies), columns in ((of_k, qk), (of_v, v))
        ),
    ]
    if names.has_roles:
        tiles.append(Buffer("factors", BLOCK_N * BLOCK_M * NUMBER))
    if names.split:
        of_keys = [Buffer("barriers", sympy.Integer(BARRIER))]
    else:
        tiles.append(Buffer("dS tiles", 2 * BLOCK_N * BLOCK_M * ITEMSIZE))
        tiles.append(Buffer("dQ tiles", sympy.Integer(CONSUMERS * 64 * 64 * NUMBER)))
        of_keys = 2 * [Buffer("barriers", sympy.Integer(2 * BARRIER))]
        of_keys.append(Buffer("tiles handed over", sympy.Integer(2 * NUMBER)))
    if names.tiled and not names.tiled_in_ds:
        # Numbers of 16 bits take half of it, where a call may pass these.
        size = NUM_STAGES * BLOCK_N * BLOCK_M * names.tiled_itemsize
        tiles.append(Buffer("tiles of pairs", size))
    # Buffers that fill have barriers of their own for each of two consumers that take turns.
    arrivals = (2 if names.in_turns else 1) * NUM_STAGES
    others = [
        Buffer("LSE, delta", 2 * NUM_STAGES * BLOCK_M * NUMBER, alignment=128),
        *of_keys,
        *notes_buffers(names, 1 if names.split else 2, NUM_STAGES),
        Buffer("barriers", NUM_STAGES * BARRIER),
        *(1 + names.grad_out_apart) * (Buffer("barriers", arrivals * BARRIER),),
        *2 * in_ds * (Buffer("barriers", NUM_STAGES * BARRIER),),
        *captures_buffers(captures),
    ]
    return packed(tiles, others, (), sizes_of(names, config))


def columns_of_tiles(names: HopperBackward) -> tuple[Any, Any]:
    """Columns of tiles of q and k, and of v and grad_out: those of all segments."""
    qk, v = widths("qk", len(names.qk_parts)), widths("v", len(names.v_parts))
    return sympy.Add(*qk), sympy.Add(*v)


def notes_buffers(names: HopperBackward, of_keys: Any, of_queries: Any) -> Iterator[Buffer]:
    """The notes of hidden rows, for so many buffers of keys, and of queries."""
    hidden = names.backward.plan.hidden
    if hidden.keys:
        yield Buffer("hidden keys", sympy.Integer(NUMBER) * of_keys)
    if hidden.queries:
        yield Buffer("hidden queries", sympy.Integer(NUMBER) * of_queries)


def captures_buffers(captures: int) -> tuple[Buffer, ...]:
    """The places of captures of this size, and of a byte for each warp."""
    return (
        Buffer("captures", sympy.Integer(captures), alignment=8),
        Buffer("captures", sympy.Integer(WARP_GROUP * CONSUMERS), alignment=4),
    )


def sizes_of(names: HopperBackward, config: KernelConfig) -> dict[str, int]:
    """The number behind every symbol of a size."""
    of = (("qk", names.qk_parts), ("v", names.v_parts))
    widths_of = {f"{x}_{i}": part.width for x, parts in of for i, part in enumerate(parts)}
    return {**values_of(names.backward.plan, config), **widths_of}
