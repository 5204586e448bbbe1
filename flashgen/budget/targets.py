"""What each GPU architecture has: the one table that limits and rates are read from.

Limits belong to an architecture. Rates belong to one product of it, the first in `Target.gpus`,
and are used only to rank candidates. Dense rates throughout: no structured sparsity.

Sources:
    NVIDIA limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
        (shared memory per block and per SM, registers, threads and blocks per SM); each block also
        costs 1 KiB that the system reserves (Tuning Guides for Ampere, Ada, Hopper and Blackwell,
        "Unified Shared Memory/L1/Texture Cache").
    Instructions per clock: CUDA C++ Programming Guide, "Throughput of Native Arithmetic
        Instructions", the rows of 32-bit floating-point add and of ``exp2f``; CDNA3 white paper
        (64 lanes a CU) and AMD Instinct MI300 ISA guide (transcendentals at a quarter of that).
    A100 80 GB SXM: NVIDIA A100 datasheet and white paper. A10: NVIDIA A10 datasheet, GA102 white
        paper. L40S: NVIDIA L40S datasheet, Ada white paper. H200 SXM: NVIDIA H200 datasheet, H100
        white paper. B200: NVIDIA HGX B200 datasheet, Blackwell Tuning Guide.
    MI300X: AMD Instinct MI300X data sheet, CDNA3 white paper; LDS and register sizes from the AMD
        Instinct MI300 ISA guide. Its L2 figure is the 256 MB Infinity Cache, the level that every
        XCD shares and that takes the part of NVIDIA's L2.
    L2 bandwidth: A100 white paper (5120 bytes a clock); the same for Hopper; estimates elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["ampere", "hopper", "blackwell", "cdna3"]

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Target:
    """One GPU architecture, as the budget and the compiler see it.

    Attributes:
        name: flashgen's name, ``"sm_90"``.
        gpus: products of this architecture; the first is the one whose rates stand here.
        family: which way Triton feeds its matrix units, and so which SRAM model applies.
        backend: Triton's backend, ``"cuda"`` or ``"hip"``.
        arch: Triton's name of the architecture, ``90`` or ``"gfx942"``.
        warp_size: threads of a warp.
        max_shared: dynamic shared memory (LDS) that one block may ask for, bytes.
        shared_per_sm: shared memory of one SM (LDS of one CU), bytes.
        reserved_shared: bytes of it that the system takes for each resident block.
        registers_per_sm: 32-bit registers of one SM.
        max_registers: 32-bit registers that one thread can address.
        max_threads_per_sm: resident threads of one SM.
        max_blocks_per_sm: resident blocks of one SM.
        num_sms: SMs (CUs).
        clock_ghz: the clock that the peak rates are quoted at.
        dram_gbps: peak DRAM bandwidth, 10^9 bytes/s.
        l2_gbps: bandwidth from the last-level cache to the SMs, 10^9 bytes/s.
        l2_bytes: capacity of the last-level cache.
        tflops: peak dense 10^12 FLOP/s of a matrix product with fp32 accumulation, by operand:
            ``bf16``, ``fp16``, ``tf32`` and ``ieee`` (float32 operands read whole).
        lanes_per_clock: 32-bit floating-point instructions a clock and SM, one for each lane.
        exp_per_clock: base-2 exponentials a clock and SM.
        has_tma: whether tiles can be copied through tensor descriptors.
    """

    name: str
    gpus: tuple[str, ...]
    family: Family
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp_size: int
    max_shared: int
    shared_per_sm: int
    reserved_shared: int
    registers_per_sm: int
    max_registers: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    num_sms: int
    clock_ghz: float
    dram_gbps: float
    l2_gbps: float
    l2_bytes: int
    tflops: tuple[tuple[str, float], ...]
    lanes_per_clock: int
    exp_per_clock: int
    has_tma: bool

    def peak_tflops(self, operand: str) -> float:
        """The peak matrix rate for ``"bf16"``, ``"fp16"``, ``"tf32"`` or ``"ieee"`` operands."""
        return dict(self.tflops)[operand]


_ALL = (
    Target(
        name="sm_80",
        gpus=("A100",),
        family="ampere",
        backend="cuda",
        arch=80,
        warp_size=32,
        max_shared=163 * KIB,
        shared_per_sm=164 * KIB,
        reserved_shared=1 * KIB,
        registers_per_sm=65536,
        max_registers=255,
        max_threads_per_sm=2048,
        max_blocks_per_sm=32,
        num_sms=108,
        clock_ghz=1.41,
        dram_gbps=2039,
        l2_gbps=7219,
        l2_bytes=40 * MIB,
        tflops=(("bf16", 312), ("fp16", 312), ("tf32", 156), ("ieee", 19.5)),
        lanes_per_clock=64,
        exp_per_clock=16,
        has_tma=False,
    ),
    Target(
        name="sm_86",
        gpus=("A10", "RTX 3090", "A40", "RTX A6000"),
        family="ampere",
        backend="cuda",
        arch=86,
        warp_size=32,
        max_shared=99 * KIB,
        shared_per_sm=100 * KIB,
        reserved_shared=1 * KIB,
        registers_per_sm=65536,
        max_registers=255,
        max_threads_per_sm=1536,
        max_blocks_per_sm=16,
        num_sms=72,
        clock_ghz=1.695,
        dram_gbps=600,
        l2_gbps=2600,
        l2_bytes=6 * MIB,
        tflops=(("bf16", 125), ("fp16", 125), ("tf32", 62.5), ("ieee", 31.2)),
        lanes_per_clock=128,
        exp_per_clock=16,
        has_tma=False,
    ),
    Target(
        name="sm_89",
        gpus=("L40S", "RTX 4090", "L4"),
        family="ampere",
        backend="cuda",
        arch=89,
        warp_size=32,
        max_shared=99 * KIB,
        shared_per_sm=100 * KIB,
        reserved_shared=1 * KIB,
        registers_per_sm=65536,
        max_registers=255,
        max_threads_per_sm=1536,
        max_blocks_per_sm=24,
        num_sms=142,
        clock_ghz=2.52,
        dram_gbps=864,
        l2_gbps=5000,
        l2_bytes=96 * MIB,
        tflops=(("bf16", 362), ("fp16", 362), ("tf32", 183), ("ieee", 91.6)),
        lanes_per_clock=128,
        exp_per_clock=16,
        has_tma=False,
    ),
    Target(
        name="sm_90",
        gpus=("H200", "H100", "GH200"),
        family="hopper",
        backend="cuda",
        arch=90,
        warp_size=32,
        max_shared=227 * KIB,
        shared_per_sm=228 * KIB,
        reserved_shared=1 * KIB,
        registers_per_sm=65536,
        max_registers=255,
        max_threads_per_sm=2048,
        max_blocks_per_sm=32,
        num_sms=132,
        clock_ghz=1.83,
        dram_gbps=4800,
        l2_gbps=9370,
        l2_bytes=50 * MIB,
        tflops=(("bf16", 989.4), ("fp16", 989.4), ("tf32", 494.7), ("ieee", 66.9)),
        lanes_per_clock=128,
        exp_per_clock=16,
        has_tma=True,
    ),
    Target(
        name="sm_100",
        gpus=("B200", "GB200"),
        family="blackwell",
        backend="cuda",
        arch=100,
        warp_size=32,
        max_shared=227 * KIB,
        shared_per_sm=228 * KIB,
        reserved_shared=1 * KIB,
        registers_per_sm=65536,
        max_registers=255,
        max_threads_per_sm=2048,
        max_blocks_per_sm=32,
        num_sms=148,
        clock_ghz=1.856,
        dram_gbps=8000,
        l2_gbps=12000,
        l2_bytes=126 * MIB,
        tflops=(("bf16", 2250), ("fp16", 2250), ("tf32", 1125), ("ieee", 75)),
        lanes_per_clock=128,
        exp_per_clock=16,
        has_tma=True,
    ),
    Target(
        name="gfx942",
        gpus=("MI300X", "MI300A", "MI325X"),
        family="cdna3",
        backend="hip",
        arch="gfx942",
        warp_size=64,
        max_shared=64 * KIB,
        shared_per_sm=64 * KIB,
        reserved_shared=0,
        registers_per_sm=131072,
        max_registers=512,
        max_threads_per_sm=2048,
        max_blocks_per_sm=32,
        num_sms=304,
        clock_ghz=2.1,
        dram_gbps=5300,
        l2_gbps=17200,
        l2_bytes=256 * MIB,
        tflops=(("bf16", 1307.4), ("fp16", 1307.4), ("tf32", 653.7), ("ieee", 163.4)),
        lanes_per_clock=64,
        exp_per_clock=16,
        has_tma=False,
    ),
)

TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
DEFAULT_TARGETS: tuple[str, ...] = tuple(TARGETS)


def get_target(name: str) -> Target:
    """The target of this name; `ValueError` listing the known ones for any other."""
    try:
        return TARGETS[name]
    except KeyError:
        raise ValueError(f"unknown target {name!r}; known: {', '.join(TARGETS)}") from None
