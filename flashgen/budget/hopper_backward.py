"""hopper_backward_usage: what a block of the Gluon kernel of the backward pass needs.

All of its buffers are alive throughout (`flashgen.budget.packing`):

- tiles of queries and of the output's gradient, with two numbers for each query, for each stage;
- two tiles of keys, the present and the next, and one of values;
- two tiles of the scores' gradients, one for each of two tiles of queries in turn;
- what each consumer adds to the queries' gradient, 64 x 64 numbers of float32, in whose place the
  gradients of its keys and values leave;
- which tiles of keys those are;
- captures, barriers, and a byte for each warp, as in the forward kernel (`flashgen.budget.hopper`).

The figure equals what Triton allots (tests/compile/test_hopper_backward.py); Triton 3.6 captures
what `ones` says.
"""

from __future__ import annotations

import sympy

from flashgen.budget.captures import backward_captured_bytes
from flashgen.budget.packing import Buffer, packed, values_of
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE, NUM_STAGES, widths
from flashgen.budget.sram import WARP_GROUP, SramUsage
from flashgen.config import KernelConfig
from flashgen.plan.hopper_backward import CONSUMERS, HopperBackward

_BARRIER = 8
_NUMBER = 4  # float32


def hopper_backward_usage(
    names: HopperBackward, config: KernelConfig, *, ones: bool = False
) -> SramUsage:
    """The shared memory of the kernel, for parameters that are contiguous as usual.

    Args:
        names: the kernel.
        config: its tile sizes and stages.
        ones: the compiler captures strides of 1, as Triton 3.6 does.
    """
    return _usage(names, config, backward_captured_bytes(names, ones=ones))


def worst_hopper_backward_usage(names: HopperBackward, config: KernelConfig) -> SramUsage:
    """The most that any Triton allots for tensors of any strides: a kernel has to fit with it."""
    return _usage(names, config, backward_captured_bytes(names, contiguous=False))


def _usage(names: HopperBackward, config: KernelConfig, captures: int) -> SramUsage:
    (width,) = widths("qk", 1)  # columns of a tile
    of_queries, of_keys = BLOCK_M * width * ITEMSIZE, BLOCK_N * width * ITEMSIZE
    tiles = [
        Buffer("Q tiles", NUM_STAGES * of_queries),
        Buffer("dO tiles", NUM_STAGES * of_queries),
        Buffer("K tiles", 2 * of_keys),
        Buffer("V tile", of_keys),
        Buffer("dS tiles", 2 * BLOCK_N * BLOCK_M * ITEMSIZE),
        Buffer("dQ tiles", sympy.Integer(CONSUMERS * 64 * 64 * _NUMBER)),
    ]
    others = [
        Buffer("LSE, delta", 2 * NUM_STAGES * BLOCK_M * _NUMBER, alignment=128),
        *2 * (Buffer("barriers", sympy.Integer(2 * _BARRIER)),),
        Buffer("tiles handed over", sympy.Integer(2 * _NUMBER)),
        *2 * (Buffer("barriers", NUM_STAGES * _BARRIER),),
        Buffer("captures", sympy.Integer(captures), alignment=8),
        Buffer("captures", sympy.Integer(WARP_GROUP * CONSUMERS), alignment=4),
    ]
    values = values_of(names.backward.plan, config)
    return packed(tiles, others, (), {**values, width.name: names.width})
