"""Launches in the sweep that were made before: what they left in memory is put there again.

A mutant differs from its kernel in one function, and most of its launches are those of kernels
that do not call that. A launch is the same if all that it depends on is: the code of its functions
and the constants that they name, its arguments with all of their memory, and the course that the
roles of a Gluon kernel take. What an interpreter makes of that is the same each time.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder
from triton.tools.tensor_descriptor import TensorDescriptor

from support.gluon import memory, modules
from support.gluon.values import Layout

#: So much of what launches leave is kept, the latest: in bytes.
ROOM = 256 << 20


class _Unknown(Exception):
    """Something that a launch may depend on in ways that are not known here."""


class Kept:
    """What launches left in the memory of their arguments."""

    def __init__(self) -> None:
        self._left: dict[bytes, list[torch.Tensor | None]] = {}
        self._size = 0

    def run(self, launch: Callable[[], None], function: FunctionType, *parts: Any) -> None:
        """Launches, or does what the same launch did.

        Args:
            launch: does it.
            function: the kernel.
            parts: all else that it depends on.
        """
        storages: dict[int, torch.Tensor] = {}
        try:
            described = repr((code_of(function), _described(parts, storages)))
        except _Unknown:
            launch()
            return
        bytes_of = list(storages.values())
        digests = [hashlib.sha1(x.numpy()).digest() for x in bytes_of]  # quick where built in
        key = hashlib.sha1(described.encode() + b"".join(digests)).digest()
        if (left := self._left.get(key)) is not None:
            for x, now in zip(bytes_of, left, strict=True):
                if now is not None:
                    x.copy_(now)
            return
        before = [x.clone() for x in bytes_of]
        launch()
        left = [
            None if torch.equal(x, old) else x.clone()
            for x, old in zip(bytes_of, before, strict=True)
        ]
        self._left[key] = left
        self._size += _size_of(left)
        while self._size > ROOM:
            self._size -= _size_of(self._left.pop(next(iter(self._left))))


def _size_of(left: list[torch.Tensor | None]) -> int:
    return sum(0 if x is None else x.numel() for x in left)


_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, tl.dtype)


def _described(x: Any, storages: dict[int, torch.Tensor]) -> Any:
    """An argument in text but for what memory holds, which goes to `storages`.

    Raises:
        _Unknown: it is none that is known here.
    """
    if isinstance(x, _PLAIN):
        return type(x).__name__, x
    if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided:
        storage = x.untyped_storage()
        if x.device.type != "cpu" or torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise _Unknown
        at = storage.data_ptr()
        if at not in storages:
            made = torch.empty(0, dtype=torch.uint8)
            storages[at] = made.set_(storage)  # type: ignore[call-overload]
        number = list(storages).index(at)
        place = x.storage_offset(), tuple(x.shape), x.stride(), str(x.dtype)
        return number, at % 16, storage.nbytes(), place
    if isinstance(x, tl.constexpr):
        return _described(x.value, storages)
    if isinstance(x, tuple | list):
        return type(x).__name__, [_described(one, storages) for one in x]
    if type(x) is dict:
        return [(name, _described(one, storages)) for name, one in x.items()]
    if isinstance(x, TensorDescriptor):
        fields = (x.shape, x.strides, x.block_shape, x.padding, x.round_f32_to_tf32)
        return "descriptor", _described(x.base, storages), _described(fields, storages)
    if isinstance(x, memory.Descriptor):
        fields = (x.block, x.padding)
        return "descriptor", _described(x.tensor, storages), _described(fields, storages)
    if isinstance(x, Layout):
        return type(x).__name__, _described(x.arguments, storages)
    raise _Unknown


def code_of(function: FunctionType) -> str:
    """A digest of all that a kernel says, in the functions that it calls too.

    Raises:
        _Unknown: it names something of a kind that is not known here.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for part in _parts(function, function.__globals__, {}):
        hashed.update(b"%d " % len(part) + part)
    return hashed.hexdigest()


def _parts(x: Any, home: dict[str, Any], known: dict[int, int]) -> Iterator[bytes]:
    """Of a function, or of something that it names."""
    if isinstance(x, modules.Kernel):
        x = x.function
    elif isinstance(x, InterpretedFunction):
        yield repr(sorted(map(str, x.kwargs))).encode()
        x = x.fn
    if isinstance(x, ModuleType | SimpleNamespace):
        yield f"at {id(x)}".encode()  # Triton's, Gluon's and Python's, which stay
        return
    if isinstance(x, _PLAIN):
        yield repr((type(x).__name__, x)).encode()
        return
    if isinstance(x, tl.constexpr | Layout):
        yield type(x).__name__.encode()
        yield from _parts(x.value if isinstance(x, tl.constexpr) else x.arguments, home, known)
        return
    if isinstance(x, tuple | list):
        yield f"{len(x)} of".encode()
        for one in x:
            yield from _parts(one, home, known)
        return
    if id(x) in known:
        yield f"number {known[id(x)]}".encode()
        return
    known[id(x)] = len(known)
    if isinstance(x, FunctionType) and (x.__globals__ is home or x.__closure__):
        yield _text_of(x.__code__)
        yield repr(sorted(map(str, x.__annotations__.items()))).encode()
        yield from _parts(x.__defaults__, home, known)
        for cell in x.__closure__ or ():
            yield from _parts(cell.cell_contents, home, known)
        if x.__globals__ is home:
            for name in _names_of(x.__code__):
                if name in home and home[name] is not _OF_INTERPRETER.get(name, home):
                    yield name.encode()
                    yield from _parts(home[name], home, known)
    elif isinstance(x, type) and x.__module__ in (home.get("__name__"), modules.__name__):
        for name, member in vars(x).items():
            if isinstance(member, FunctionType | str | tuple) and name != "__module__":
                yield name.encode()
                yield from _parts(member, home, known)
    elif callable(x):
        yield f"at {_id_of(x)}".encode()
    else:
        raise _Unknown


#: What the interpreter puts beside a kernel's own names: attributes may have the same.
_OF_INTERPRETER = vars(interpreter)

#: Functions of libraries, which their ids stand for as long as they live: so they do.
_alive: dict[int, Any] = {}


@functools.cache
def _text_of(code: CodeType) -> bytes:
    """What a function does, wherever it stands."""
    constants = [
        _text_of(x) if isinstance(x, CodeType) else (type(x).__name__, x) for x in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return repr((code.co_name, code.co_code, constants, names, code.co_flags)).encode()


@functools.cache
def _names_of(code: CodeType) -> tuple[str, ...]:
    """What it may read of its module."""
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _names_of(x)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def keep_launches() -> None:
    """Does so with all launches of this process."""
    kept = Kept()
    execute, run = GridExecutor.__call__, modules.run

    def in_triton(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launch = functools.partial(execute, self, *args, **kwargs)
        # Programs run in an order that tests turn round.
        order = _id_of(InterpreterBuilder.set_grid_idx)
        hooks = tuple(self.pre_run_hooks)
        kept.run(launch, self.fn, "triton", order, hooks, self.grid, args, kwargs)

    def in_gluon(function: Any, grid: Any, seed: int, args: Any, **constants: Any) -> None:
        launch = functools.partial(run, function, grid, seed, args, **constants)
        kept.run(launch, function, "gluon", seed, grid, args, constants)

    GridExecutor.__call__, modules.run = in_triton, in_gluon


def _id_of(x: Any) -> int:
    return id(_alive.setdefault(id(x), x))
