"""Weights beside products: how much products slow down the instructions of a softmax.

One program of each SM has three groups of four warps. The first multiplies as a step of attention
does at head_dim 128: 64 queries with 64 keys, both in shared memory, then weights in registers with
values. The two others repeat a sequence of instructions on 64 x 64 elements. None waits for the
others.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILES = 400  # tiles of each measured group
LONGER = 4 * TILES  # tiles of the other groups, which have to run longer
GROUPS = 2
REPEATS = 3

#: A product and a sum become one operation: Triton's default until 3.9, which needs the option.
FUSED = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Beside:
    """Cycles of an SM for a tile of 64 x 64.

    Attributes:
        alone: for the sequence, with idle matrix units.
        beside: for the sequence, while the matrix units multiply.
        products: for a tile's products at the same time.
    """

    alone: float
    beside: float
    products: float


def beside(sequence: str, device: torch.device) -> Beside:
    """The cycles of a sequence of instructions of `benchmarks.units`, with and without products."""
    _, alone = _cycles(sequence, 0, TILES, device)
    _, together = _cycles(sequence, LONGER, TILES, device)
    products, _ = _cycles(sequence, TILES, LONGER, device)
    of_each = GROUPS * TILES
    return Beside(alone / of_each, together / of_each, products / TILES)


def _cycles(sequence: str, products: int, tiles: int, device: torch.device) -> tuple[float, float]:
    """Cycles until the products are done, and until the tiles are, of the median SM."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    cycles = torch.zeros(programs, 1 + GROUPS, dtype=torch.int32, device=device)
    for _ in range(REPEATS):  # only the last run counts: the first ones load the code
        _both[programs,](cycles, products, tiles, sequence, num_warps=4, **FUSED)
    taken = cycles.tolist()
    return median(row[0] for row in taken), median(max(row[1:]) for row in taken)


@gluon.jit
def _clock(x):
    """The clock of the SM once x has been computed."""
    clock, _ = gl.inline_asm_elementwise(
        "mov.b32 $1, $2; mov.u32 $0, %clock;", "=r,=r,r", [x],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return clock


@gluon.jit
def _note(cycles, role, begun, ended):
    gl.store(cycles + gl.program_id(0) * 3 + role + gl.zeros_like(begun), ended - begun)


@gluon.jit
def _multiply(q, k, v, cycles, rounds):
    """Products of so many tiles, each started while the products before are in flight."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    none = gl.zeros([128], gl.int32, LANES)
    weights = gl.zeros([64, 64], gl.bfloat16, gl.DotOperandLayout(0, OUT, 2))
    scores = gl.zeros([64, 64], gl.float32, SCORES)
    acc = gl.zeros([64, 128], gl.float32, OUT)
    begun = _clock(none)
    for _ in range(rounds):
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, is_async=True)
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        scores, acc = warpgroup_mma_wait(2, deps=(scores, acc))
    scores, acc = warpgroup_mma_wait(0, deps=(scores, acc))
    made = gl.max(gl.max(scores, 0), 0) + gl.max(gl.max(acc, 0), 0)
    _note(cycles, 0, begun, _clock(none + made.to(gl.int32)))


@gluon.jit
def _weigh(cycles, tiles, ROLE: gl.constexpr, SEQUENCE: gl.constexpr):
    """The sequence on so many tiles, in the layout of scores."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    none = gl.zeros([128], gl.int32, LANES)
    x = gl.zeros([64, 64], gl.float32, SCORES) + gl.program_id(0).to(gl.float32)
    begun = _clock(none)
    for _ in range(tiles):
        x = gl.inline_asm_elementwise(
            SEQUENCE, "=f,=f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2
        )
    _note(cycles, ROLE, begun, _clock(none + gl.max(gl.max(x, 0), 0).to(gl.int32)))


@gluon.jit
def _both(cycles, products, tiles, SEQUENCE: gl.constexpr):
    """Stores the cycles of each role, (programs, 3): the products, and both groups that weigh."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    q = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    k = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    v = gl.allocate_shared_memory(gl.bfloat16, [64, 128], SHARED)
    zeros = gl.zeros([64, 128], gl.bfloat16, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
    q.store(zeros)
    k.store(zeros)
    v.store(zeros)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (q, k, v, cycles, products)),
            (_weigh, (cycles, tiles, 1, SEQUENCE)),
            (_weigh, (cycles, tiles, 2, SEQUENCE)),
        ],
        [4, 4],
        [112, 112],
    )
