"""The backward kernels' configurations."""

from __future__ import annotations

from flashgen.config import KernelConfig
from flashgen.plan.kernel import KernelPlan

#: The kernels: over tiles of keys, and over tiles of queries.
KERNELS = ("keys", "queries")


def backward_configs(plan: KernelPlan, target: str) -> dict[str, KernelConfig]:
    """A configuration for each kernel."""
    widest = max(sum(plan.qk_segments), sum(plan.v_segments)) * plan.itemsize // 2
    if widest <= 128:
        keys = KernelConfig(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2)
        queries = KernelConfig(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    else:
        keys = KernelConfig(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1)
        queries = KernelConfig(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=1)
    return {"keys": keys, "queries": queries}
