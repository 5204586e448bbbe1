"""Triton's interpreter, without what it does again and again to the same effect.

Half of the sweep's time went there. What a kernel computes, and what is checked of it, is the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from sweep.quick import OF_TENSORS, quicken_operators
from sweep.quick_rewriting import keep_rewritten
from sweep.quick_scans import quicken_scans
from sweep.quick_types import intern_types

#: Whether operators of this Triton are those that `sweep.quick` has: 3.9 keeps the sign of zeros.
KNOWN = triton.__version__.startswith("3.7.")


def quicken() -> None:
    """Replaces functions of it, in this process."""
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _numpy_dtype(interpreter._get_np_dtype)
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    if KNOWN:
        interpreter._patch_builtin = _patch_quickly
        keep_rewritten()
        intern_types()
        quicken_operators()
        quicken_scans()


def _patch_once(patch: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's functions are replaced once in a launch for a module, not at each call in it."""
    patched: set[int] = set()

    def patch_lang(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in patched:
            return None  # a call in a kernel: only the launch itself restores
        first = not patched
        patched.add(module)
        scope = patch(fn)
        if first:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    return patch_lang


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(package):
        interpreter._patch_attr(package, name, member, builder, scope)


def _patch_quickly(package: Any, builder: Any, scope: Any) -> None:
    of_tensors = isinstance(package, type) and issubclass(package, tl.tensor)
    for name, member in _builtins(package):
        quick = OF_TENSORS.get(name) if of_tensors else None
        scope.set_attr(package, name, quick or _with_semantic(member))


@functools.cache
def _with_semantic(member: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Triton's that is told how to compute, whatever it is told."""
    if member.__code__ is _OF_TRITON:
        member = member.__wrapped__  # type: ignore[attr-defined]

    def patched(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    return patched


_OF_TRITON = tl.core.builtin(lambda: None).__code__


@functools.cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    """What is replaced in a module or class of Triton's; first asked for before it is."""
    members = inspect.getmembers(package)
    return [(name, member) for name, member in members if tl.core.is_builtin(member)]


def _numpy_dtype(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A table that is made once, not for each value."""
    found: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.is_ptr():
            return look_up(scalar)
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    return numpy_dtype


def _check_overflow(
    self: TritonSemantic, a: tl.tensor, b: tl.tensor, operator: Callable[..., Any]
) -> None:
    """That a result fits its type, by numpy: Triton's takes ten operations of its own to say so."""
    kind = a.type.scalar
    if kind.int_bitwidth >= 64:
        return
    exact = _EXACT[operator.__name__](a.handle.data.astype(np.int64), b.handle.data)
    fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
    assert fits, f"int{kind.int_bitwidth} overflow in {operator.__name__}"


_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
