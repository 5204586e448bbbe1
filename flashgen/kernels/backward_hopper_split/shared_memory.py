"""queries_usage: the shared memory of a block of the Gluon kernel for the gradient of q.

It has tiles of queries, through whose buffers their gradient is stored, and tiles of keys and of
values. Where it sums along diagonals, the warps of a consumer add their sums up in further memory;
where it stores gradients of pairs, their rows are put together there.
For the rest see `flashgen.kernels.backward_hopper.shared_memory`.
"""

from __future__ import annotations

import sympy

from flashgen.budget.packing import Buffer, packed
from flashgen.budget.quantities import BLOCK_M, BLOCK_N, ITEMSIZE
from flashgen.budget.usage import SramUsage
from flashgen.config import KernelConfig
from flashgen.kernels.backward_hopper.shared_memory import (
    BARRIER,
    NUMBER,
    captures_buffers,
    columns_of_tiles,
    notes_buffers,
    sizes_of,
)
from flashgen.kernels.backward_hopper.split import CONSUMERS
from flashgen.kernels.backward_hopper_split.captures import queries_captured_bytes
from flashgen.kernels.backward_hopper_split.learned import BLOCK
from flashgen.kernels.backward_hopper_split.plan import HopperBackwardSplit


def queries_usage(names: HopperBackwardSplit, *, ones: bool = False) -> SramUsage:
    """The shared memory of the kernel that computes the gradient of q, where there is one."""
    return _queries_usage(names, queries_captured_bytes(names, ones=ones))


def worst_queries_usage(names: HopperBackwardSplit) -> SramUsage:
    """The most that any Triton allocates for it, for tensors of any strides."""
    return _queries_usage(names, queries_captured_bytes(names, contiguous=False))


def _queries_usage(names: HopperBackwardSplit, captures: int) -> SramUsage:
    qk, v = columns_of_tiles(names)
    shape = names.of_queries.constants
    k_stages, v_stages = (sympy.Integer(shape[f"{x}_STAGES"]) for x in "KV")
    tiles = [
        Buffer("Q tile", BLOCK_M * qk * ITEMSIZE),
        Buffer("dO tile", BLOCK_M * v * ITEMSIZE),
        Buffer("K tiles", k_stages * BLOCK_N * qk * ITEMSIZE),
        Buffer("V tiles", v_stages * BLOCK_N * v * ITEMSIZE),
    ]
    queries = names.of_queries
    if queries.learned.diagonals:
        warps, blocks = 4 * CONSUMERS, queries.learned.blocks_at_once(queries.block_n)
        tiles.append(Buffer("sums of distances", sympy.Integer(warps * blocks * BLOCK * NUMBER)))
    if queries.learned.stored:
        tiles.append(Buffer("gradients of pairs", BLOCK_M * BLOCK_N * NUMBER))
    others = [
        Buffer("barriers", sympy.Integer(BARRIER)),
        *2 * (Buffer("barriers", k_stages * BARRIER),),
        *2 * (Buffer("barriers", v_stages * BARRIER),),
        *notes_buffers(names, k_stages, 1),
        *captures_buffers(captures),
    ]
    config = KernelConfig(shape["BLOCK_M"], shape["BLOCK_N"], 4 * CONSUMERS, shape["K_STAGES"])
    return packed(tiles, others, (), sizes_of(names, config))
