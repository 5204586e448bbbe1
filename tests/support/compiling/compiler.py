"""Triton's compiler as the tests ask it, for any target and without a GPU.

Budgets predict; this is what they are held to. `portable`, `hopper` and the others beside this
module say what each kernel is compiled with.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flashgen.budget.targets import Target, get_target
from flashgen.plan import TRITON_DTYPES, KernelPlan
from flashgen.plan.arguments import KernelArguments

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


@dataclass(frozen=True)
class Call:
    """What the launcher makes known of a call: arguments by name, their types and alignment.

    Attributes:
        signature: Triton's types, ``"constexpr"`` for constants.
        constants: their values.
        attributes: of arguments by position, what is known of their values.
    """

    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], Any]


def call_of(
    plan: KernelPlan,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: bool = True,
    arguments: KernelArguments | None = None,
) -> Call:
    """A call of a kernel with the plan's parameters.

    Args:
        plan: whose parameters the kernel takes.
        kernel: the function.
        types: of its other arguments that are no integers.
        constants: its constants.
        aligned: every stride is a multiple of 16, as the compiler likes it.
        arguments: what it takes of the parameters; None is what the forward kernel does.
    """
    arguments = plan.kernel_arguments if arguments is None else arguments
    # A tensor's last dimension is usually contiguous, which the launcher makes a constant.
    constants = {**constants} | {f"{x.name}_stride_{x.ndim - 1}": 1 for x in arguments.tensors}
    types = {**types} | {x.name: "fp32" for x in plan.arguments if x.kind == "float"}
    types |= {f"{x.name}_ptr": f"*{TRITON_DTYPES[x.dtype]}" for x in arguments.tensors}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    # The launcher looks at no number whose value may change without a recompile.
    divisible = {name for name, kind in signature.items() if aligned and kind == "i32"}
    divisible = {name for name in divisible - set(arguments.ints) if "stride_" in name}
    attributes = {
        (i,): ALIGNED
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in divisible
    }
    return Call(signature, constants, attributes)


@dataclass(frozen=True)
class Lowered:
    """A kernel on its way to machine code.

    Attributes:
        module: the code, as the stage leaves it.
        metadata: what the stages noted.
        stages: all of them, by name.
        backend: whose they are.
        context: what the module lives in.
    """

    module: Any
    metadata: dict[str, Any]
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]]
    backend: Any
    context: Any


def gpu_target(target: str) -> Any:
    """Triton's name of a target."""
    from triton.backends.compiler import GPUTarget

    known: Target = get_target(target)
    return GPUTarget(known.backend, known.arch, known.warp_size)


def compile_until(last: str, source: Any, target: str, options: Mapping[str, int]) -> Lowered:
    """What the compiler's stages come to, up to one of them; nothing is cached.

    Args:
        last: the stage's name, such as ``"ttgir"`` or ``"cubin"``.
        source: the kernel and its arguments, as Triton takes them.
        target: the architecture, which need not be here.
        options: of the compiler.
    """
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    gpu = gpu_target(target)
    backend = make_backend(gpu)
    parsed = backend.parse_options(dict(options))
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, parsed, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata: dict[str, Any] = {"target": gpu, **vars(parsed)}
    module = source.make_ir(
        gpu,
        parsed,
        backend.get_codegen_implementation(parsed),
        backend.get_module_map(),
        context,
    )
    for name in _up_to(last, stages):
        module = stages[name](module, metadata)
    return Lowered(module, metadata, stages, backend, context)


def allotted_bytes(source: Any, target: str, options: Mapping[str, int]) -> int:
    """The shared memory of a block, once the compiler has allotted it.

    That is where LLVM's code begins, most of the compiler's work, which does not change it and is
    left out. Nothing else in the process may compile meanwhile. Arguments as of `compile_until`.

    Raises:
        RuntimeError: this compiler allots it elsewhere.
    """
    lowered = compile_until("ttgir", source, target, options)

    class Allotted(Exception):
        """Shared memory is allotted: the rest of the compilation is not needed."""

    class Hook:
        """What the compiler calls after it, for profilers to add passes of their own."""

        def patch(self, place: str, passes: Any, context: Any) -> None:
            passes.run(lowered.module, "allocate_shared_memory")
            raise Allotted

    backend = type(lowered.backend)
    others, backend.instrumentation = backend.instrumentation, Hook()
    try:
        lowered.stages["llir"](lowered.module, lowered.metadata)
    except Allotted:
        return int(lowered.module.get_int_attr("ttg.shared"))
    finally:
        backend.instrumentation = others
    raise RuntimeError(f"Triton's compiler for {target} was not heard of shared memory")


def _up_to(last: str, stages: Iterable[str]) -> list[str]:
    names = list(stages)
    return names[: names.index(last) + 1]


@lru_cache(maxsize=32)
def function_in(source: str, name: str) -> Any:
    """A kernel in rendered source. Triton reads its file while that is imported, then never."""
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("flashgen_compiled_kernel", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, name)


def number_in(text: str, pattern: str) -> int:
    """The number in what the compiler printed.

    Raises:
        RuntimeError: it printed no such thing.
    """
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in what the compiler printed: {text[:200]!r}")
    return int(match[1])
