"""Shared memory, asked of Triton's compiler where it has allotted it: from Triton 3.6 on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from support.compiling.compiler import compile_until

# Where the compiler listens to profilers, which add passes of their own there: Triton 3.9 has
# callbacks by backend and place; before, a backend had an object with a method for all places.
_POINT = "ttgpuir-to-llvmir"
_NAMES = {"cuda": "nvidia", "hip": "amd"}


class _Allotted(Exception):
    """Shared memory is allotted: the rest of the compilation is not needed."""


def compiled_bytes(source: Any, target: str, options: Mapping[str, Any]) -> int:
    """The shared memory of a block, once the compiler has allotted it.

    That is where LLVM's code begins, most of the compiler's work, which does not change it and is
    left out. Nothing else in the process may compile meanwhile. Arguments as of `compile_until`.

    Raises:
        RuntimeError: this compiler allots it elsewhere.
    """
    lowered = compile_until("ttgir", source, target, options)

    def stop(passes: Any) -> None:
        passes.run(lowered.module, "allocate_shared_memory")
        raise _Allotted

    with _listening(lowered.backend, lowered.metadata["target"].backend, stop):
        try:
            lowered.stages["llir"](lowered.module, lowered.metadata)
        except _Allotted:
            return int(lowered.module.get_int_attr("ttg.shared"))
    raise RuntimeError(f"Triton's compiler for {target} was not heard of shared memory")


@contextlib.contextmanager
def _listening(backend: Any, kind: str, stop: Callable[[Any], None]) -> Iterator[None]:
    """Has the compiler call this once shared memory is allotted, with its passes so far."""
    if hasattr(type(backend), "instrumentation"):
        others, type(backend).instrumentation = type(backend).instrumentation, _Before39(stop)
        try:
            yield
        finally:
            type(backend).instrumentation = others
        return
    from triton._instrumentation import register_instrumentation, unregister_instrumentation

    register_instrumentation(point=_POINT, backend=_NAMES[kind], callback=stop)
    try:
        yield
    finally:
        unregister_instrumentation(point=_POINT, backend=_NAMES[kind])


class _Before39:
    """What compilers before 3.9 call at each place; the first is after shared memory."""

    def __init__(self, stop: Callable[[Any], None]) -> None:
        self.stop = stop

    def load_dialects(self, context: Any) -> None:
        """There are none of ours."""

    def patch(self, place: str, passes: Any, context: Any) -> None:
        """Stops at the first place."""
        self.stop(passes)
