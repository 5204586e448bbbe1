"""KernelConfig: the numbers a kernel is compiled with; KernelChoice: which of them, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

#: The backward kernels of a module: a program computes the gradients of keys, or of queries.
BackwardKernel = Literal["keys", "queries"]

#: Both, in the order that they run in.
BACKWARD_KERNELS: tuple[BackwardKernel, ...] = ("keys", "queries")

#: The forms of a call, in the order of a module; every module has the first.
FORMS = ("dense", "varlen", "cache", "mesh")

#: Queries and keys of a call that is explained: each query is evaluated, which takes some seconds.
LONGEST = 2**20

#: The target that the Gluon kernels are for.
HOPPER = "sm_90"


@dataclass(frozen=True, order=True)
class KernelConfig:
    """One candidate of the tuning space.

    Attributes:
        BLOCK_M: query rows a program computes.
        BLOCK_N: key/value rows a loop step reads.
        num_warps: warps a program computes on (32 threads each on NVIDIA, 64 on AMD).
        num_stages: depth of Triton's software pipeline over the KV loop; of Gluon kernels, the
            buffers for tiles of keys, and of values.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return (
            f"BLOCK_M={self.BLOCK_M} BLOCK_N={self.BLOCK_N} "
            f"num_warps={self.num_warps} num_stages={self.num_stages}"
        )

    def as_dict(self) -> dict[str, int]:
        """The four numbers by name, for JSON and for a kernel launch."""
        return asdict(self)


@dataclass(frozen=True)
class ChosenConfig:
    """The configuration that a module ships for one target, and how it was chosen.

    Attributes:
        config: the numbers themselves.
        source: ``"measured"`` on a GPU, or ranked by the cost ``"model"``.
        shared: bytes of shared memory a block of this configuration uses.
        gpu: the GPU it was measured on, as its driver names it; None when by model.
        triton: the Triton version it was measured with; None when by model.
        tflops: the measured rate in TFLOP/s; None when by model.
    """

    config: KernelConfig
    source: Literal["measured", "model"]
    shared: int
    gpu: str | None = None
    triton: str | None = None
    tflops: float | None = None


@dataclass(frozen=True)
class KernelChoice:
    """The configurations of a kernel in a module, or why the module lacks the kernel.

    Attributes:
        configs: its configuration for each target that it runs on, in the spec's order; empty if
            the module lacks the kernel.
        why_not: why the module lacks it, in a few words; empty if the module holds the kernel, or
            is for none of its targets.
        replaces: the keys of the kernels that it replaces.
    """

    configs: Mapping[str, ChosenConfig] = field(default_factory=dict)
    why_not: str = ""
    replaces: tuple[str, ...] = ()

    @property
    def config(self) -> ChosenConfig | None:
        """The configuration for its only target; None if the module lacks the kernel."""
        return next(iter(self.configs.values()), None)


#: The choice of a kernel that has none of the module's targets.
NO_CHOICE = KernelChoice()
