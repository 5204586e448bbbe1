"""The lines of functions in rendered modules, found without `inspect`, which is slow there.

Triton reads the source of each kernel back, and torch looks for where an operator was made.
`inspect` looks through all modules that there are for that of the file, finds none, and divides
each function into tokens to see where it ends: most of what the import of such a module takes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock


def lines_of(function: FunctionType) -> tuple[list[str], int] | None:
    """What `inspect.getsourcelines` gives of a function at the top of a file, decorators included.

    It ends before the next line that is not indented, and without the comments before that. None
    is for functions of any other kind, or whose file is gone.
    """
    code = function.__code__
    if function.__closure__ or code.co_name != code.co_qualname or code.co_name == "<lambda>":
        return None
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    first = last = code.co_firstlineno - 1
    while last < len(lines) and not lines[last].startswith("def "):
        last += 1
    if last >= len(lines):
        return None
    last += 1
    while last < len(lines) and lines[last][0] in " \n)#":
        last += 1
    while not lines[last - 1].strip() or lines[last - 1][0] == "#":
        last -= 1
    return lines[first:last], first + 1


@contextlib.contextmanager
def quick_inspect(path: Path, name: str = "") -> Iterator[None]:
    """While a rendered module is imported from this file: what Triton and torch ask of it.

    Args:
        path: the file.
        name: of the module in `sys.modules`, if it is there.
    """
    of_all, in_all, file = inspect.getsourcelines, inspect.getmodule, str(path)

    def getsourcelines(asked: Any) -> Any:
        here = isinstance(asked, FunctionType) and asked.__code__.co_filename == file
        return (lines_of(asked) if here else None) or of_all(asked)

    def getmodule(asked: Any, filename: str | None = None) -> Any:
        of_frame = inspect.isframe(asked) and asked.f_code.co_filename == file
        here = filename == file or of_frame
        return sys.modules.get(name) if here else in_all(asked, filename)

    dedent = mock.patch.object(textwrap, "dedent", _dedent)
    with mock.patch.multiple(inspect, getsourcelines=getsourcelines, getmodule=getmodule), dedent:
        yield


#: Triton asks for it of each kernel's source: by expressions, line for line.
_dedent = functools.lru_cache(1 << 15)(textwrap.dedent)
