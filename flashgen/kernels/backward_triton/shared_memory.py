"""backward_usage: the shared memory that a block of a backward kernel needs, without compiling it.

A program holds one tile of keys and values, or of queries and gradients of the output, and visits
tiles of the other two tensors. The figure equals the compiler's own over every candidate that
flashgen proposes for the shipped variants (tests/compile), with Triton 3.6 to 3.9 alike. It is
above the compiler's figure

- for one stage of mma.sync: tiles may change from the layout of the load to that of a product in
  pieces;
- for float32 as tf32 on mma.sync where heads are wide, for the same reason, and in several
  segments on wgmma by a few barriers;
- for float32 in full precision by TMA in several segments, and with one stage;
- on CDNA3 for kernels over keys with several stages, up to Triton 3.8: p and ds are both counted,
  each of which 3.9 may give a place of its own;
- on CDNA3 for tiles of 16 rows, and for tiles so small that a thread's share is under 4 bytes: they
  are not copied asynchronously and have no buffers;
- where the loop reads elements of tensors for each score or for each key, and rows of two bytes:
  all of them are counted, and exchanges are counted whole;
- where ids may be out of order, with tf32: the exchanges of that branch take the place of a copy;
- by a few bytes for each number that the kernel reads once a head;
- where the derivative of a score reads elements: sympy takes choices apart, and each case is
  counted;
- where listed tiles without a mask have a loop of their own, on wgmma and tcgen05: what the buffers
  of both loops leave unused depends on the order that they are placed in;
- where scores are of positions alone: tiles of q and k are counted that no product reads.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.budget.buffers import in_two_loops
from flashgen.budget.matrix_units import Unit, matrix_unit
from flashgen.budget.targets import Target
from flashgen.budget.usage import SramUsage, usage_of
from flashgen.config import BackwardKernel, KernelConfig
from flashgen.kernels.backward_triton.buffers import BackwardLayout, backward_phases
from flashgen.kernels.backward_triton.elements import visited_elements
from flashgen.plan import KernelPlan


def backward_usage(
    plan: KernelPlan,
    kernel: BackwardKernel,
    config: KernelConfig,
    target: Target,
    *,
    tma: bool | None = None,
) -> SramUsage:
    """The shared memory of a backward kernel. Arguments as of `sram_usage`.

    Args:
        plan: the forward's.
        kernel: ``"keys"`` or ``"queries"``: whose gradients a program computes.
        config: its tile sizes, warps and stages.
        target: the architecture.
        tma: how tiles are copied; None is the target's own way.
    """
    uses_tma = plan.uses_tma(target.name) if tma is None else tma
    unit = backward_unit(plan, kernel, config, target)
    pipelined = config.num_stages > 1
    layout = BackwardLayout(
        kernel=kernel,
        unit=unit,
        tma=uses_tma,
        pipelined=pipelined,
        tf32=plan.input_precision == "tf32",
        num_qk=len(plan.qk_segments),
        num_v=len(plan.v_segments),
        sigmoid=plan.normaliser == "sigmoid",
        divided=plan.normaliser == "softmax",
        elements=visited_elements(
            plan,
            kernel,
            unit,
            pipelined=pipelined,
            copied=pipelined and target.backend == "cuda",
            few_rows=config.num_warps * target.warp_size > config.BLOCK_M,
            few_columns=config.num_warps * target.warp_size > config.BLOCK_N,
        ),
    )
    phases = backward_phases(layout)
    if plan.classifies and pipelined:
        phases = in_two_loops(phases, unit)
    return usage_of(phases, plan, config, target)


def worst_backward_usage(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> SramUsage:
    """The larger usage of both ways of copying tiles: a kernel has to fit with both."""
    ways = {plan.uses_tma(target.name), False}
    usages = (
        backward_usage(plan, kernel, config, target, tma=tma) for tma in sorted(ways, reverse=True)
    )
    return max(usages, key=lambda usage: usage.total)


def backward_unit(
    plan: KernelPlan, kernel: BackwardKernel, config: KernelConfig, target: Target
) -> Unit:
    """The instruction that Triton multiplies the tiles with: each product has the held rows."""
    return matrix_unit(plan, replace(config, BLOCK_M=held_rows(kernel, config)), target)


def held_rows(kernel: BackwardKernel, config: KernelConfig) -> int:
    """Rows of the tiles that a program holds."""
    return config.BLOCK_N if kernel == "keys" else config.BLOCK_M
