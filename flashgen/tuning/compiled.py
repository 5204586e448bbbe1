"""What Triton's compiler says of a kernel, for any target and without a GPU.

The budget predicts; this is what it is held to. Only here does flashgen use Triton's compiler, and
only when one of these functions is called.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashgen.budget.targets import Target, get_target
from flashgen.codegen.render import render_kernel
from flashgen.config import KernelConfig
from flashgen.plan import TRITON_DTYPES, KernelPlan

KERNEL = "_attention_forward"

# Arguments that a call usually aligns to 16: what Triton's launcher would find out about them.
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel's figures.

    Attributes:
        shared: bytes of shared memory of a block.
        registers: of a thread.
        spilled: bytes of a thread's values that had no room in registers.
    """

    shared: int
    registers: int
    spilled: int


def shared_bytes(
    plan: KernelPlan,
    config: KernelConfig,
    target: str,
    *,
    tma: bool | None = None,
    aligned: bool = True,
) -> int:
    """The shared memory of a block, from the compiler; stops before machine code is made.

    Args:
        plan: the kernel.
        config: its configuration.
        target: the architecture, which need not be here.
        tma: how tiles are copied; None is the target's own way.
        aligned: every stride is a multiple of 16, as the compiler likes it.
    """
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    gpu = _gpu_target(get_target(target))
    backend = make_backend(gpu)
    uses_tma = plan.uses_tma(target) if tma is None else tma
    source = _source(plan, config, target, uses_tma, aligned)
    options = backend.parse_options(_options(config))
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata: dict[str, Any] = {"target": gpu, **vars(options)}
    module = source.make_ir(
        gpu,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    for name in ("ttir", "ttgir", "llir"):
        module = stages[name](module, metadata)
    return int(metadata["shared"])


def compile_kernel(
    plan: KernelPlan, config: KernelConfig, target: str, *, tma: bool | None = None
) -> Compiled:
    """Everything the compiler says, down to machine code. Arguments as of `shared_bytes`."""
    import triton

    uses_tma = plan.uses_tma(target) if tma is None else tma
    source = _source(plan, config, target, uses_tma, aligned=True)
    kernel = triton.compile(
        source, target=_gpu_target(get_target(target)), options=_options(config)
    )
    if get_target(target).backend == "hip":
        registers, spilled = _amd_registers(kernel.asm["amdgcn"])
    else:
        registers, spilled = _nvidia_registers(kernel.asm["cubin"])
    return Compiled(int(kernel.metadata.shared), registers, spilled)


def _options(config: KernelConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _gpu_target(target: Target) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(target.backend, target.arch, target.warp_size)


def _source(plan: KernelPlan, config: KernelConfig, target: str, tma: bool, aligned: bool) -> Any:
    """The kernel with the types and the alignment of a call's arguments."""
    from triton.compiler import ASTSource

    kernel = _jit_function(render_kernel(plan))
    constants = {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "USE_TMA": tma}
    if plan.code.uses_tanh:
        constants["APPROX"] = get_target(target).backend == "cuda"
    # A tensor's last dimension is usually contiguous, which the launcher makes a constant.
    constants |= {f"{x.name}_stride_{x.ndim - 1}": 1 for x in plan.kernel_arguments.tensors}
    types = _argument_types(plan, config, tma)
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    # The launcher looks at no number whose value may change without a recompile.
    divisible = {name for name, kind in signature.items() if aligned and kind == "i32"}
    divisible = {name for name in divisible - set(plan.kernel_arguments.ints) if "stride_" in name}
    attributes = {
        (i,): ALIGNED
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in divisible
    }
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def _argument_types(plan: KernelPlan, config: KernelConfig, tma: bool) -> dict[str, str]:
    """Triton's types of the arguments that are no integers."""
    dtype = plan.triton_dtype
    types = {"out_ptr": f"*{dtype}", "lse_ptr": "*fp32", "qk_scale": "fp32", "scale": "fp32"}
    types["tiles_ptr"] = "*i32"
    types |= {x.name: "fp32" for x in plan.arguments if x.kind == "float"}
    types |= {f"{x.name}_ptr": f"*{TRITON_DTYPES[x.dtype]}" for x in plan.kernel_arguments.tensors}
    tensors = (
        ("q", config.BLOCK_M, plan.qk_parts),
        ("k", config.BLOCK_N, plan.qk_parts),
        ("v", config.BLOCK_N, plan.v_parts),
    )
    for tensor, rows, parts in tensors:
        for part in parts:
            descriptor = f"tensordesc<{dtype}[1, 1, {rows}, {part.width}]>"
            types[f"{tensor}_src{part.suffix}"] = descriptor if tma else f"*{dtype}"
    return types


@lru_cache(maxsize=32)
def _jit_function(source: str) -> Any:
    """The kernel in rendered source. Triton reads its file while that is imported, then never."""
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(f"import triton\nimport triton.language as tl\n\n\n{source}")
        spec = importlib.util.spec_from_file_location("flashgen_compiled_kernel", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, KERNEL)


def _nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread; a Triton kernel has a stack for spills alone."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage)


def _amd_registers(assembly: str) -> tuple[int, int]:
    """Vector registers of a thread, accumulation registers among them, and bytes spilled."""
    spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    return _number(r"\.vgpr_count:\s*(\d+)", assembly), 4 * spilled


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in what the compiler printed: {text[:200]!r}")
    return int(match[1])
