"""Triton's compiler as the tests ask it, for any target and without a GPU.

Budgets predict; this is what they are held to. `portable`, `hopper` and the others beside this
module say what each kernel is compiled with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.budget.targets import Target, get_target

#: What modules have all their kernels compiled with.
FUSED = {"enable_fp_fusion": True}


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


def compile_until(last: str, source: Any, target: str, options: Mapping[str, Any]) -> Lowered:
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


def _up_to(last: str, stages: Iterable[str]) -> list[str]:
    names = list(stages)
    return names[: names.index(last) + 1]


def number_in(text: str, pattern: str) -> int:
    """The number in what the compiler printed.

    Raises:
        RuntimeError: it printed no such thing.
    """
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in what the compiler printed: {text[:200]!r}")
    return int(match[1])
