"""The least time of a GPU's units for some work, and the unit that takes longest."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.budget.targets import Target
from flashgen.plan import KernelPlan

#: The units and their work.
UNITS: Mapping[str, str] = {
    "compute": "products on the matrix units",
    "exponentials": "exponentials of the softmax",
    "memory": "bytes of DRAM",
    "L2": "bytes between L2 and the SMs",
}


def operand(plan: KernelPlan) -> str:
    """The name of the plan's operands among a target's matrix units."""
    return plan.input_precision or plan.triton_dtype


def crossover(target: Target, operand: str) -> float:
    """FLOPs for a byte of DRAM from which products, not memory, take longest."""
    return target.peak_tflops(operand) * 1e3 / target.dram_gbps


def seconds_of(
    target: Target, operand: str, *, flops: float, exponentials: float, dram: float, l2: float
) -> dict[str, float]:
    """The time that each of `UNITS` takes by itself at its peak rate; the roofline is the longest.

    Args:
        target: the target, with its rates.
        operand: the operand type of the products, ``"bf16"``, ``"fp16"``, ``"tf32"`` or ``"ieee"``.
        flops: floating-point operations of the products.
        exponentials: the number of exponentials.
        dram: bytes that DRAM reads and writes.
        l2: bytes between L2 and the SMs.
    """
    rate = target.exp_per_clock * target.num_sms * target.clock_ghz * 1e9
    return {
        "compute": flops / (target.peak_tflops(operand) * 1e12),
        "exponentials": exponentials / rate,
        "memory": dram / (target.dram_gbps * 1e9),
        "L2": l2 / (target.l2_gbps * 1e9),
    }


def bound_of(seconds: Mapping[str, float]) -> str:
    """The unit that takes longest."""
    return max(seconds, key=lambda unit: seconds[unit])
