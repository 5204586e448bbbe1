"""Modules whose Gluon kernels run on the CPU."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from support.gluon.machine import Program
from support.gluon.memory import Pointer
from support.gluon.values import Block

#: Streaming multiprocessors of a GPU with few: programs take several tiles each.
NUM_SMS = 3


# A seed for each launch, which takes another course.
_courses = [itertools.count()]


def start_over(course: int = 0) -> None:
    """The launches to come take the courses from one on: the same as other launches from there."""
    _courses[0] = itertools.count(course)


class gluon:
    """The decorators of kernels, and of functions that compute constants for them."""

    @staticmethod
    def constexpr_function(function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of constants."""
        return function

    @staticmethod
    def aggregate(cls: type) -> type:
        """State with named fields, of which none changes: as Triton 3.8 has it."""
        fields = tuple(cls.__annotations__)

        def initialise(self: Any, *values: Any) -> None:
            made = SimpleNamespace()
            cls.__init__(made, *values)
            assert tuple(vars(made)) == fields, f"{cls.__name__} leaves a field out"
            for name, value in vars(made).items():
                object.__setattr__(self, name, value)

        def refuse(self: Any, name: str, value: Any) -> None:
            raise AttributeError(f"{cls.__name__}.{name} is assigned to: make a new one")

        made = {"__slots__": fields, "__init__": initialise, "__setattr__": refuse}
        return type(cls.__name__, (), made)

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        """A function of Python, that can be launched too."""
        return Kernel(function) if function is not None else Kernel


class Kernel:
    """A Gluon function: called by others, or launched as a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int, enable_fp_fusion: bool = True, **constants: Any
        ) -> None:
            run(self.function, grid, next(_courses[0]), args, num_warps=num_warps, **constants)

        return launch


def run(
    function: Callable[..., Any],
    grid: tuple[int],
    seed: int,
    args: tuple[Any, ...],
    *,
    num_warps: int,
    **constants: Any,
) -> None:
    """Runs a kernel's programs one after the other, which take the turns that a seed says."""
    constant = set(constants) | _constants(function)
    names = function.__code__.co_varnames
    given = [x if n in constant else _argument(x) for n, x in zip(names, args, strict=False)]
    for number in range(grid[0]):
        kernel = functools.partial(function, *given, **constants)
        Program(number, grid[0], seed).run(kernel, num_warps)


def _constants(function: Callable[..., Any]) -> set[str]:
    return {name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)}


def _argument(x: Any) -> Any:
    """What a kernel gets of an argument of its launch."""
    if isinstance(x, torch.Tensor):
        return Pointer.to(x)
    if isinstance(x, bool | int):
        return Block(torch.tensor(x, dtype=torch.int32 if abs(x) < 2**31 else torch.int64))
    return Block(torch.tensor(x, dtype=torch.float32)) if isinstance(x, float) else x


def interpreted(source: str) -> str:
    """A module's source with these in the place of Gluon, and with the CPU for a Hopper GPU."""
    text = _IMPORT.sub(_from_here, source)
    assert _NOT_HERE in text, "no Gluon kernel in it"
    text = text.replace(_NOT_HERE, "if False:")
    beside = _BESIDE if "def _launch_of_queries(" in text else ""
    return text + _MACHINE.format(num_sms=NUM_SMS) + beside


def _from_here(statement: re.Match[str]) -> str:
    """An import of Gluon as imports of what stands for it."""
    (node,) = ast.parse(statement[0]).body
    assert isinstance(node, ast.ImportFrom)
    names = [alias.asname or alias.name for alias in node.names]
    return "".join(f"from {_HOME.get(name, _LANGUAGE)} import {name}\n" for name in names)


# A whole module takes a tenth of a second to parse, which has a thousand lines and more.
_IMPORT = re.compile(r"^from triton\.experimental[\w.]* import (?:\([^)]*\)|[^(\n]*)\n", re.M)
_LANGUAGE = "support.gluon.language"
_HOME = {"gluon": "support.gluon.modules"}

# Where the module asks what it runs on, and what it hears.
_NOT_HERE = "if not _is_hopper(q.device) or triton.knobs.runtime.interpret:"
_MACHINE = """

_COUNTER = torch.zeros(1, dtype=torch.int32)


def _num_sms(device):
    return {num_sms}


def _counter(device):
    assert _COUNTER.item() == 0, "the call before has not left it at 0"
    return _COUNTER
"""

# A portable kernel that runs beside one in Gluon runs in Triton's interpreter, which has no
# bfloat16 arithmetic.
_BESIDE = """

def _launched_in_float32(launch):
    def as_float32(x):
        halves = isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16
        return x.float() if halves else x

    def launched(q, *given):
        made = launch(as_float32(q), *map(as_float32, given))
        if not isinstance(made, tuple):
            return made.to(q.dtype)
        return (made[0].to(q.dtype), *made[1:])

    return launched


_launch_of_queries = _launched_in_float32(_launch_of_queries)
"""
