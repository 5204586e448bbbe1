"""Machine code of kernels, for any target and without a GPU, and what is read off it."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashgen.budget.targets import get_target
from support.compiling.compiler import compile_until, gpu_target, number_in

# What ptxas calls mere information about where it put waits and arrivals is not among them.
WARNING = re.compile(r"warning|Performance Loss", re.IGNORECASE)


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel.

    Attributes:
        shared: bytes of shared memory of a block.
        registers: of a thread; of a Gluon kernel, those that it starts with.
        spilled: bytes of a thread's values that had no room in registers.
        warnings: lines of ptxas about lost speed, where they are asked for: C7511, C7512 or C7514
            where it lets matrix products wait for one another.
        code: the cubin; empty for AMD.
    """

    shared: int
    registers: int
    spilled: int
    warnings: tuple[str, ...]
    code: bytes = field(repr=False)


def by_stages(source: Any, target: str, options: Mapping[str, Any]) -> MachineCode:
    """What becomes of a kernel stage by stage, with what ptxas says meanwhile; nothing is cached.

    Args:
        source: the kernel and its arguments, as Triton takes them.
        target: an NVIDIA architecture, which need not be here.
        options: of the compiler.
    """
    from triton import knobs

    printed = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        knobs.nvidia.dump_ptxas_log = True
        compiled = compile_until("cubin", source, target, options)
    log = printed.getvalue()
    return MachineCode(
        shared=int(compiled.metadata["shared"]),
        registers=number_in(log, r"Used (\d+) registers"),
        spilled=number_in(log, r"(\d+) bytes spill stores"),
        warnings=tuple(line for line in log.splitlines() if WARNING.search(line)),
        code=compiled.module,
    )


def by_triton(source: Any, target: str, options: Mapping[str, Any]) -> MachineCode:
    """What Triton makes of a kernel for any target. Arguments as of `by_stages`."""
    import triton

    kernel = triton.compile(source, target=gpu_target(target), options=dict(options))
    if get_target(target).backend == "hip":
        code, (registers, spilled) = b"", _amd_registers(kernel.asm["amdgcn"])
    else:
        code = kernel.asm["cubin"]
        registers, spilled = _nvidia_registers(code)
    return MachineCode(int(kernel.metadata.shared), registers, spilled, (), code)


def _nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread; a Triton kernel has a stack for spills alone."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return number_in(usage, r"REG:(\d+)"), number_in(usage, r"STACK:(\d+)")


def _amd_registers(assembly: str) -> tuple[int, int]:
    """Vector registers of a thread, accumulation registers among them, and bytes spilled."""
    spilled = number_in(assembly, r"\.vgpr_spill_count:\s*(\d+)")
    return number_in(assembly, r"\.vgpr_count:\s*(\d+)"), 4 * spilled
