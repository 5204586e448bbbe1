"""Rendered modules as Python's code, of which each function is compiled once for each text.

Modules of one process have most of their functions in common: a mutant differs from its variant in
one, and variants share most of what stands around their kernels. Compiling is half of an import.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from support.source_lines import quick_inspect

#: What stands between statements at the top of a module, as ruff formats it.
_BETWEEN = "\n\n\n"


def compiled(source: str, path: str) -> list[CodeType]:
    """The code of a module, to be executed in its order.

    Lines and file are those of the source, in functions too: Triton reads kernels back by them.

    Raises:
        SyntaxError: as `compile` does.
    """
    try:
        pieces = [_piece(text) for text in source.split(_BETWEEN)]
    except SyntaxError:  # a text of several lines has empty ones
        return [compile(source, path, "exec", dont_inherit=True)]
    return list(_placed(pieces, source, path))


def _placed(pieces: list[CodeType], source: str, path: str) -> Iterator[CodeType]:
    line = 0
    for code, text in zip(pieces, source.split(_BETWEEN), strict=True):
        yield _moved(code, path, line)
        line += text.count("\n") + len(_BETWEEN)


@functools.lru_cache(1 << 15)
def _piece(text: str) -> CodeType:
    return compile(text, "<rendered>", "exec", dont_inherit=True)


def _moved(code: CodeType, path: str, lines: int) -> CodeType:
    """The same, so many lines further down in a file."""
    constants = tuple(
        _moved(x, path, lines) if isinstance(x, CodeType) else x for x in code.co_consts
    )
    first = code.co_firstlineno + lines
    return code.replace(co_filename=path, co_firstlineno=first, co_consts=constants)


def quicken_imports() -> None:
    """Does so with modules that flashgen builds for calls and imports itself, in this process."""
    execute = SourceFileLoader.exec_module

    def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
        path = Path(self.path)
        if path.parts[-3:-1] != ("flashgen", "modules"):
            execute(self, module)
            return
        with quick_inspect(path, module.__name__):
            for code in compiled(path.read_text(), self.path):
                exec(code, vars(module))

    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign]
