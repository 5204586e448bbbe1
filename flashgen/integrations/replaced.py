"""Replaced: a function with other values in the places of some that it captures."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from flashgen.integrations.captures import (
    NAMED,
    PLAIN,
    Place,
    attributes,
    globals_read,
    has_attributes,
    is_library,
    is_of_library,
    is_read,
    place_key,
    slots,
)


class Replaced:
    """Makes functions again, with other values in the places of some.

    Args:
        tensors: by the id of a captured tensor, what takes its place.
        numbers: by the place of a number, what takes it.
    """

    def __init__(self, tensors: Mapping[int, Any], numbers: Mapping[Place, Any]) -> None:
        self._tensors, self._numbers = tensors, numbers
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []

    def __call__(self, value: Any) -> Any:
        """A function that is like ``value``, and captures the new values."""
        return self._of(value, None)

    def _of(self, value: Any, place: Place | None) -> Any:
        if id(value) in self._tensors:
            return self._tensors[id(value)]
        if type(value) in (int, float):
            return value if place is None else self._numbers.get(place_key(place), value)
        if id(value) in self._made:
            return self._made[id(value)]
        made = self._made_of(value)
        self._made[id(value)] = made
        self._kept.append(value)
        return made

    def _made_of(self, value: Any) -> Any:
        if type(value) is types.FunctionType:
            return self._function(value)
        if type(value) is types.MethodType:
            return types.MethodType(self._of(value.__func__, None), self._of(value.__self__, None))
        if type(value) is functools.partial:
            arguments = self._items(value, value.args)
            return functools.partial(
                self._of(value.func, None), *arguments, **self._items(value, value.keywords)
            )
        if isinstance(value, tuple | list | dict):
            return self._items(value, value)
        if isinstance(value, types.ModuleType) and not is_library(value):
            return self._module(value)
        if isinstance(value, NAMED) or type(value) in PLAIN or not has_attributes(value):
            return value
        return self._object(value)

    def _function(self, function: types.FunctionType) -> Any:
        scope = function.__globals__
        is_users = not is_of_library(scope.get("__name__", ""))
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        made = types.FunctionType(
            function.__code__, self._scope(scope) if is_users else scope, function.__name__, None,
            cells,
        )  # fmt: skip
        self._made[id(function)] = made  # it may hold itself
        made.__dict__.update(function.__dict__)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        if function.__defaults__:
            made.__defaults__ = self._items(function, function.__defaults__)
        if function.__kwdefaults__:
            made.__kwdefaults__ = self._items(function, function.__kwdefaults__)
        names = function.__code__.co_freevars
        for name, new, old in zip(names, cells, function.__closure__ or (), strict=True):
            try:
                new.cell_contents = self._of(old.cell_contents, ("cell", old, name))
            except ValueError:
                continue
        for name in globals_read(function.__code__) if is_users else ():
            if name in scope:
                made.__globals__[name] = self._of(scope[name], ("global", scope, name))
        return made

    def _scope(self, scope: dict[str, Any]) -> dict[str, Any]:
        """The copy of a module's globals."""
        key = -id(scope)
        if key not in self._made:
            self._made[key] = dict(scope)
            self._kept.append(scope)
        made: dict[str, Any] = self._made[key]
        return made

    def _items(self, owner: Any, items: Any) -> Any:
        if isinstance(items, dict):
            found = {at: self._of(item, ("item", owner, at)) for at, item in items.items()}
            if all(found[at] is item for at, item in items.items()):
                return items
            made = copy.copy(items)
            made.update(found)
            return made
        new = [self._of(item, ("item", owner, at)) for at, item in enumerate(items)]
        if all(one is item for one, item in zip(new, items, strict=True)):
            return items
        if type(items) in (tuple, list):
            return type(items)(new)
        if isinstance(items, tuple) and hasattr(items, "_make"):  # a named tuple
            return items._make(new)
        return items if isinstance(items, tuple) else type(items)(new)

    def _module(self, module: types.ModuleType) -> types.ModuleType:
        made = types.ModuleType(module.__name__)
        made.__dict__.update(module.__dict__)
        self._made[id(module)] = made
        for name in list(filter(is_read, vars(module))):
            setattr(made, name, self._of(getattr(module, name), None))
        return made

    def _object(self, value: Any) -> Any:
        try:
            made = copy.copy(value)
        except Exception:
            return value
        if made is value:
            return value
        self._made[id(value)] = made
        held = {
            name: self._of(content, ("attribute", value, name))
            for name, content in list(attributes(value))
        }
        for kind in type(value).__mro__:
            for name, content in () if is_library(kind) else list(vars(kind).items()):
                if is_read(name) and type(content) is types.FunctionType:
                    held.setdefault(name, types.MethodType(self._of(content, None), made))
                elif id(content) in self._tensors:
                    held.setdefault(name, self._tensors[id(content)])
        for name, content in held.items():
            if hasattr(made, "__dict__") and name not in slots(type(value)):
                made.__dict__[name] = content
            elif name in slots(type(value)):
                object.__setattr__(made, name, content)
        called = inspect.getattr_static(type(value), "__call__", None)
        if type(called) is not types.FunctionType or is_library(called):
            return made  # a library's function calls what `made` holds
        return _Called(made, self._of(called, None))


class _Called:
    """An object that is called as a function of its class, whose globals are others."""

    def __init__(self, made: Any, function: Callable[..., Any]) -> None:
        self._made, self._function = made, function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(self._made, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)
