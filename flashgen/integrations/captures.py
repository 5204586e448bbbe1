"""The values that a function captures: in closures, globals, defaults, partials and attributes.

`Captures` looks through a function at each call, and tells whether anything differs that a trace
of it may depend on.
"""

from __future__ import annotations

import abc
import argparse
import collections
import dis
import enum
import functools
import sys
import sysconfig
import types
import typing
import weakref
from collections.abc import Iterator
from typing import Any

import torch

#: A place of a value: what holds it, and where in there.
Place = tuple[Any, ...]

#: Values that are what they are: they say all of themselves.
PLAIN = frozenset(
    (
        bool, str, bytes, complex, range, types.NoneType, types.EllipsisType,
        torch.dtype, torch.device,
    )
)  # fmt: skip
#: Values that are what they are known as.
NAMED = (types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType, type)

#: Libraries whose functions and classes do the same at any time, beside Python's own.
_LIBRARIES = frozenset(("torch", "numpy", "flashgen", "sympy"))
_STDLIB = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))

#: Names by which code reads values whose own names it may compose.
_REFLECTION = frozenset(
    (
        "getattr", "globals", "locals", "vars", "eval", "exec", "attrgetter", "methodcaller",
        "import_module", "__import__", "__dict__", "__getattribute__",
    )
)  # fmt: skip
#: Classes of libraries whose instances hold nothing but attributes, and items that are visited.
_OPEN = frozenset(
    (
        object, abc.ABC, typing.Generic, typing.Protocol, types.SimpleNamespace,
        argparse.Namespace, tuple, list, dict, collections.OrderedDict, collections.defaultdict,
    )
)  # fmt: skip
#: Methods that Python calls without their names, but not for what a function computes.
_NOT_COMPUTING = frozenset(
    (
        "__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__format__",
        "__hash__", "__setattr__", "__delattr__", "__init_subclass__", "__class_getitem__",
        "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
        "__replace__", "__annotate__", "__dir__", "__sizeof__",
    )
)  # fmt: skip

#: More elements than this in a list or a dict are not looked through.
MOST_ELEMENTS = 4096

#: The names of attributes that all code met so far reads. They only grow in number.
_names: set[str] = set()
#: The globals that each code reads, the modules that it imports, and whether it may compose names,
#: by its id, beside the code, without which the id would be used again.
_codes: dict[int, tuple[types.CodeType, tuple[str, ...], tuple[str, ...], bool]] = {}
#: The slots of each class.
_slots_of: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
_missing = object()


def globals_read(code: types.CodeType) -> tuple[str, ...]:
    """The names of the globals that code reads; () if it was not met."""
    known = _codes.get(id(code))
    return () if known is None else known[1]


def is_read(name: str) -> bool:
    """Whether known code reads an attribute of this name."""
    return name in _names


class Captures:
    """What a function captures now.

    Attributes:
        tensors: the tensors, each once.
        names: what each tensor is called, by its id.
        numbers: ints and floats, each beside its place; whoever holds one may hold another later.
        opaque: whether something was met that cannot be looked through; it may change unseen.
        first: the tensors of the first function, what else tells it from others, and objects to
            hold as long as that is.
    """

    __slots__ = (
        "_constant",
        "_kept",
        "_key",
        "_seen",
        "_unread",
        "first",
        "names",
        "numbers",
        "opaque",
        "tensors",
    )

    def __init__(self, *functions: Any) -> None:
        while True:
            self.tensors: list[torch.Tensor] = []
            self.names: dict[int, Any] = {}
            self.numbers: list[tuple[int | float, Place]] = []
            self.opaque = False
            self._key: list[Any] = []
            self._kept: list[Any] = []  # whose ids are in the key
            self._seen: dict[Any, int] = {}
            self._constant = False  # whether numbers met now are constants: see _fixed
            self._unread = False  # whether new code was met, which may read other attributes
            self.first: tuple[list[torch.Tensor], tuple[Any, ...], tuple[Any, ...]] = [], (), ()
            for at, function in enumerate(functions):
                self._visit(function, None)
                if at == 0:
                    values = [value for value, _ in self.numbers]
                    unseen = [object()] if self.opaque else []  # equal to no other
                    key = (*self._key, *values, *unseen)
                    self.first = self.tensors.copy(), key, self.kept
            if not self._unread:
                break

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for functions that differ at most in `numbers` and elements of `tensors`."""
        return tuple(self._key)

    @property
    def kept(self) -> tuple[Any, ...]:
        """Objects to hold as long as the key is, which has ids of them."""
        return tuple(self._kept)

    def _visit(self, value: Any, place: Place | None) -> None:
        kind = type(value)
        if kind is types.FunctionType:
            self._function(value)
        elif kind in PLAIN:
            self._key.append(value)
        elif kind is int or kind is float:
            self._number(value, place)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, place)
        elif isinstance(value, NAMED):
            self._same(value)
            if isinstance(value, type):
                self._class(value)
            elif isinstance(value, types.ModuleType):
                if not is_library(value):
                    self._members(value)
            elif not isinstance(value.__self__, types.ModuleType | type | None):
                self._fixed(value.__self__)
        elif kind is types.MethodType:
            self._visit(value.__func__, None)
            self._visit(value.__self__, ("self", id(value)))
        elif kind is functools.partial:
            self._visit(value.func, ("func", id(value)))
            self._items(value, value.args)
            self._items(value, value.keywords)
        elif isinstance(value, tuple | list | dict):
            self._items(value, value)
            if kind not in _OPEN and not is_library(kind):
                self._fixed_attributes(value)
        elif isinstance(value, enum.Enum) or kind.__module__ == "torch._ops":
            self._same(value)
        elif isinstance(value, int | float | str | bytes):  # of a subclass
            self._key.append((kind, value))
        elif kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            self._key.append((kind, value.item()))
        elif has_attributes(value):
            self._object(value)
        else:
            self._same(value)
            self.opaque = True

    def _fixed(self, value: Any) -> None:
        """A value that `Replaced` leaves as it is: the numbers that it holds are constants."""
        before, self._constant = self._constant, True
        self._visit(value, None)
        self._constant = before

    def _same(self, value: Any) -> None:
        """This very object."""
        self._key.append(id(value))
        self._kept.append(value)

    def _met(self, value: Any) -> bool:
        """Whether an object was met before, which the key then says; it may hold itself."""
        at = id(value), self._constant and not isinstance(value, torch.Tensor)
        known = self._seen.get(at)
        if known is None:
            self._seen[at] = len(self._seen)
            return False
        self._key.append(("again", known))
        return True

    def _number(self, value: int | float, place: Place | None) -> None:
        if place is None or self._constant or not -(2**30) <= value <= 2**30:
            self._key.append((type(value), value))
            return
        at = place_key(place)
        if at in self._seen:
            return
        self._seen[at] = -1
        self._key.append((type(value), value > 0, value >= 0))
        self.numbers.append((value, at))

    def _tensor(self, value: torch.Tensor, place: Place | None) -> None:
        self.opaque |= self._constant  # a trace takes a number out of one that is not replaced
        if not self._met(value):
            self._key.append((value.dtype, value.dim()))
            self.tensors.append(value)
            self.names[id(value)] = "tensor" if place is None else place[-1]

    def _function(self, function: types.FunctionType) -> None:
        if self._met(function):
            return
        code = function.__code__
        self._key.append(id(code))
        if id(code) not in _codes:
            self._read(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell
                self._key.append("empty")
                continue
            self._visit(content, ("cell", cell, name))
        if function.__defaults__:
            self._items(function, function.__defaults__)
        if function.__kwdefaults__:
            self._items(function, function.__kwdefaults__)
        for name, value in function.__dict__.items():
            if name in _names:
                self._key.append(name)
                self._fixed(value)
        scope = function.__globals__
        if is_of_library(scope.get("__name__", "")):
            return
        for name in _codes[id(code)][1]:
            value = scope.get(name, _missing)
            if value is not _missing:
                self._visit(value, ("global", scope, name))
        for name in _codes[id(code)][2]:  # those that are imported when it runs
            self._fixed(sys.modules.get(name))
        self.opaque |= _codes[id(code)][3]

    def _read(self, code: types.CodeType) -> None:
        """Notes the names that new code reads; its inner functions are part of it."""
        scope: list[str] = []
        modules: list[str] = []
        attributes: list[str] = []
        waiting = [code]
        while waiting:
            one = waiting.pop()
            for step in dis.get_instructions(one):
                by_name = {"LOAD_GLOBAL": scope, "LOAD_NAME": scope, "IMPORT_NAME": modules}
                if isinstance(step.argval, str) and step.opname.startswith(("LOAD_", "IMPORT_")):
                    by_name.get(step.opname, attributes).append(step.argval)
            waiting += [x for x in one.co_consts if isinstance(x, types.CodeType)]
        _codes[id(code)] = (
            code,
            tuple(dict.fromkeys(scope)),
            tuple(dict.fromkeys(modules)),
            not _REFLECTION.isdisjoint((*scope, *attributes)),
        )
        self._unread |= not _names.issuperset(attributes)
        _names.update(attributes)

    def _items(self, owner: Any, items: Any) -> None:
        """The elements of a sequence, or of a dict, that an object holds."""
        if owner is items and self._met(items):
            return
        self._key.append((type(items), len(items)))
        if len(items) > MOST_ELEMENTS:
            self.opaque = True
            return
        for at, item in items.items() if isinstance(items, dict) else enumerate(items):
            if isinstance(items, dict):
                self._key.append(at)
            self._visit(item, ("item", owner, at))

    def _object(self, value: Any) -> None:
        """The attributes of an instance that known code may read, and the methods of its class."""
        if not self._met(value):
            self._attributes(value)

    def _fixed_attributes(self, value: Any) -> None:
        """The attributes of an object that is replaced as a sequence or a dict."""
        before, self._constant = self._constant, True
        self._attributes(value)
        self._constant = before

    def _attributes(self, value: Any) -> None:
        self._same(type(value))
        for name, content in attributes(value):
            self._key.append(name)
            self._visit(content, ("attribute", value, name))
        for kind in type(value).__mro__:
            if not is_library(kind):
                self._members(kind)
            elif kind not in _OPEN and not issubclass(kind, torch.nn.Module):
                self.opaque = True  # such as a deque, whose elements are no attributes

    def _class(self, owner: type) -> None:
        """What a class has of its own and by its bases, and what its class has; all as it is."""
        before, self._constant = self._constant, True
        metaclass: type = type(owner)
        for kind in (*owner.__mro__, *metaclass.__mro__):
            if not is_library(kind):
                self._members(kind)
        self._constant = before

    def _members(self, owner: Any) -> None:
        """What a module, or a class, of the user's has by names that known code reads.

        Methods that operators call have no such names.
        """
        if self._met(owner):
            return
        for name, content in list(vars(owner).items()):
            is_function = type(content) is types.FunctionType
            is_special = is_function and name[:2] == name[-2:] == "__"
            if name not in _names and not (is_special and name not in _NOT_COMPUTING):
                continue
            self._key.append(name)
            is_replaced = is_function or isinstance(owner, types.ModuleType)
            if is_replaced and (name == "__call__" or not is_special):
                self._visit(content, None)
            else:
                function = content.fget if isinstance(content, property) else content
                self._fixed(getattr(function, "__func__", function))


def place_key(place: Place) -> Place:
    """A place as a key: what holds the value by its id."""
    kind, owner, *rest = place
    return kind, id(owner), *rest


def has_attributes(value: Any) -> bool:
    """Whether a value is an instance whose attributes can be looked at."""
    return hasattr(value, "__dict__") or bool(slots(type(value)))


def slots(kind: type) -> tuple[str, ...]:
    """The names of a class's slots, if it is the user's."""
    known = _slots_of.get(kind)
    if known is None:
        found: list[str] = []
        for one in () if is_library(kind) else kind.__mro__:
            names = vars(one).get("__slots__", ())
            found += [names] if isinstance(names, str) else names
        known = tuple(name for name in found if not name.startswith("__"))
        _slots_of[kind] = known
    return known


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that known code may read; those of a torch module are in dicts of it."""
    held = [vars(value)] if hasattr(value, "__dict__") else []
    if isinstance(value, torch.nn.Module):
        held += [vars(value)[name] for name in ("_parameters", "_buffers", "_modules")]
    for attributes in held:
        for name, content in attributes.items():
            if name in _names:
                yield name, content
    for name in slots(type(value)):
        if name in _names and hasattr(value, name):
            yield name, getattr(value, name)


def is_library(value: Any) -> bool:
    """Whether a module, a class or a function is a library's."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return is_of_library(name or "")


@functools.lru_cache(4096)
def is_of_library(module: str) -> bool:
    """Whether a module is a library's; one of the user's may have the name of one of Python's."""
    root = module.partition(".")[0]
    if root in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(root), "__file__", None)
    is_pythons = file is None or (file.startswith(_STDLIB) and "site-packages" not in file)
    return root in sys.stdlib_module_names and is_pythons and root != "__main__"
