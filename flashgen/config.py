"""KernelConfig: the numbers that a kernel is compiled with and that tuning chooses."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, order=True)
class KernelConfig:
    """One candidate of the tuning space.

    Attributes:
        BLOCK_M: query rows a program computes.
        BLOCK_N: key/value rows a loop step reads.
        num_warps: warps a program runs on (32 threads each on NVIDIA, 64 on AMD).
        num_stages: depth of Triton's software pipeline over the KV loop.
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
