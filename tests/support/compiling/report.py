"""What machine code shows of a kernel: from the figures that are known, or else compiled for it."""

from __future__ import annotations

import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from support import sass
from support.compiling import compiler, machine_code
from support.compiling.figures import REPORTED, known_or
from support.compiling.kernel import Kernel, code_of
from support.compiling.machine_code import MachineCode


class Report:
    """A kernel's figures, each looked up when it is asked for.

    Args:
        of: what decides what the compiler makes: the kernel, its target and its options.
        compiled: makes machine code of it, once, where a figure is not known.
    """

    def __init__(self, of: str, compiled: Callable[[], MachineCode]) -> None:
        self._digest = sha256(repr((of, _readers(), _settings())).encode()).hexdigest()[:16]
        self._compiled = functools.cache(compiled)

    def _figure(self, name: str, read: Callable[[MachineCode], Any]) -> Any:
        return known_or(REPORTED, f"{self._digest} {name}", lambda: read(self._compiled()))

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        found: int = self._figure("shared", lambda made: made.shared)
        return found

    @property
    def registers(self) -> int:
        """Of a thread; of a Gluon kernel, those that it starts with."""
        found: int = self._figure("registers", lambda made: made.registers)
        return found

    @property
    def spilled(self) -> int:
        """Bytes of a thread's values that had no room in registers."""
        found: int = self._figure("spilled", lambda made: made.spilled)
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines of ptxas about lost speed."""
        return tuple(self._figure("warnings", lambda made: list(made.warnings)))

    @property
    def opcodes(self) -> Counter[str]:
        """How many instructions there are of each kind."""
        found = self._figure("opcodes", lambda made: dict(sorted(sass.opcodes(made.code).items())))
        return Counter(found)

    @property
    def unset(self) -> list[str]:
        """The instructions that may read a uniform register which nothing has set."""
        found: list[str] = self._figure("unset", lambda m: sass.unset_uniform_registers(m.code))
        return found


def report(
    kernel: Kernel,
    target: str,
    options: Mapping[str, Any],
    compiled: Callable[[Any, str, Mapping[str, Any]], MachineCode],
) -> Report:
    """The figures of a kernel in rendered source.

    Args:
        kernel: the kernel, with the call that it is compiled for.
        target: the architecture, which need not be here.
        options: of the compiler.
        compiled: makes machine code of Triton's source for a target with options.
    """
    of = kernel.digest(target, options) + compiled.__name__
    return Report(of, lambda: compiled(kernel.source(), target, options))


def report_of(source: Any, target: str, options: Mapping[str, Any]) -> Report:
    """The figures of a function of a module, by what Triton itself keeps machine code by.

    Args:
        source: the function and its arguments, as Triton takes them.
        target: the architecture, which need not be here.
        options: of the compiler.
    """
    of = (source.name, source.language, source.hash(), target, sorted(options.items()))
    return Report(repr(of), lambda: machine_code.by_triton(source, target, options))


@functools.cache
def _readers() -> str:
    """The code that compiles and reads: when it changes, nothing that it read counts."""
    modules: tuple[ModuleType, ...] = (sass, compiler, machine_code)
    whole = "".join(code_of(Path(inspect.getfile(module)).read_text()) for module in modules)
    return sha256(whole.encode()).hexdigest()


def _settings() -> list[tuple[str, str]]:
    """What the environment tells the compiler, another ptxas for one; mostly nothing."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    told = {name: of for name, of in os.environ.items() if name.startswith("TRITON_")}
    told.pop("TRITON_CACHE_DIR", None)
    return sorted((told | dict(get_cache_invalidating_env_vars())).items())
