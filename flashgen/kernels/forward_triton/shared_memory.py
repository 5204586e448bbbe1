"""sram_usage: the shared memory that a block of a kernel needs, without compiling it.

The figure equals the compiler's own over every candidate that flashgen proposes for the shipped
variants (tests/compile), with Triton 3.6 to 3.9 alike, and is not below it for anything that a
spec can pin (10,000 kernels were compiled to see; tests/data/shared_bytes.json is a sample). It is
above the compiler's figure

- for tiles under 64 rows on targets with TMA: mma.sync may do with less than is counted;
- for 8 or 16 warps on 64 rows of tcgen05, and one stage of it: bytes skipped or scratch, up to
  4 KiB, that turn out to have a use;
- for float32 products in full precision: 4 * BLOCK_M bytes that some tiles exchange inside a warp,
  16 * BLOCK_M where tensors are read inside the loop;
- for one or two warps, which need no exchange at all;
- for one stage of mma.sync, and of CDNA3 with several segments: K may go straight to registers;
- for tiles so small that a thread's share is under 4 bytes: they are not copied asynchronously and
  have no buffers;
- where the output alone is larger than the loop (v wider than q and k): it may be stored in turns;
- where listed tiles without a mask have a loop of their own, on wgmma and tcgen05: what the buffers
  of both loops leave unused depends on the order that they are placed in;
- where scores are of positions alone: tiles of q and k are counted that no product reads.

And where the loop reads elements of tensors (`flashgen.budget.elements`)

- on mma.sync with fewer rows than the values have columns: a tile may be exchanged in halves;
- by indices that are loaded themselves, or that grow with the query and the key: the layout of such
  a load, and how early it starts, depends on more than is looked at;
- in tiles of the shape of another that the kernel loads or stores, a segment of q or of the output:
  they take its layout, and are exchanged in pieces; counted in full but for 16-bit outputs of one
  segment;
- of 16 bits that are not what is added first: some are exchanged as 16 bits, 32 are counted;
- beside a branch for ids out of order, which leaves some of the other exchanges in pieces; and as
  tf32, where what that branch exchanges takes the place of a copy of V.
"""

from __future__ import annotations

from functools import cache

import sympy

from flashgen.budget.buffers import Phase, in_two_loops
from flashgen.budget.matrix_units import matrix_unit
from flashgen.budget.targets import Target
from flashgen.budget.usage import SramUsage, usage_of
from flashgen.config import KernelConfig
from flashgen.kernels.forward_triton.buffers import Layout, Tiles
from flashgen.kernels.forward_triton.elements import elements_of
from flashgen.kernels.forward_triton.registers import by_pointers, by_tma, mfma
from flashgen.kernels.forward_triton.warp_groups import warp_groups
from flashgen.plan import KernelPlan
from flashgen.plan.step_cost import tile_loads, unordered_comparisons


def sram_usage(
    plan: KernelPlan, config: KernelConfig, target: Target, *, tma: bool | None = None
) -> SramUsage:
    """The shared memory of a kernel.

    Args:
        plan: the kernel.
        config: its tile sizes, warps and stages.
        target: the architecture.
        tma: tiles come through descriptors (True) or by pointers (False, which a target with TMA
            falls back to for strides that a descriptor cannot hold). None is the target's own way.
    """
    uses_tma = plan.uses_tma(target.name) if tma is None else tma
    layout = _layout(plan, config, target, uses_tma)
    phases = _phases(layout)
    if plan.classifies and layout.pipelined:
        phases = in_two_loops(phases, layout.unit)
    return usage_of(phases, plan, config, target)


def worst_usage(plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
    """The larger usage of both ways of copying tiles: a kernel has to fit with both."""
    ways = {plan.uses_tma(target.name), False}
    usages = (sram_usage(plan, config, target, tma=tma) for tma in sorted(ways, reverse=True))
    return max(usages, key=lambda usage: usage.total)


@cache
def _phases(layout: Layout) -> tuple[Phase, ...]:
    """The phases of a kernel of this layout; a block needs the largest of their totals."""
    tiles = Tiles(layout)
    if layout.unit == "mfma":
        return mfma(layout, tiles)
    output = Phase("output", (("output", sympy.Max(*tiles.out)),))
    if layout.unit in ("wgmma", "tcgen05"):
        return (*warp_groups(layout, tiles), output)
    return ((by_tma if layout.tma else by_pointers)(layout, tiles), output)


def _layout(plan: KernelPlan, config: KernelConfig, target: Target, tma: bool) -> Layout:
    unit = matrix_unit(plan, config, target)
    pipelined = config.num_stages > 1
    threads = config.num_warps * target.warp_size
    return Layout(
        unit=unit,
        tma=tma,
        pipelined=pipelined,
        tf32=plan.input_precision == "tf32",
        num_qk=len(plan.qk_segments),
        num_v=len(plan.v_segments),
        narrow=min(*plan.qk_segments, *plan.v_segments) < 32,
        elements=elements_of(
            tile_loads(plan),
            unordered_comparisons(plan),
            unit,
            copied=pipelined and target.backend == "cuda",
            one_product=len(plan.qk_segments) == 1,
            few_rows=threads > config.BLOCK_M,
            few_columns=threads > config.BLOCK_N,
            table_rows=not all(table.rows for table in plan.code.tables),
            dropout=plan.dropout,
        ),
        as_output=plan.v_segments == (config.BLOCK_N,)
        and config.BLOCK_N >= 64
        and plan.itemsize == 2,
        sigmoid=plan.normaliser != "softmax",
        scored=bool(plan.code.score or tile_loads(plan)),
    )
