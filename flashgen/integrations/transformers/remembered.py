"""What a mask function computes, read once for all that compute the same.

transformers makes its mask functions anew in every step. Two of them compute the same if their code
is the same and so is all that it reads besides its arguments: what they capture, defaults and
globals. As far as these are numbers, texts and functions of the same kind, they are compared; a
function that reads anything else, such as a tensor, whose elements may change, is read every time.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

#: What code may do besides computing with its arguments: it makes no functions, whose code would
#: have to be looked at too, and neither imports nor writes.
_REFUSED = frozenset(
    (
        "DELETE_ATTR", "DELETE_DEREF", "DELETE_GLOBAL", "DELETE_SUBSCR", "IMPORT_FROM",
        "IMPORT_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS",
        "LOAD_LOCALS", "LOAD_NAME", "LOAD_SUPER_ATTR", "MAKE_FUNCTION", "STORE_ATTR",
        "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME", "STORE_SUBSCR", "YIELD_VALUE",
    )
)  # fmt: skip
#: What it may call that is none of its globals.
_BUILTINS = frozenset(("abs", "bool", "enumerate", "int", "isinstance", "len", "max", "min"))
_BUILTINS |= frozenset(("range", "zip"))
#: Types of which equal values are the same, if their types are.
_PLAIN = (int, bool, float, str, bytes, types.NoneType, torch.dtype)


class _Unknown(Exception):
    """A function reads what may change without a trace."""


def signature(function: Callable[..., Any]) -> Any:
    """What is equal for functions that compute the same; None if that cannot be told."""
    if torch.compiler.is_compiling():
        return None
    try:
        return _of(function, 8)
    except _Unknown:
        return None


def _of(value: Any, depth: int) -> Any:
    """A value with its type, or what a function consists of."""
    if isinstance(value, types.FunctionType):
        names = _globals_of(value.__code__)
        if depth == 0 or names is None or value.__kwdefaults__ or value.__dict__:
            raise _Unknown
        scope = value.__globals__
        read: list[Any] = []
        for name, only_types in names.items():
            if name not in scope:
                if name not in _BUILTINS:
                    raise _Unknown
                read.append(name)
            elif scope[name] is torch and only_types:
                read.append("torch")
            else:
                read.append(_of(scope[name], depth - 1))
        try:
            cells = [_of(x.cell_contents, depth - 1) for x in value.__closure__ or ()]
        except ValueError as error:  # a cell that is empty as yet
            raise _Unknown from error
        return value.__code__, _of(value.__defaults__, depth), *cells, *read
    if type(value) is tuple:
        return tuple([_of(x, depth) for x in value])
    if type(value) in _PLAIN:
        # Equal zeros may differ in sign, and a NaN is not equal to itself.
        return type(value), repr(value) if type(value) is float else value
    raise _Unknown


@functools.lru_cache(maxsize=1024)
def _globals_of(code: types.CodeType) -> dict[str, bool] | None:
    """The globals that code reads, and whether of each only torch's types; None if it does more."""
    names: dict[str, bool] = {}
    steps = list(dis.get_instructions(code))
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if step.opname in _REFUSED:
            return None
        if step.opname == "LOAD_GLOBAL":
            of_type = (
                following is not None
                and following.opname == "LOAD_ATTR"
                and isinstance(getattr(torch, following.argval, None), torch.dtype)
            )
            names[step.argval] = of_type and names.get(step.argval, True)
    return names
